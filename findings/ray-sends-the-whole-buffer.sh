#!/usr/bin/env bash
# Ray: one row of a torch buffer costs as much as the buffer, ten rows ten times as much, and ties come apart.
#
# An expert would guess: ray.put(buffer[0]) stores the row's 4 kB, as it does for a NumPy array; a list of rows that
#   share a buffer stores it once at most (pickle knows objects it has seen).
# Versions: ray 2.60.0, torch 2.13.0 (CPU), NumPy 2.4.6.
# Behaviour: a tensor is pickled with the whole storage it looks into, and the storage once for each tensor. A row of
#   a 4 MB buffer takes 4 MB of the object store, a list of ten rows 40 MB. Two detached tensors that share memory
#   arrive as two copies, so an in-place change of one no longer shows in the other. NumPy rows take their own size; a
#   clone() of the row too; the same tensor object twice stays one.
# What it means: a rollout worker that returns per-episode views of its buffer sends, for 64 episodes, 64 buffers; the
#   object store fills with copies. clone() before sending, or send NumPy arrays.
# Output seen (bytes of the serialised object):
#   row of a torch buffer of 4,000,000 bytes: about 4,000,000; its clone: about 4,000; list of ten rows: about 40,000,000
#   row of a NumPy array of 4,000,000 bytes: about 4,000
#   two views of one tensor: before sending shared, after it not; one tensor twice: shared
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
pip=("$work/venv/bin/pip" install -q --no-compile)
{ "${pip[@]}" torch==2.13.0 && "${pip[@]}" ray==2.60.0 numpy==2.4.6; } >"$work/pip.log" 2>&1 ||
  { cat "$work/pip.log"; exit 2; } # torch's CPU build suffices
"$work/venv/bin/python" - <<'PY'
import numpy as np
import ray
import torch

ray.init(num_cpus=1, logging_level="ERROR", log_to_driver=False, include_dashboard=False, object_store_memory=200_000_000)
context = ray._private.worker.global_worker.get_serialization_context()


def measure(value):
    return context.serialize(value).total_bytes


buffer, array = torch.zeros(1000, 1000), np.zeros((1000, 1000), np.float32)
row, clone, rows = measure(buffer[0]), measure(buffer[0].clone()), measure([buffer[i] for i in range(10)])
numpy_row = measure(array[0])
rounded = [round(size, -6 if size > 1e6 else -3) for size in (row, clone, rows, numpy_row)]
print(f"row of a torch buffer of 4,000,000 bytes: about {rounded[0]:,}; its clone: about {rounded[1]:,}; list of ten rows: about {rounded[2]:,}")
print(f"row of a NumPy array of 4,000,000 bytes: about {rounded[3]:,}")
assert rounded == [4_000_000, 4_000, 40_000_000, 4_000], "the behaviour changed"
whole = torch.ones(4)
first, second = ray.get(ray.put((whole, whole[:2])))
first[0] = 5
same, again = ray.get(ray.put((whole, whole)))
same[0] = 5
apart, kept = second[0].item() == 1, again[0].item() == 5
print(f"two views of one tensor: before sending shared, after it {'not' if apart else 'shared'}; one tensor twice: {'shared' if kept else 'not'}")
assert apart and kept, "the behaviour changed"
ray.shutdown()
PY

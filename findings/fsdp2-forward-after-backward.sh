#!/usr/bin/env bash
# FSDP2: a pass without gradients between backward and optimizer.step() hides that step from the next pass.
#
# An expert would guess: a sharded module computes with its sharded weights. optimizer.step() changes them, so the
#   next forward pass gathers the new values, whatever was computed before the step; a no_grad pass has no side
#   effects.
# Versions: torch 2.13.0 (CPU, gloo, two ranks), NumPy 2.4.6.
# Behaviour: the root of fully_shard keeps the gathered weights after a forward pass, since a backward pass usually
#   follows at once. A no_grad pass (a second look at the KL divergence, a value estimate, a log line) has no backward
#   pass that frees them. optimizer.step() then updates the shards, and the next forward pass finds gathered weights,
#   does not gather again and computes with the old ones. Submodules with their own fully_shard are gathered again, so
#   the pass mixes new blocks with an old root (embeddings, heads): weights that never existed together. No warning.
#   module.reshard() after the no_grad pass, or set_reshard_after_forward(True) for the root, cures it.
# What it means: an early stop by KL after each update, or an evaluation right after the step, judges old or mixed
#   weights, and the ratio of the first PPO pass is taken against the wrong policy. A run on one GPU is right.
# Output seen:
#   one group, plain:                     output before the step 0.180171, after -0.218952, true -0.218952
#   one group, no_grad pass between:      output before the step 0.180171, after 0.180171, true -0.218952
#   one group, no_grad pass and reshard:  output before the step 0.180171, after -0.218952, true -0.218952
#   block sharded too, no_grad between:   output before the step 0.180171, after 0.007785, true -0.218952
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export TMPDIR=$work
python3 -m venv "$work/venv"
pip=("$work/venv/bin/pip" install -q --no-compile)
{ "${pip[@]}" torch==2.13.0 && "${pip[@]}" numpy==2.4.6; } >"$work/pip.log" 2>&1 ||
  { cat "$work/pip.log"; exit 2; } # torch's CPU build suffices
cat >"$work/finding.py" <<'PY'
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.block(x).relu())


def run_step(mesh, shard_block, between, reshard):
    torch.manual_seed(0)
    network = Network()
    if shard_block:
        fully_shard(network.block, mesh=mesh)
    fully_shard(network, mesh=mesh)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    x = torch.ones(2, 4)
    output = network(x)
    output.sum().backward()
    if between:
        with torch.no_grad():
            network(x)
    if reshard:
        network.reshard()
    optimizer.step()
    with torch.no_grad():
        after = network(x)[0].item()
    plain = Network()
    plain.load_state_dict({name: weight.full_tensor() for name, weight in network.state_dict().items()})
    return output[0].item(), after, plain(x)[0].item()


def work(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    cases = {
        "one group, plain:": (False, False, False),
        "one group, no_grad pass between:": (False, True, False),
        "one group, no_grad pass and reshard:": (False, True, True),
        "block sharded too, no_grad between:": (True, True, False),
    }
    right = {name: abs(seen[1] - seen[2]) < 1e-6 for name, seen in ((n, run_step(mesh, *c)) for n, c in cases.items())}
    for name, case in cases.items():
        before, after, true = run_step(mesh, *case)
        if rank == 0:
            print(f"{name:37s} output before the step {before:.6f}, after {after:.6f}, true {true:.6f}")
        if name == "one group, no_grad pass between:":
            assert after == before and abs(before - true) > 0.1, "the behaviour changed"
    assert list(right.values()) == [True, False, True, False], "the behaviour changed"
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    processes.spawn(work, (sys.argv[1],), nprocs=2)
PY
OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/finding.py" "$work"

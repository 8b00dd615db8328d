#!/usr/bin/env bash
# NumPy: a generator whose state is restored hands out the children that it handed out before.
#
# An expert would guess: bit_generator.state is all of a generator. A checkpoint that saves it and restores it into
#   default_rng(seed) continues as if nothing had happened, also for generators that are spawned later.
# Versions: NumPy 2.4.6.
# Behaviour: spawn() derives children from the seed sequence and a counter of earlier children. Neither is in `state`:
#   drawing goes on exactly, while spawn() begins again with child 0. If the state goes into a generator with another
#   seed, its children are those of that other seed. Pickling or deep-copying the generator keeps the counter.
# What it means: a run that spawns a generator for each new episode or worker and is resumed from `state` repeats the
#   first episodes' noise, start states and augmentations. A test of the resume that only draws numbers passes. Save
#   the pickled generator, or bit_generator.seed_seq with n_children_spawned.
# Output seen (the first numbers of the next draw, and of the child that is spawned next; two were spawned before):
#   went through:        draws 0.4331, spawns 0.0556: child 2
#   state restored:      draws 0.4331, spawns 0.5414: child 0
#   state in seed 4:     draws 0.4331, spawns 0.9035: child 0 of seed 4
#   pickled:             draws 0.4331, spawns 0.0556: child 2
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export TMPDIR=$work
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile numpy==2.4.6 >"$work/pip.log" 2>&1 || { cat "$work/pip.log"; exit 2; }
"$work/venv/bin/python" - <<'PY'
import pickle

import numpy as np

children = {seed: [child.random() for child in np.random.default_rng(seed).spawn(5)] for seed in (3, 4)}
generator = np.random.default_rng(3)
generator.random(5)
generator.spawn(2)
state, pickled = generator.bit_generator.state, pickle.dumps(generator)


def restored(seed):
    fresh = np.random.default_rng(seed)
    fresh.bit_generator.state = state
    return fresh


seen = []
for name, one, seed in (
    ("went through", generator, 3),
    ("state restored", restored(3), 3),
    ("state in seed 4", restored(4), 4),
    ("pickled", pickle.loads(pickled), 3),
):
    drawn, spawned = one.random(), one.spawn(1)[0].random()
    child = children[seed].index(spawned)
    print(f"{name + ':':20s} draws {drawn:.4f}, spawns {spawned:.4f}: child {child}{' of seed 4' * (seed == 4)}")
    seen.append((drawn, child))
assert len({drawn for drawn, _ in seen}) == 1, "the behaviour changed"
assert [child for _, child in seen] == [2, 0, 0, 2], "the behaviour changed"
PY

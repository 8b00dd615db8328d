#!/usr/bin/env bash
# torch's CPU generator uses only the lower 32 bits of a seed.
#
# An expert would guess: manual_seed takes a 64-bit number (initial_seed returns all of it, and negative numbers are
#   mapped), so 64-bit hashes of (run, role, episode, step) are as good as unique: seeds collide after 2^32 keys.
# Versions: torch 2.13.0 (CPU), NumPy 2.4.6.
# Behaviour: the Mersenne twister of the CPU is filled from the lower 32 bits. Seeds that differ in the upper 32 alone
#   give equal numbers from rand, randn, randint, randperm and multinomial, and equal initial weights, while
#   initial_seed() and the saved state differ. NumPy's default_rng uses every bit. Among N keyed streams a pair is
#   then equal with probability one half at N = 77,000, and not at 5 billion.
# What it means: keys that put the episode into the upper half (`seed | episode << 32`) repeat the same "random" noise
#   in every episode on a CPU; hashed keys repeat now and then, which no test on a GPU finds. Fold a key into 32 bits
#   knowingly, or draw with a counter-based generator.
# Output seen:
#   seeds 7 and 7 + 5 * 2**32: rand equal, randn equal, randint equal, randperm equal, multinomial equal, weights equal
#   initial_seed: 7 and 21474836487; NumPy's default_rng: different
#   episode << 32, 1,000 episodes: 1 different streams
#   100,000 hashed 64-bit keys: 100,000 seeds, streams of the CPU that occur twice: 4 (NumPy: 0)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
pip=("$work/venv/bin/pip" install -q --no-compile)
{ "${pip[@]}" torch==2.13.0 && "${pip[@]}" numpy==2.4.6; } >"$work/pip.log" 2>&1 ||
  { cat "$work/pip.log"; exit 2; } # torch's CPU build suffices
"$work/venv/bin/python" - <<'PY'
import hashlib

import numpy as np
import torch


def weights():
    return torch.nn.Linear(3, 3).weight.detach()


draws = {
    "rand": lambda: torch.rand(9),
    "randn": lambda: torch.randn(40),
    "randint": lambda: torch.randint(1000, (9,)),
    "randperm": lambda: torch.randperm(30),
    "multinomial": lambda: torch.multinomial(torch.ones(4, 50), 1),
    "weights": weights,
}
first, second = 7, 7 + 5 * 2**32
same = {}
for name, draw in draws.items():
    pair = [(torch.manual_seed(seed), draw())[1] for seed in (first, second)]
    same[name] = torch.equal(*pair)
print(f"seeds 7 and 7 + 5 * 2**32: {', '.join(f'{n} ' + ('equal' if s else 'different') for n, s in same.items())}")
assert all(same.values()), "the behaviour changed"
seeds = [torch.Generator().manual_seed(seed).initial_seed() for seed in (first, second)]
numpy_same = np.array_equal(*(np.random.default_rng(seed).random(9) for seed in (first, second)))
print(f"initial_seed: {seeds[0]} and {seeds[1]}; NumPy's default_rng: {'equal' if numpy_same else 'different'}")
assert seeds == [first, second] and not numpy_same, "the behaviour changed"


def count_streams(keys):
    generator = torch.Generator()
    return len({tuple(torch.randint(2**62, (2,), generator=generator.manual_seed(key)).tolist()) for key in keys})


packed = count_streams(episode << 32 for episode in range(1000))
print(f"episode << 32, 1,000 episodes: {packed} different streams")
assert packed == 1, "the behaviour changed"
keys = [int.from_bytes(hashlib.sha256(f"run/{n}".encode()).digest()[:8], "big") for n in range(100_000)]
twice = len(keys) - count_streams(keys)
numpy_twice = len(keys) - len({int(np.random.PCG64(key).random_raw()) for key in keys})
print(f"100,000 hashed 64-bit keys: {len(set(keys)):,} seeds, streams of the CPU that occur twice: {twice} (NumPy: {numpy_twice})")
assert len(set(keys)) == len(keys) and twice > 0 and numpy_twice == 0, "the behaviour changed"
PY

#!/usr/bin/env bash
# torch: the noise of one sample is not the beginning of the noise of many: randn changes its method at 16 numbers.
#
# An expert would guess: with one seed, randn(n) begins with the numbers of randn(m) for m < n, as rand does and as
#   NumPy does: numbers are drawn one after the other.
# Versions: torch 2.13.0 (CPU), NumPy 2.4.6.
# Behaviour: up to 15 numbers are drawn one by one. From 16 on uniform numbers fill the tensor and are turned into
#   normal ones in blocks of 16; if the size is not a multiple of 16, the last 16 are drawn again and written over. So
#   randn(15) and randn(16) have nothing in common, randn(16) and randn(17) only their first number, and randn(16) is
#   the beginning of randn(32) but randn(24) only up to its eighth. Drawing 2 x 7 and 3 x 7 numbers gives other noise
#   for the first two samples. rand has no such seam.
# What it means: the exploration noise or initial flow noise of environment 0 depends on how many environments are in
#   its batch (7 joints x 2 samples is below the seam, x 3 above it), so evaluation with another batch size, a smaller
#   last batch or a resumed lane is another experiment with "the same seed". Draw per sample, from its own generator.
# Output seen (how many of the first numbers are equal, same seed):
#   randn: 8 in 15: 8, 15 in 16: 0, 16 in 17: 1, 16 in 32: 16, 24 in 32: 8, 14 in 21: 0
#   rand:  8 in 15: 8, 15 in 16: 15, 16 in 17: 16, 16 in 32: 16, 24 in 32: 24, 14 in 21: 14
#   NumPy: 8 in 15: 8, 15 in 16: 15, 16 in 17: 16, 16 in 32: 16, 24 in 32: 24, 14 in 21: 14
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
pip=("$work/venv/bin/pip" install -q --no-compile)
{ "${pip[@]}" torch==2.13.0 && "${pip[@]}" numpy==2.4.6; } >"$work/pip.log" 2>&1 ||
  { cat "$work/pip.log"; exit 2; } # torch's CPU build suffices
"$work/venv/bin/python" - <<'PY'
import numpy as np
import torch

PAIRS = ((8, 15), (15, 16), (16, 17), (16, 32), (24, 32), (14, 21))
draws = {
    "randn:": lambda size: torch.randn(size, generator=torch.Generator().manual_seed(0)).numpy(),
    "rand:": lambda size: torch.rand(size, generator=torch.Generator().manual_seed(0)).numpy(),
    "NumPy:": lambda size: np.random.default_rng(0).standard_normal(size),
}
for name, draw in draws.items():
    equal = []
    for small, large in PAIRS:
        same = draw(small) == draw(large)[:small]
        equal.append(int(same.argmin()) if not same.all() else small)
    print(f"{name:6s} " + ", ".join(f"{s} in {l}: {e}" for (s, l), e in zip(PAIRS, equal)))
    expected = [8, 0, 1, 16, 8, 0] if name == "randn:" else [small for small, _ in PAIRS]
    assert equal == expected, "the behaviour changed"
PY

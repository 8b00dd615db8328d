#!/usr/bin/env bash
# torch: antialias=True changes bicubic resizing even where nothing is made smaller.
#
# An expert would guess: antialiasing widens the kernel when an image shrinks and does nothing when it grows; so
#   interpolate(mode="bicubic") with and without antialias agree when a position table or image is enlarged, as the
#   bilinear mode does.
# Versions: torch 2.13.0 (CPU), NumPy 2.4.6, Pillow 13.0.0.
# Behaviour: the two are different kernels: Keys' parameter is -0.75 without antialiasing (as in OpenCV) and -0.5 with
#   it (as in Pillow and JAX). Enlarged to twice the size, an edge of height 1 overshoots by 0.106 instead of 0.070.
#   At sizes with an exact answer (same size) and in the bilinear mode the flag makes no difference.
# What it means: a ViT's position table that is resized for larger images, or the images themselves, differ between
#   two implementations that both say "bicubic, half-pixel centres"; the weights were trained with one of them.
#   Shrinking hides it among the differences that one expects.
# Output seen (an edge 0, 0, 0, 0, 1, 1, 1, 1, enlarged to 16):
#   bicubic:  overshoot 0.1055 without antialias, 0.0703 with; they differ by up to 0.0352
#   bilinear: they differ by less than 0.000001
#   Pillow's bicubic is that with antialias: differs by less than 0.000001, from the other by 0.0352
#   weights of the four neighbours at a quarter: -0.1055, 0.8789, 0.2617, -0.0352 without, -0.0703, 0.8672, 0.2266, -0.0234 with
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
pip=("$work/venv/bin/pip" install -q --no-compile)
{ "${pip[@]}" torch==2.13.0 && "${pip[@]}" numpy==2.4.6 pillow==13.0.0; } >"$work/pip.log" 2>&1 ||
  { cat "$work/pip.log"; exit 2; } # torch's CPU build suffices
"$work/venv/bin/python" - <<'PY'
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

edge = torch.tensor([0.0] * 4 + [1.0] * 4).expand(8, 8).contiguous()


def enlarge(image, mode, antialias):
    return F.interpolate(image[None, None], size=(16, 16), mode=mode, antialias=antialias)[0, 0]


plain, filtered = (enlarge(edge, "bicubic", flag) for flag in (False, True))
apart = (plain - filtered).abs().max().item()
over = [result.max().item() - 1 for result in (plain, filtered)]
print(f"bicubic:  overshoot {over[0]:.4f} without antialias, {over[1]:.4f} with; they differ by up to {apart:.4f}")
assert apart > 0.03 and over[0] > over[1] + 0.03, "the behaviour changed"
linear = (enlarge(edge, "bilinear", False) - enlarge(edge, "bilinear", True)).abs().max().item()
assert linear < 1e-6, "the behaviour changed"
print("bilinear: they differ by less than 0.000001")
pillow = torch.from_numpy(np.asarray(Image.fromarray(edge.numpy()).resize((16, 16), Image.Resampling.BICUBIC)).copy())
assert (pillow - filtered).abs().max().item() < 1e-6, "the behaviour changed"
other = (pillow - plain).abs().max().item()
print(f"Pillow's bicubic is that with antialias: differs by less than 0.000001, from the other by {other:.4f}")
taps = []
for flag in (False, True):
    rows = torch.eye(8)[:, None, None, :].expand(8, 1, 2, 8)  # one impulse a row: its share of output pixel 8
    out = F.interpolate(rows, size=(2, 16), mode="bicubic", antialias=flag)[:, 0, 0, 7]
    taps.append([round(float(share), 4) for share in out[2:6]])
text = [", ".join(f"{share:.4f}" for share in shares) for shares in taps]
print(f"weights of the four neighbours at a quarter: {text[0]} without, {text[1]} with")
same = F.interpolate(edge[None, None], size=(8, 8), mode="bicubic") - edge
assert same.abs().max() < 1e-6 and taps[0] != taps[1], "the behaviour changed"
PY

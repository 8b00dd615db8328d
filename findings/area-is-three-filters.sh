#!/usr/bin/env bash
# OpenCV's INTER_AREA, Pillow's BOX and torch's "area" are three filters unless the sizes divide.
#
# An expert would guess: all three average the source pixels under each target pixel, the filter to make a frame
#   smaller without aliasing; they agree within the rounding of uint8.
# Versions: OpenCV 4.14.0 (opencv-python-headless 4.14.0.94), Pillow 13.0.0, torch 2.13.0 (CPU), NumPy 2.4.6.
# Behaviour: only OpenCV weights pixels at the border by the part that is covered. Pillow takes each pixel whole or
#   not at all, by whether its centre is inside, so from 480 to 224 (2.14 source pixels each) it averages 2 or 3
#   pixels in turn. torch averages from floor to ceil, 3 or 4 pixels that overlap with the neighbour's. From 480 to
#   240 all agree.
# What it means: a policy that was trained on frames "resized by area" to 224 sees other frames when it is served with
#   another library: fine stripes differ by a fifth of the range, and what is tested at 256 to 128 shows nothing.
# Output seen (largest and mean difference from the exact average, in levels of 255):
#   480 to 240, noise:        OpenCV 0 and 0.2, Pillow 1 and 0.5, torch 0 and 0.0
#   480 to 240, stripes of 4: OpenCV 0 and 0.0, Pillow 0 and 0.0, torch 0 and 0.0
#   480 to 224, noise:        OpenCV 0 and 0.2, Pillow 66 and 10.3, torch 81 and 12.5
#   480 to 224, stripes of 4: OpenCV 0 and 0.0, Pillow 51 and 14.0, torch 68 and 15.8
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export TMPDIR=$work
python3 -m venv "$work/venv"
pip=("$work/venv/bin/pip" install -q --no-compile)
{ "${pip[@]}" torch==2.13.0 &&
  "${pip[@]}" opencv-python-headless==4.14.0.94 pillow==13.0.0 numpy==2.4.6; } >"$work/pip.log" 2>&1 ||
  { cat "$work/pip.log"; exit 2; } # torch's CPU build suffices
"$work/venv/bin/python" - <<'PY'
import cv2
import numpy as np
import torch
from PIL import Image


def averages(source, target):
    """The share of each source pixel in each target pixel, (target, source)."""
    edges = np.arange(target + 1) * source / target
    pixel = np.arange(source)
    covered = np.minimum(edges[1:, None], pixel + 1) - np.maximum(edges[:-1, None], pixel)
    return covered.clip(0) * target / source


def torch_area(image, size):
    planes = torch.from_numpy(image).permute(2, 0, 1)[None].double()
    return torch.nn.functional.interpolate(planes, size=(size, size), mode="area")[0].permute(1, 2, 0).numpy()


libraries = {
    "OpenCV": lambda image, size: cv2.resize(image, (size, size), interpolation=cv2.INTER_AREA),
    "Pillow": lambda image, size: np.asarray(Image.fromarray(image).resize((size, size), Image.Resampling.BOX)),
    "torch": torch_area,
}
noise = np.random.default_rng(0).integers(0, 256, (480, 480, 3)).astype(np.uint8)
stripes = np.broadcast_to((np.arange(480) // 4 % 2 * 255).astype(np.uint8)[None, :, None], noise.shape).copy()
seen = {}
for size in (240, 224):
    for title, image in (("noise", noise), ("stripes of 4", stripes)):
        weights = averages(480, size)
        exact = np.stack([weights @ plane @ weights.T for plane in image.astype(float).transpose(2, 0, 1)], axis=-1)
        parts = []
        for name, resize in libraries.items():
            error = abs(resize(image, size) - exact)
            seen[size, title, name] = error.max()
            parts.append(f"{name} {error.max():.0f} and {error.mean():.1f}")
        print(f"480 to {size}, {title + ':':13s} {', '.join(parts)}")
assert max(value for (size, *_), value in seen.items() if size == 240) < 1.01, "the behaviour changed"
for title in ("noise", "stripes of 4"):
    assert seen[224, title, "OpenCV"] < 1.01, "the behaviour changed"
    assert min(seen[224, title, "Pillow"], seen[224, title, "torch"]) > 40, "the behaviour changed"
PY

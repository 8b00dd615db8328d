#!/usr/bin/env bash
# Pillow 13 resizes some images vertically first: other pixels than Pillow 11 from the same call.
#
# An expert would guess: Pillow resizes horizontally, rounds to 8 bits, then resizes vertically. A policy's
#   preprocessing is thus fixed by filter and size, and a frame gives the same bytes under each version.
# Versions: Pillow 11.3.0 and 13.0.0, NumPy 2.4.6.
# Behaviour: with 8 bits between the passes the order shows. Pillow 11.3.0 always does the horizontal pass first.
#   Pillow 13.0.0 chooses: upright frames beyond about 2:3, and those that get wider while they get lower, are done
#   vertically first. A camera frame of 480 x 640 (width x height) is as before, one of 720 x 1280 is not. None of the
#   square frames that were tried changed.
# What it means: recorded resized frames, cached features and golden files of a robot with an upright camera do not
#   repeat after an upgrade, by up to 19 levels on noise; frames in landscape, with which one tests, do. A
#   reimplementation of Pillow (in CUDA, in JAX) needs to know the version.
# Output seen (largest difference from horizontal first and from vertical first, each pass made by itself):
#   Pillow 11.3.0: 640 x 480 0 and 4, 480 x 640 0 and 4, 720 x 1280 0 and 1, 200 x 300 0 and 19, 100 x 900 0 and 11
#   Pillow 13.0.0: 640 x 480 0 and 4, 480 x 640 0 and 4, 720 x 1280 1 and 0, 200 x 300 19 and 0, 100 x 900 11 and 0
#   the same image of 200 x 300 in both versions: differs by up to 19 levels in 30% of all values
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/resize.py" <<'PY'
import sys

import numpy as np
import PIL
from PIL import Image

SIZE, CUBIC = (224, 224), Image.Resampling.BICUBIC
draws = np.random.default_rng(0)
line = []
for width, height in ((640, 480), (480, 640), (720, 1280), (200, 300), (100, 900)):
    image = Image.fromarray(draws.integers(0, 256, (height, width, 3), dtype=np.uint8))
    result = np.asarray(image.resize(SIZE, CUBIC)).astype(int)
    horizontal = np.asarray(image.resize((SIZE[0], height), CUBIC).resize(SIZE, CUBIC)).astype(int)
    vertical = np.asarray(image.resize((width, SIZE[1]), CUBIC).resize(SIZE, CUBIC)).astype(int)
    first, second = np.abs(result - horizontal).max(), np.abs(result - vertical).max()
    line.append(f"{width} x {height} {first} and {second}")
    upright = PIL.__version__ == "13.0.0" and (width, height) in ((720, 1280), (200, 300), (100, 900))
    assert (second if upright else first) == 0 < (first if upright else second), "the behaviour changed"
    if (width, height) == (200, 300):
        np.save(f"{sys.argv[1]}/{PIL.__version__}.npy", result)
print(f"Pillow {PIL.__version__}: {', '.join(line)}")
PY
for version in 11.3.0 13.0.0; do
  python3 -m venv "$work/$version"
  "$work/$version/bin/pip" install -q --no-compile numpy==2.4.6 "pillow==$version" >"$work/pip.log" 2>&1 ||
    { cat "$work/pip.log"; exit 2; }
  "$work/$version/bin/python" "$work/resize.py" "$work"
done
"$work/13.0.0/bin/python" - "$work" <<'PY'
import sys

import numpy as np

old, new = (np.load(f"{sys.argv[1]}/{version}.npy") for version in ("11.3.0", "13.0.0"))
share = (old != new).mean()
print(f"the same image of 200 x 300 in both versions: differs by up to {np.abs(old - new).max()} levels in {share:.0%} of all values")
assert share > 0.1, "the behaviour changed"
PY

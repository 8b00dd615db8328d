#!/usr/bin/env bash
# A clip cut without re-encoding: imageio returns more frames than there are, and the surplus was never decoded.
#
# An expert would guess: reading a whole file returns the frames that a player shows, so imread of a clip with 22
#   frames has 22 rows; the header's frame count is that number too.
# Versions: imageio 2.38.1, imageio-ffmpeg 0.8.1, av 18.1.0, NumPy 2.4.6.
# Behaviour: `ffmpeg -ss 2.5 -t 2 -c copy` keeps the frames from the keyframe before the cut, which are needed for
#   decoding, and hides them by an edit list. FFmpeg's decoder drops them. The header counts them: stream.frames and
#   improps say 27. imageio's PyAV plugin allocates 27 frames by the header, decodes 22 and returns the whole array;
#   the last 5 hold what was in memory before, zeros or parts of other arrays. Iterating over the same file gives 22.
# What it means: episodes trimmed by copying end in black frames or noise, where the last actions and the success
#   label are, and are longer than their tables of states. Without a word, and not the same in the next process.
# Output seen:
#   header 27 frames; improps 27; iterated 22; imread 27, of which the first 22 are those of the iteration
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile imageio==2.38.1 imageio-ffmpeg==0.8.1 av==18.1.0 numpy==2.4.6 >"$work/pip.log" 2>&1 ||
  { cat "$work/pip.log"; exit 2; }
cd "$work"
"$work/venv/bin/python" - <<'PY'
import subprocess

import av
import imageio.v3 as iio
import imageio_ffmpeg
import numpy as np

with av.open("whole.mp4", "w") as container:
    stream = container.add_stream("libx264", rate=10)
    stream.width, stream.height, stream.pix_fmt = 96, 96, "yuv420p"
    stream.options = {"g": "20", "bf": "2"}
    for number in range(60):
        frame = av.VideoFrame.from_ndarray(np.full((96, 96, 3), 100 + 2 * number, np.uint8), "rgb24")
        container.mux(stream.encode(frame))
    container.mux(stream.encode())
cut = [imageio_ffmpeg.get_ffmpeg_exe(), "-loglevel", "error", "-ss", "2.5", "-i", "whole.mp4", "-t", "2", "-c", "copy", "cut.mp4"]
subprocess.run(cut, check=True)
with av.open("cut.mp4") as container:
    header = container.streams.video[0].frames
    decoded = sum(1 for _ in container.decode(video=0))
size = iio.improps("cut.mp4", plugin="pyav").shape[0]
iterated = np.stack(list(iio.imiter("cut.mp4", plugin="pyav")))
frames = iio.imread("cut.mp4", plugin="pyav")
count = len(iterated)
print(f"header {header} frames; improps {size}; iterated {count}; imread {len(frames)}, of which ", end="")
print(f"the first {count} are those of the iteration")
assert decoded == count == 22 and len(frames) == header == size == 27, "the behaviour changed"
assert np.array_equal(frames[:count], iterated), "the behaviour changed"
PY

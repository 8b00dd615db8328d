#!/usr/bin/env bash
# decord: the same index is another frame when it is the first one that is asked for.
#
# An expert would guess: VideoReader[i] is exact, the reason to use it instead of seeking by time: index 20 is one
#   frame, whether the 20 before were read or not.
# Versions: decord 0.6.0, av 18.1.0, imageio-ffmpeg 0.8.1, NumPy 2.4.6.
# Behaviour: in a clip that was cut without re-encoding, the frames before the cut are hidden by an edit list.
#   decord's table of indices has them, its decoder does not return them. Read in order (or as one batch), index i is
#   the i-th visible frame, and the last one is repeated for the surplus indices. Read at random, a seek to the second
#   or a later keyframe aligns with the table: index i is then i minus the hidden frames. Time stamps begin at -0.5 s.
# What it means: a loader that draws random frames (shuffled training) pairs an image with the state of half a second
#   later, but only from the second keyframe of an episode on; a loader that reads whole episodes (evaluation, a check
#   by eye) is right.
# Output seen (the number of the frame within the clip):
#   27 indices for 22 visible frames, time stamps from -0.5 s
#   in order:     index 10 is frame 10, 19 is 19, 20 is 20, 22 is 21, 26 is 21
#   each alone:   index 10 is frame 10, 19 is 19, 20 is 15, 22 is 17, 26 is 21
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile decord==0.6.0 imageio-ffmpeg==0.8.1 av==18.1.0 numpy==2.4.6 >"$work/pip.log" 2>&1 ||
  { cat "$work/pip.log"; exit 2; }
cd "$work"
"$work/venv/bin/python" - <<'PY'
import subprocess

import av
import decord
import imageio_ffmpeg
import numpy as np

with av.open("whole.mp4", "w") as container:
    stream = container.add_stream("libx264", rate=10)
    stream.width, stream.height, stream.pix_fmt = 96, 96, "yuv420p"
    stream.options = {"g": "20", "bf": "2", "crf": "1"}
    for number in range(60):
        frame = av.VideoFrame.from_ndarray(np.full((96, 96, 3), 4 * number, np.uint8), "rgb24")
        container.mux(stream.encode(frame))
    container.mux(stream.encode())
cut = [imageio_ffmpeg.get_ffmpeg_exe(), "-loglevel", "error", "-ss", "2.5", "-i", "whole.mp4", "-t", "2", "-c", "copy", "cut.mp4"]
subprocess.run(cut, check=True)
with av.open("cut.mp4") as container:
    shades = np.array([int(f.to_ndarray(format="rgb24")[48, 48, 0]) for f in container.decode(video=0)])


def frame_number(array):
    """Return which visible frame this is: each has its own grey."""
    return int(np.abs(shades - int(array[48, 48, 0])).argmin())


reader = decord.VideoReader("cut.mp4")
start = float(reader.get_frame_timestamp(0)[0])
print(f"{len(reader)} indices for {len(shades)} visible frames, time stamps from {start:.1f} s")
assert len(reader) == 27 and len(shades) == 22 and start < 0, "the behaviour changed"
in_order = [frame_number(reader[index].asnumpy()) for index in range(len(reader))]
alone = [frame_number(decord.VideoReader("cut.mp4")[index].asnumpy()) for index in range(len(reader))]
for name, numbers in (("in order:", in_order), ("each alone:", alone)):
    rest = ", ".join(f"{i} is {numbers[i]}" for i in (19, 20, 22, 26))
    print(f"{name:13s} index 10 is frame {numbers[10]}, {rest}")
assert in_order == [min(i, 21) for i in range(27)], "the behaviour changed"
assert alone[:20] == list(range(20)) and alone[20:] == [i - 5 for i in range(20, 27)], "the behaviour changed"
PY

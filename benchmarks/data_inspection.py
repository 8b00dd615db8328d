"""Processor time of `vla-rl data` on a folder of many episodes.

    python benchmarks/data_inspection.py [--episodes 1000] [--frames 300]

The folder is a LeRobot data set of version 3 with two videos, which is written first. Writing takes longer than the
inspection.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from time import process_time

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from made_recordings import make_recording
from recordings import write_lerobot
from vla_rl.cli.inspect_data import open_recordings
from vla_rl.toolkit.data.inspection.report import inspect_recordings

DIFFERENT = 50
"""Episodes that are computed; the others repeat their numbers and images."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--frames", type=int, default=300)
    parser.add_argument("--side", type=int, default=64, help="side of the images in pixels")
    options = parser.parse_args()
    made = [make_recording(seed, options.frames, options.side) for seed in range(min(DIFFERENT, options.episodes))]
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home) / "data"
        write_lerobot(folder, [made[number % len(made)] for number in range(options.episodes)], 3, video=True)
        before = process_time()
        inspected = inspect_recordings(open_recordings(folder))
        seconds = process_time() - before
    print(
        f"{options.episodes:,} episodes of {options.frames} frames with two videos: {seconds:.1f} processor s, "
        f"{len(inspected.findings)} findings"
    )


if __name__ == "__main__":
    main()

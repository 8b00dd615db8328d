"""The animation in README.md: made from two recordings, small enough for a page, and described in words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import readme_animation as tool
from vla_rl.toolkit.data.lerobot import LeRobotWriter
from vla_rl.toolkit.data.recording import Recording, encode_png

ROOT = Path(__file__).parents[1]
GREEN, RED = tool.OUTCOME[True][1], tool.OUTCOME[False][1]


def write(folder: Path, episodes: Sequence[tuple[str, bool, int]]) -> Path:
    """A recording of episodes (instruction, success, steps), in which the images get lighter."""
    with LeRobotWriter(folder, fps=10, robot="arm") as writer:
        for instruction, success, steps in episodes:
            frames = [np.full((24, 32, 3), 40 + 5 * t, np.uint8) for t in range(steps)]
            writer.add(
                Recording(
                    images={
                        "front": [encode_png(frame) for frame in frames],
                        "wrist": [encode_png(frame) for frame in frames],
                    },
                    sizes={"front": (24, 32), "wrist": (24, 32)},
                    state=np.zeros((steps, 0), np.float32),
                    actions=np.zeros((steps, 2), np.float32),
                    instruction=instruction,
                    success=success,
                )
            )
    return folder


@pytest.fixture
def recordings(tmp_path: Path) -> tuple[Path, Path]:
    before = write(tmp_path / "before", [("push the block", False, 10), ("lift the block", True, 7)])
    return before, write(tmp_path / "after", [("push the block", True, 5), ("lift the block", True, 4)])


def frames_of(file: Path) -> tuple[list[np.ndarray], list[int]]:
    with Image.open(file) as image:
        frames, durations = [], []
        for number in range(image.n_frames):
            image.seek(number)
            frames.append(np.asarray(image.convert("RGB")).astype(int))
            durations.append(int(image.info["duration"]))
        return frames, durations


def has(frame: np.ndarray, side: int, colour: tuple[int, int, int]) -> bool:
    """Whether a half of the image, left or right, has a patch of about this colour."""
    half = np.array_split(frame, 2, axis=1)[side]
    return bool((np.abs(half - colour).max(-1) < 30).sum() > 100)


def test_two_recordings_become_one_animation(recordings, tmp_path):
    out = tmp_path / "animations" / "both.webp"
    tool.assemble(*recordings, out, panel=160, every=3)
    frames, durations = frames_of(out)
    with Image.open(out) as image:
        assert image.format == "WEBP" and image.is_animated and image.info["loop"] == 0
    assert durations == [80, 80, 80, 1600, 80, 80, 1600], "steps 0, 3, 6, 9 of the longer one, then 0, 3, 6"
    outcomes = [
        [
            {(True, False): "success", (False, True): "failure"}.get((has(f, s, GREEN), has(f, s, RED)), "")
            for s in (0, 1)
        ]
        for f in frames
    ]
    first = [["", ""], ["", ""], ["", "success"], ["failure", "success"]]
    assert outcomes == [*first, ["", ""], ["", "success"], ["success", "success"]]
    assert (frames[3][60:120, 60:140].mean() - frames[0][60:120, 60:140].mean()) > 30, "the images got lighter"


def test_labels_are_words_on_the_frames(recordings):
    pair = tuple(next(tool.read_episodes(folder)) for folder in recordings)
    assert [episode.instruction for episode in pair] == ["push the block"] * 2
    frame = np.asarray(tool.draw(pair, every=3, panel=160)[0])
    title, below = frame[:30], frame[-40:]
    for part in (title, below[:, :170], below[:, 180:]):
        assert (part.max(-1) > 120).sum() > 60, "there is text"
    assert tool.wrapped("a long instruction", len, 8) == ["a long", "instruction"]


def test_chosen_episodes_and_another_camera(recordings, tmp_path):
    tool.assemble(*recordings, tmp_path / "one.webp", episodes=[1], camera="wrist", panel=160)
    assert frames_of(tmp_path / "one.webp")[1] == [80, 80, 1600]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"episodes": [2]}, "there is no episode 2; both recordings have 0 to 1"),
        ({"camera": "side"}, "has no camera 'side', but front, wrist"),
        ({"max_mb": 0.0001}, "7 frames take .* MB at quality 20; show fewer --episodes"),
    ],
)
def test_what_cannot_be_drawn_is_said(recordings, tmp_path, changes, message):
    with pytest.raises(SystemExit, match=message):
        tool.assemble(*recordings, tmp_path / "no.webp", panel=160, **changes)
    assert not (tmp_path / "no.webp").exists()


def test_recordings_of_other_states_are_refused(recordings, tmp_path):
    other = write(tmp_path / "other", [("open the door", True, 3)])
    with pytest.raises(SystemExit, match="episode 0 is of two tasks: 'push the block', 'open the door'"):
        tool.assemble(recordings[0], other, tmp_path / "no.webp")
    with pytest.raises(SystemExit, match="holds no recorded episodes"):
        tool.assemble(tmp_path, other, tmp_path / "no.webp")


def test_recordings_of_a_run_are_made_once(recordings, tmp_path, monkeypatch):
    """Before training the weights of the spec play, after it those of the newest checkpoint; with the same overrides."""
    asked = []

    def evaluate(what, *, overrides, record):
        asked.append((what, list(overrides), record))
        write(record, [("push the block", True, 3)])
        return {"success": {"rate": 0.5, "n": 4}}

    monkeypatch.setattr(tool.vla_rl, "evaluate", evaluate)
    run = tmp_path / "run"
    for _ in range(2):
        assert tool.record(run, ["eval.repeats=2"]) == (run / "before-after" / "before", run / "before-after" / "after")
    assert asked == [
        (run / "spec.yaml", ["eval.repeats=2"], run / "before-after" / "before"),
        (run, ["eval.repeats=2"], run / "before-after" / "after"),
    ]


def test_the_command_says_what_it_takes(fork_server):
    result = fork_server.run_python(tool.__file__, "--help", check=True)
    assert "python tools/readme_animation.py runs/" in result.stdout


def test_the_animation_of_the_readme_is_small_moves_and_is_described():
    found = re.search(r"!\[([^\]]+)\]\((docs/images/[\w.-]+)\)", (ROOT / "README.md").read_text())
    assert found is not None and len(found[1]) > 40
    file = ROOT / found[2]
    assert file == tool.OUT and file.stat().st_size < 2_000_000
    with Image.open(file) as image:
        assert image.n_frames > 20 and 400 <= image.width <= 900

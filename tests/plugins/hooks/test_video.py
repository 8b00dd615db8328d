from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from vla_rl.core.events import EpisodeFrames
from vla_rl.core.manager import broadcast
from vla_rl.plugins.hooks.video import plugin
from vla_rl.plugins.hooks.video.config import VideoConfig
from vla_rl.plugins.hooks.video.encoder import encoder_missing
from vla_rl.plugins.hooks.video.recorder import HOLD_SECONDS, OUTCOME, compose_video, write_mp4
from vla_rl.testing.events import a_run, an_episode, an_evaluation


def read(path: Path) -> np.ndarray[Any, Any]:
    reader = imageio_ffmpeg.read_frames(str(path))
    width, height = next(reader)["size"]
    return np.stack([np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in reader])


def test_files_are_named_by_step_episode_and_outcome_and_play(tmp_path: Path) -> None:
    hook: Any = plugin.build(VideoConfig(fps=4.0))
    evaluation = an_evaluation(20, frames=(an_episode(True), an_episode(False)))
    hook.on_eval_end(run=a_run(tmp_path), step=20, evaluation=evaluation)
    names = sorted(path.name for path in (tmp_path / "videos").glob("*.mp4"))
    assert names == ["step_000020_ep0_success.mp4", "step_000020_ep1_failure.mp4"]
    film = read(tmp_path / "videos" / names[0])
    want = compose_video(an_episode(True), 224)
    assert film.shape == (6 + round(4 * HOLD_SECONDS), *want.shape[1:])  # the last frame is held
    assert np.abs(film[5].astype(int) - want[5]).mean() < 6
    listed = json.loads((tmp_path / "videos" / "step_000020.json").read_text())["episodes"]
    said = {"task": "push-red-green", "instruction": "push the red block to the green pad"}
    assert listed == [{"file": name, **said} for name in names]


def test_colours_of_the_film_are_those_of_the_frames(tmp_path: Path) -> None:
    """Flat areas come back within 3 levels; with the numbers of another standard of colours they would be 24 off."""
    colours = np.array([(200, 40, 30), (30, 160, 60), (40, 60, 200), (230, 230, 60), (128, 128, 128), (10, 12, 14)])
    areas = np.repeat(np.repeat(colours.reshape(2, 3, 3), 64, 0), 64, 1).astype(np.uint8)
    write_mp4(tmp_path / "film.mp4", np.stack([areas] * 3), 4.0)
    middles = read(tmp_path / "film.mp4")[:, 32::64, 32::64].astype(int)
    assert np.abs(middles - colours.reshape(2, 3, 3)).max() <= 3


def test_an_evaluation_that_is_repeated_leaves_no_stale_film(tmp_path: Path) -> None:
    hook: Any = plugin.build(VideoConfig())
    for success in (False, True):
        evaluation = an_evaluation(3, frames=(an_episode(success, frames=2),))
        hook.on_eval_end(run=a_run(tmp_path), step=3, evaluation=evaluation)
    assert [path.name for path in (tmp_path / "videos").glob("*.mp4")] == ["step_000003_ep0_success.mp4"]
    (episode,) = json.loads((tmp_path / "videos" / "step_000003.json").read_text())["episodes"]
    assert episode["file"] == "step_000003_ep0_success.mp4"


@pytest.mark.parametrize(("every", "wanted"), [(0, [0, 3, 5, 10]), (5, [0, 5, 10]), (4, [0, 10])])
def test_frames_are_asked_for_at_multiples_and_at_the_end(tmp_path: Path, every: int, wanted: list[int]) -> None:
    hook: Any = plugin.build(VideoConfig(every=every, episodes=3))
    hook.on_run_start(run=a_run(tmp_path, steps=10))
    assert [step for step in (0, 3, 5, 10) if hook.frames_wanted(step=step) == 3] == wanted


def test_cameras_stand_side_by_side_enlarged_without_smoothing() -> None:
    episode = an_episode(True)
    film = compose_video(episode, 224)
    overhead = episode.images["overhead"]
    assert film.shape[1] % 2 == 0 and film.shape[2] % 2 == 0
    left = (film.shape[2] - 256 - 4 - 240) // 2  # 64 px x 4 and 48 px x 5
    assert (film[:, :254:4, left : left + 256 : 4] == overhead).all()
    assert (film[:, 100:130, left + 260 + 100] == (40, 90, 220)).all()


def words_on(frame: np.ndarray[Any, Any]) -> list[str]:
    """Outcomes that are written on a frame: their letters, white on their colour."""
    seen = []
    for word, colour in OUTCOME.values():
        font = ImageFont.load_default(size=12)
        letters = Image.new("RGB", (round(font.getlength(word)), 14), colour)
        ImageDraw.Draw(letters).text((0, 0), word, fill=(255, 255, 255), font=font)
        windows = np.lib.stride_tricks.sliding_window_view(frame, (14, letters.width), axis=(0, 1))
        if (windows == np.asarray(letters).transpose(2, 0, 1)).all((2, 3, 4)).any():
            seen.append(word)
    return seen


@pytest.mark.parametrize(("success", "word"), [(True, "SUCCESS"), (False, "FAILURE")])
def test_the_outcome_is_written_on_the_frame_in_which_the_episode_ends_and_on_no_other(success, word) -> None:
    film = compose_video(an_episode(success), 64)
    assert [words_on(frame[66:]) for frame in film] == [[]] * 5 + [[word]]
    other = compose_video(an_episode(not success), 64)
    assert (film[:-1] == other[:-1]).all(), "until it ends, a failure looks like a success"


def test_long_instructions_are_wrapped() -> None:
    one, many = an_episode(False), an_episode(False, instruction="stack " + "the very red block " * 12 + "x" * 200)
    short, tall = compose_video(one, 64), compose_video(many, 64)
    assert tall.shape[1] > short.shape[1] + 60
    one_camera = EpisodeFrames(task="t", instruction="i", success=True, images={"a": one.images["wrist"][:, :45, :33]})
    assert compose_video(one_camera, 224).shape[2] >= 320


def test_no_frames_no_folder(tmp_path: Path) -> None:
    hook: Any = plugin.build(VideoConfig())
    hook.on_eval_end(run=a_run(tmp_path), step=1, evaluation=an_evaluation(1))
    assert not (tmp_path / "videos").exists()


def test_without_an_encoder_the_hook_alone_is_left_out(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def no_encoder() -> str:
        raise RuntimeError("No ffmpeg exe could be found. Install ffmpeg on your system.\nmore")

    monkeypatch.setattr(imageio_ffmpeg, "get_ffmpeg_exe", no_encoder)
    encoder_missing.cache_clear()
    try:
        for _ in range(2):  # `check` builds it too
            hook = plugin.build(VideoConfig())
        events = broadcast({"video": hook})
        assert events.frames_wanted(0) == 0
        events.on_eval_end(a_run(Path()), 0, an_evaluation(0, frames=(an_episode(True),)))
        (line,) = [record.getMessage() for record in caplog.records]
        assert line.startswith("hook video makes no videos: there is no encoder (No ffmpeg exe could be found.")
    finally:
        encoder_missing.cache_clear()


def test_an_encoder_that_fails_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", "/bin/false")
    hook: Any = plugin.build(VideoConfig())
    hook.on_eval_end(a_run(tmp_path), 0, an_evaluation(0, frames=(an_episode(True),)))
    assert "could not encode" in caplog.text and not list(tmp_path.glob("videos/*.mp4"))

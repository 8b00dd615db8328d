from __future__ import annotations

from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np
import pytest

from vla_rl.core.events import EpisodeFrames
from vla_rl.core.manager import broadcast
from vla_rl.core.types import Context
from vla_rl.plugins.hooks.video import VideoConfig, encoder_missing, plugin
from vla_rl.plugins.hooks.video.recorder import OUTCOME, compose
from vla_rl.testing.events import a_run, an_episode, an_evaluation


def read(path: Path) -> np.ndarray[Any, Any]:
    reader = imageio_ffmpeg.read_frames(str(path))
    width, height = next(reader)["size"]
    return np.stack([np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in reader])


def test_files_are_named_by_step_episode_and_outcome_and_play(tmp_path: Path) -> None:
    hook: Any = plugin.build(VideoConfig(fps=4.0), Context())
    evaluation = an_evaluation(20, frames=(an_episode(True), an_episode(False)))
    hook.on_eval_end(run=a_run(tmp_path), step=20, evaluation=evaluation)
    names = sorted(path.name for path in (tmp_path / "videos").iterdir())
    assert names == ["step_000020_ep0_success.mp4", "step_000020_ep1_failure.mp4"]
    film = read(tmp_path / "videos" / names[0])
    want = compose(an_episode(True), 224)
    assert film.shape == (6 + 4, *want.shape[1:])  # the last frame is held for a second
    assert np.abs(film[5].astype(int) - want[5]).mean() < 6


def test_an_evaluation_that_is_repeated_leaves_no_stale_film(tmp_path: Path) -> None:
    hook: Any = plugin.build(VideoConfig(), Context())
    for success in (False, True):
        evaluation = an_evaluation(3, frames=(an_episode(success, frames=2),))
        hook.on_eval_end(run=a_run(tmp_path), step=3, evaluation=evaluation)
    assert [path.name for path in (tmp_path / "videos").iterdir()] == ["step_000003_ep0_success.mp4"]


@pytest.mark.parametrize(("every", "wanted"), [(0, [0, 3, 5, 10]), (5, [0, 5, 10]), (4, [0, 10])])
def test_frames_are_asked_for_at_multiples_and_at_the_end(tmp_path: Path, every: int, wanted: list[int]) -> None:
    hook: Any = plugin.build(VideoConfig(every=every, episodes=3), Context())
    hook.on_run_start(run=a_run(tmp_path, steps=10))
    assert [step for step in (0, 3, 5, 10) if hook.frames_wanted(step=step) == 3] == wanted


def test_cameras_stand_side_by_side_enlarged_without_smoothing() -> None:
    episode = an_episode(True)
    film = compose(episode, 224)
    overhead = episode.images["overhead"]
    assert film.shape[1] % 2 == 0 and film.shape[2] % 2 == 0
    left = (film.shape[2] - 256 - 4 - 240) // 2  # 64 px x 4 and 48 px x 5
    assert (film[:, :254:4, left : left + 256 : 4] == overhead).all()
    assert (film[:, 100:130, left + 260 + 100] == (40, 90, 220)).all()


def test_the_outcome_has_its_colour_and_long_instructions_are_wrapped() -> None:
    one, many = an_episode(False), an_episode(False, instruction="stack " + "the very red block " * 12 + "x" * 200)
    short, tall = compose(one, 64), compose(many, 64)
    assert tall.shape[1] > short.shape[1] + 60
    for success, (_, colour) in OUTCOME.items():
        below = compose(an_episode(success), 64)[0, 66:]
        assert (below == colour).all(-1).sum() > 300
    one_camera = EpisodeFrames(task="t", instruction="i", success=True, images={"a": one.images["wrist"][:, :45, :33]})
    assert compose(one_camera, 224).shape[2] >= 320


def test_no_frames_no_folder(tmp_path: Path) -> None:
    hook: Any = plugin.build(VideoConfig(), Context())
    hook.on_eval_end(run=a_run(tmp_path), step=1, evaluation=an_evaluation(1))
    assert not (tmp_path / "videos").exists()


def test_without_an_encoder_the_hook_alone_is_left_out(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def no_encoder() -> str:
        raise RuntimeError("No ffmpeg exe could be found. Install ffmpeg on your system.\nmore")

    monkeypatch.setattr(imageio_ffmpeg, "get_ffmpeg_exe", no_encoder)
    encoder_missing.cache_clear()
    try:
        for _ in range(2):  # `check` builds it too
            hook = plugin.build(VideoConfig(), Context())
        events = broadcast({"video": hook})
        assert events.frames_wanted(0) == 0
        events.on_eval_end(a_run(Path()), 0, an_evaluation(0, frames=(an_episode(True),)))
        (line,) = [record.getMessage() for record in caplog.records]
        assert line.startswith("hook video makes no videos: there is no encoder (No ffmpeg exe could be found.")
    finally:
        encoder_missing.cache_clear()


def test_an_encoder_that_fails_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", "/bin/false")
    hook: Any = plugin.build(VideoConfig(), Context())
    hook.on_eval_end(a_run(tmp_path), 0, an_evaluation(0, frames=(an_episode(True),)))
    assert "could not encode" in caplog.text and not list(tmp_path.glob("videos/*.mp4"))

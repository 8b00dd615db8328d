"""Public test doubles: synthetic events of the loop for listeners of `RunEvents`. For tests of hook plugins."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vla_rl.core.events import EpisodeFrames, Evaluation, Run, wilson_interval

METRICS = {  # names are those of every algorithm
    "loss/total": 0.5,
    "loss/policy": -0.01234,
    "policy/approx_kl": 0.0045,
    "loss/clip_fraction": 0.081,
    "policy/entropy": 1.234,
    "env/success_rate": 0.75,
    "env/return": 0.8,
    "env/episode_length": 12.5,
    "rollout/episodes": 64.0,
    "time/env": 1.0,
    "time/policy": 2.0,
    "time/learner": 1.0,
    "throughput/env_steps_per_s": 1234.0,
}


def a_run(folder: Path, first_step: int = 0, steps: int = 10) -> Run:
    """A run in `folder`; a `first_step` above 0 is a resumed one."""
    return Run(name="demo", folder=folder, spec={"seed": 0, "env": {"type": "x"}}, first_step=first_step, steps=steps)


def an_evaluation(step: int, successes: int = 30, frames: tuple[EpisodeFrames, ...] = ()) -> Evaluation:
    """An evaluation of two tasks, 20 episodes each, with this many successes."""
    rate = wilson_interval(successes, 40)
    return Evaluation(
        step=step,
        success=rate,
        tasks={"reach": wilson_interval(successes // 2, 20), "push": wilson_interval(successes - successes // 2, 20)},
        repeats=(rate.rate,),
        episodes=(),
        seconds=3.0,
        frames=frames,
    )


def an_episode(
    success: bool, frames: int = 6, instruction: str = "push the red block to the green pad"
) -> EpisodeFrames:
    """Frames of two cameras, 64 and 48 px: a red block crosses a coloured ramp, a blue block stands still."""
    ramp = np.arange(64, dtype=np.uint8)
    overhead = np.zeros((frames, 64, 64, 3), np.uint8)
    overhead[..., 0], overhead[..., 1] = 3 * ramp[None, :], 3 * ramp[:, None]
    for t in range(frames):
        overhead[t, 20:30, 5 * t : 5 * t + 10] = (220, 40, 40)
    wrist = np.full((frames, 48, 48, 3), 120, np.uint8)
    wrist[:, 18:30, 18:30] = (40, 90, 220)
    return EpisodeFrames(
        task="push-red-green", instruction=instruction, success=success, images={"overhead": overhead, "wrist": wrist}
    )

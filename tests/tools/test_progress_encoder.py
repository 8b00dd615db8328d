"""The encoder that ships with SRPO: what it needs, what it knows of the built-in simulator, and the script that makes
it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

import progress_encoder as tool
from vla_rl.core.contexts import EnvContext
from vla_rl.core.randomness import generator
from vla_rl.plugins.algorithms.srpo.config import EncoderSettings, RewardSettings
from vla_rl.plugins.algorithms.srpo.impl import TrajectoryEncoder, progress_rewards
from vla_rl.plugins.envs.tabletop import plugin as tabletop
from vla_rl.plugins.envs.tabletop.config import TabletopConfig
from vla_rl.plugins.envs.tabletop.tasks import TASKS


def encoder(name: str) -> TrajectoryEncoder:
    return TrajectoryEncoder(EncoderSettings(encoder=name, frames=4, image_size=64), "cpu")


def test_it_is_small_and_holds_safetensors():
    files = {path.name: path.stat().st_size for path in tool.OUT.iterdir()}
    assert files.keys() == {"config.json", "model.safetensors"}
    assert sum(files.values()) <= 2_000_000


def test_its_rewards_rank_failures_by_how_near_they_came():
    """Trajectories of a disturbed expert in new scenes."""
    rows = 256
    env = tabletop.build(TabletopConfig(), EnvContext(num_envs=rows, chunk=tool.CHUNK))
    films = tool.play(env, generator(7, "test of the encoder"))
    frames = tuple(film[:length] for film, length in zip(films.frames, films.length, strict=True))
    near = films.nearness[np.arange(rows), films.length - 1, films.task]
    tasks = [TASKS[task].name for task in films.task]
    ranks = {}
    for name in ("builtin:tabletop", "tiny"):
        embeddings = encoder(name)(frames).numpy()
        progress = progress_rewards(embeddings, films.success, tasks, np.ones(rows, bool), RewardSettings())
        failures = ~films.success
        ranks[name] = spearmanr(progress.rewards[failures], near[failures]).statistic
    assert ranks["builtin:tabletop"] > 0.5 > ranks["tiny"] + 0.1, ranks


def test_the_script_makes_a_loadable_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out = tmp_path / "out"
    few = f"--steps 2 --films 8 --batch 4 --width 24 --layers 1 --threads {torch.get_num_threads()} --out {out}"
    monkeypatch.setattr("sys.argv", ["progress_encoder", *few.split()])
    tool.main()
    assert encoder(str(out)).width == 24

"""The model within runs: warm start, PPO with a critic, checkpoints, on the built-in simulator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from model_cases import noise

from vla_rl.core import catalogue as plugins
from vla_rl.core.contexts import EnvContext, ModelContext
from vla_rl.core.spec.spec import parse_spec
from vla_rl.plugins.models.pi0.builder import build_policy
from vla_rl.plugins.models.pi0.config import Pi0Config
from vla_rl.runtime.start import run

NAMED = 'from vla_rl.plugins.models.pi0 import plugin\nvla_rl_plugins = {"model": {"pi0_of_the_test": plugin}}\n'


def test_a_run_on_the_built_in_simulator(tmp_path: Path) -> None:
    (tmp_path / "named.py").write_text(NAMED)
    spec: dict[str, Any] = {
        "name": "pi0",
        "seed": 0,
        "plugins": [str(tmp_path / "named.py")],
        "model": {"type": "pi0_of_the_test", "preset": "tiny", "denoise_steps": 2},
        "env": {"type": "tabletop", "num_envs": 4, "tasks": ["pick_red"]},
        "rollout": {"chunk": 4, "episodes": 4},
        "bc_warmup": {"episodes": 4, "epochs": 1, "lr": 1e-3, "batch": 8},
        "algorithm": {"type": "ppo"},
        "runtime": {"backend": "local"},
        "train": {"steps": 2, "lr": 1e-3, "micro_batch": 8},
        "eval": {"episodes_per_task": 2},
        "hooks": [{"type": "jsonl"}],
    }
    results = run(parse_spec(spec), tmp_path / "run", False)
    assert results["success"]["n"] == 2
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "policy/approx_kl" in line]
    assert len(steps) == 2
    for line in steps:  # one optimiser step a rollout: the policy is still the one that sampled
        assert abs(line["policy/approx_kl"]) < 1e-6
        assert line["loss/clip_fraction"] == 0
        assert line["policy/grad_norm"] > 0
    folder = tmp_path / "run" / "checkpoints" / "step_000002" / "model"
    env = plugins.build("env", "tabletop", parse_spec(spec).env.config, EnvContext(num_envs=1))
    model = build_policy(Pi0Config(checkpoint=str(folder), denoise_steps=2), ModelContext(env=env.info, chunk=4))
    assert model.sample_chunk(env.observe_envs(), noise(1), True).actions.shape == (1, 4, 3)

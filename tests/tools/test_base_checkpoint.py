"""The checkpoint that ships with the package: its size, its skill, what it needs, and the script that makes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import base_checkpoint as tool
from vla_rl.core.contexts import EnvContext, ModelContext
from vla_rl.plugins.envs.tabletop import plugin as tabletop
from vla_rl.plugins.envs.tabletop.config import TabletopConfig
from vla_rl.plugins.models.openvla import openvla_oft


@pytest.fixture(scope="module")
def policy() -> Any:
    env = tabletop.build(TabletopConfig(), EnvContext(chunk=4))
    return openvla_oft.build(openvla_oft.config(checkpoint="builtin:tabletop"), ModelContext(chunk=4, env=env.info))


def test_it_is_small_and_holds_safetensors():
    files = {path.name: path.stat().st_size for path in tool.OUT.iterdir()}
    assert "model.safetensors" in files
    assert sum(files.values()) <= 4_000_000


def test_it_succeeds_about_half_the_time(policy: Any):
    rate, _ = tool.success(policy)
    assert 0.4 <= rate <= 0.6


def test_sampling_succeeds_sometimes_in_every_task(policy: Any):
    _, tasks = tool.success(policy, greedy=False)
    assert min(tasks) > 0


def test_it_needs_the_images_and_the_instruction(policy: Any):
    assert tool.success(policy, blank=True)[0] <= 0.05
    assert tool.success(policy, shuffle=True)[0] <= 0.1


def test_the_script_makes_a_loadable_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out = tmp_path / "out"
    few = "--see 2 --find 2 --act 2 --every 2 --batch 8 --stop 0 --threads"
    monkeypatch.setattr("sys.argv", ["base_checkpoint", *few.split(), str(torch.get_num_threads()), "--out", str(out)])
    tool.main()
    env = tabletop.build(TabletopConfig(), EnvContext(chunk=4))
    openvla_oft.build(openvla_oft.config(checkpoint=str(out)), ModelContext(chunk=4, env=env.info))

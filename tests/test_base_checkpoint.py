"""The checkpoint that ships with the package: its size, its skill, what it needs, and the script that makes it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from vla_rl.core.types import Context
from vla_rl.plugins.envs.tabletop import TabletopConfig
from vla_rl.plugins.envs.tabletop import plugin as tabletop
from vla_rl.plugins.models.openvla import openvla_oft

SCRIPT = Path(__file__).parents[1] / "tools" / "base_checkpoint.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("base_checkpoint", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def policy() -> Any:
    env = tabletop.build(TabletopConfig(), Context(chunk=4))
    return openvla_oft.build(openvla_oft.config(checkpoint="builtin:tabletop"), Context(chunk=4, env=env.info))


def test_it_is_small_and_holds_safetensors(tool: ModuleType):
    files = {path.name: path.stat().st_size for path in tool.OUT.iterdir()}
    assert "model.safetensors" in files
    assert sum(files.values()) <= 4_000_000


def test_it_succeeds_about_half_the_time(tool: ModuleType, policy: Any):
    rate, _ = tool.success(policy)
    assert 0.4 <= rate <= 0.6


def test_sampling_succeeds_sometimes_in_every_task(tool: ModuleType, policy: Any):
    _, tasks = tool.success(policy, greedy=False)
    assert min(tasks) > 0


def test_it_needs_the_images_and_the_instruction(tool: ModuleType, policy: Any):
    assert tool.success(policy, blank=True)[0] <= 0.05
    assert tool.success(policy, shuffle=True)[0] <= 0.1


def test_the_script_makes_a_loadable_checkpoint(tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out = tmp_path / "out"
    few = "--see 2 --find 2 --act 2 --every 2 --batch 8 --stop 0 --threads"
    monkeypatch.setattr("sys.argv", ["base_checkpoint", *few.split(), str(torch.get_num_threads()), "--out", str(out)])
    tool.main()
    env = tabletop.build(TabletopConfig(), Context(chunk=4))
    openvla_oft.build(openvla_oft.config(checkpoint=str(out)), Context(chunk=4, env=env.info))

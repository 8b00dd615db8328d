"""Robot environments of other packages, with the specs of docs/simulators/gymnasium.md. `make gymnasium-packages` runs
these tests in an environment that has the packages; elsewhere they are skipped."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from vla_rl.core.catalogue import build
from vla_rl.core.contexts import EnvContext
from vla_rl.core.spec.spec import parse_spec
from vla_rl.testing import CheckFailed, check_env

PAGE = Path(__file__).parents[3] / "docs" / "simulators" / "gymnasium.md"
SPECS = {
    section["env"]["imports"][0]: section["env"]
    for section in map(yaml.safe_load, re.findall(r"```yaml\n(env:.*?)```", PAGE.read_text(), flags=re.DOTALL))
    if "imports" in section["env"]
}
STATE_SIZES = {"gym_hil": 18, "gym_aloha": 14, "gym_pusht": 2, "gymnasium_robotics": 28, "lerobot_env_so101": 14}
DRAWING_CHANGES_PHYSICS = {"gymnasium_robotics"}
"""Packages whose `render()` changes the simulation, so that chunks of other lengths give other episodes."""
CHEAPER = {"lerobot_env_so101": {"max_steps": 8}}
"""Changes to the spec of a package whose images take long."""


def env_of(package: str, num_envs: int) -> Any:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed; make gymnasium-packages runs this test")
    spec = parse_spec(
        {
            "name": "packages",
            "plugins": ["vla_rl.testing.scripted"],
            "model": {"type": "linear"},
            "env": SPECS[package] | CHEAPER.get(package, {}),
            "rollout": {"chunk": 4, "episodes": 4, "group_size": 2},
            "algorithm": {"type": "grpo"},
            "train": {"steps": 1, "lr": 1e-3, "micro_batch": 4},
        }
    ).env
    return build("env", spec.type, spec.config, EnvContext(num_envs=num_envs, chunk=4))


@pytest.mark.sim
@pytest.mark.timeout(900)
@pytest.mark.parametrize("package", STATE_SIZES)
def test_spec_of_the_page_keeps_to_the_contract(package: str) -> None:
    env = env_of(package, 2)
    assert list(env.info.cameras) == list(SPECS[package]["cameras"])
    assert env.info.state_dim == STATE_SIZES[package]
    if package not in DRAWING_CHANGES_PHYSICS:
        check_env(env, num_envs=2, chunk=4, seconds=20)
        return
    with pytest.raises(CheckFailed) as failure:
        check_env(env, num_envs=2, chunk=4, seconds=20)
    assert set(re.findall(r"(\w+): expected", str(failure.value), flags=re.MULTILINE)) == {"chunk_step"}
    assert "the same episode with chunks of" in str(failure.value)

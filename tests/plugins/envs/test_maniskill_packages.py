"""Tasks of other packages in `maniskill`, by `imports`. They run where the package is installed next to ManiSkill
(docs/simulators/maniskill.md) and are skipped elsewhere."""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import Any

import pytest

from vla_rl.core.contexts import EnvContext
from vla_rl.core.errors import UserError
from vla_rl.plugins.envs.maniskill import plugin
from vla_rl.plugins.envs.maniskill.config import ManiSkillConfig
from vla_rl.testing import check_env
from vla_rl.toolkit.envs.rendering import require_rendering
from vla_rl.toolkit.envs.vulkan import use_unpacked_driver

if find_spec("mani_skill") is None or find_spec("mikasa_robo_suite") is None:
    pytest.skip("needs pip install --no-deps mikasa-robo-suite==1.0.0 next to ManiSkill", allow_module_level=True)


@pytest.fixture(scope="module", autouse=True)
def vulkan() -> None:
    use_unpacked_driver()
    try:
        require_rendering("vulkan", "maniskill")
    except UserError as exc:
        pytest.skip(str(exc))


def make(task: str, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "imports": ("mikasa_robo_suite.vla.memory_envs",),
        "cameras": {"base_camera": 64, "hand_camera": 64},
        "backend": "cpu",
    }
    return plugin.build(ManiSkillConfig(task=task, **(settings | changes)), EnvContext(num_envs=1, chunk=4))


@pytest.mark.sim
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("task", "instruction", "max_steps"),
    [
        ("RememberColor3-VLA-v0", "Observe the cube's color, wait, then touch the cube of the same color.", 25),
        ("RotateLenientPos-VLA-v0", r"Rotate the peg by -?\d+ degrees to match the target angle\.", 60),
    ],
)
def test_a_task_of_mikasa_robo_keeps_to_the_contract(task: str, instruction: str, max_steps: int) -> None:
    env = make(task)
    (info,) = env.info.tasks
    assert re.fullmatch(instruction, info.instruction) and info.max_steps == max_steps
    assert (env.info.state_dim, len(env.info.action_low)) == (16, 7)
    check_env(env, num_envs=1, chunk=4, seconds=20)


@pytest.mark.sim
def test_assets_that_the_wheel_lacks_are_named() -> None:
    with pytest.raises(UserError, match="ManiSkill cannot build TimedTransferEasy-VLA-v0: .*low_poly_light_bulb.glb"):
        make("TimedTransferEasy-VLA-v0")

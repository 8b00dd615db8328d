"""Checkpoints that name the numbers of their actions: another order than the robot's is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from pi0_cases import CHUNK, ENV

from vla_rl.core.contexts import ModelContext
from vla_rl.plugins.models import pi0, smolvla
from vla_rl.toolkit.models.checkpoints.fitting import MismatchError

NAMES = ("left.pos", "right.pos", "gripper.pos")


@pytest.mark.parametrize("plugin", [pi0.plugin, smolvla.plugin], ids=["pi0", "smolvla"])
def test_a_checkpoint_with_other_joints_first_is_refused(plugin: Any, tmp_path: Path) -> None:
    plugin.build(plugin.config(preset="tiny"), ModelContext(env=ENV, chunk=CHUNK)).save(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"action_feature_names": list(NAMES)}))

    def build(names: tuple[str, ...]) -> Any:
        return plugin.build(
            plugin.config(checkpoint=str(tmp_path)), ModelContext(env=evolve(ENV, action_names=names), chunk=CHUNK)
        )

    build(NAMES)
    build(())
    with pytest.raises(MismatchError, match=r"the numbers of the action in another order\n.*: left.pos, right.pos, gr"):
        build(("right.pos", "left.pos", "gripper.pos"))

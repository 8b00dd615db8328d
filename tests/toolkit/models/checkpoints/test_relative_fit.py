"""Relative actions of a preset without demonstrations."""

from __future__ import annotations

import pytest

from vla_rl.core.catalogue import load
from vla_rl.core.contexts import ModelContext
from vla_rl.testing import synthetic
from vla_rl.toolkit.relative_actions import RelativeActions

ENV = synthetic.env_info(cameras=1, pixels=32)


@pytest.mark.parametrize("actions", [None, RelativeActions(relative_to="state", dimensions=(0, 1))])
def test_a_preset_tells_that_differences_are_scaled_by_bounds(actions, caplog):
    plugin = load("model", "pi0")
    config = plugin.config(preset="tiny", actions=actions)
    plugin.build(config, ModelContext(env=ENV, chunk=2, values="none", device="cpu", temperature=1.0))
    told = [text for text in caplog.messages if "scaled by the simulator's bounds of absolute actions" in text]
    assert len(told) == (actions is not None)

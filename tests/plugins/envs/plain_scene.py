"""A gymnasium wrapper for simulators that take most of a second for an image in software."""

from __future__ import annotations

from typing import Any

import gymnasium

from vla_rl.toolkit.envs.meshes import turn_effects_off


class PlainScene(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A MuJoCo scene without shadows and multisampling, which take nine tenths of the time of an image of so101."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        turn_effects_off(env.unwrapped.model)

"""`oracle`: the true simulator used as a world model. Settings only, light to import.

See docs/reference/world-models.md.
"""

from __future__ import annotations

from typing import Any

from attrs import evolve, field, frozen, validators

from vla_rl.core.types import Context, Plugin


@frozen(kw_only=True)
class OracleConfig:
    """Spec keys of the world model `oracle`."""

    env: str
    """Type of the simulator; it must be deterministic (the same actions give the same episode again)."""
    keys: tuple[str, ...] = ()
    """Settings of the simulator, as `vla-rl check-env` takes them: `[image_size=32, max_steps=8]`."""
    history: int = field(default=16, validator=validators.ge(1))
    """Length of a window in chunks, 1 or more: at least the chunks of the longest episode, since all of them are
    replayed."""
    num_envs: int = field(default=64, validator=validators.ge(1))
    """Env instances of the simulator, 1 or more; more windows than that are processed in turns."""


def build(config: OracleConfig, context: Context) -> Any:
    from vla_rl.core.catalogue import build as build_env
    from vla_rl.core.spec.spec import read_env
    from vla_rl.plugins.world_models.oracle.model import Oracle

    section = read_env(config.env, config.keys)
    env = build_env("env", config.env, section.config, evolve(context, num_envs=config.num_envs, env=None))
    return Oracle(env, config, context.env)


SUMMARY = "Experimental: the true simulator, which plays recorded actions again; an upper bound, and for tests"
plugin = Plugin(config=OracleConfig, build=build, summary=SUMMARY)

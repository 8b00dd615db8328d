"""`oracle`: the true simulator as a world model. Light part; see docs/world-models.md."""

from __future__ import annotations

from typing import Any

from attrs import evolve, field, frozen, validators

from vla_rl.core.types import Context, Plugin


@frozen(kw_only=True)
class OracleConfig:
    env: str
    """Type of the simulator; one whose episodes come twice alike."""
    keys: tuple[str, ...] = ()
    """Its settings, as in `vla-rl check-env`: `[image_size=32, max_steps=8]`."""
    history: int = field(default=16, validator=validators.ge(1))
    """Chunk ends in a window: at least the chunks of an episode, since all of them are played again."""
    rows: int = field(default=64, validator=validators.ge(1))
    """Of the simulator; more windows are played in turns."""


def build(config: OracleConfig, context: Context) -> Any:
    from vla_rl.core.catalogue import build as build_env
    from vla_rl.core.spec.spec import read_env
    from vla_rl.plugins.world_models.oracle.model import Oracle

    section = read_env(config.env, config.keys)
    env = build_env("env", config.env, section.config, evolve(context, num_envs=config.rows, env=None))
    return Oracle(env, config, context.env)


SUMMARY = "Experimental: the true simulator, which plays recorded actions again; an upper bound, and for tests"
plugin = Plugin(config=OracleConfig, build=build, summary=SUMMARY)

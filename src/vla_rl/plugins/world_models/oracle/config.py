"""Settings of `oracle`."""

from __future__ import annotations

from attrs import field, frozen, validators


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

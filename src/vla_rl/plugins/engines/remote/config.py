"""Spec keys of `remote`; light to import."""

from __future__ import annotations

from attrs import field, frozen
from attrs import validators as v

from vla_rl.core.contexts import CheckContext
from vla_rl.core.spec.structure import at
from vla_rl.plugins.engines.remote.address import check_address


@frozen(kw_only=True)
class RemoteConfig:
    """Keys of `rollout.engine` with `type: remote`."""

    url: str = field(validator=lambda config, attribute, url: check_address(url))
    """Address of the policy server: `ws://HOST:PORT` or `wss://`."""
    keys: str | None = None
    """Names of the keys in requests: libero, droid, aloha, or a YAML file. Null: those that the server asks for, if it
    is a vla-rl server."""
    api_key_file: str | None = None
    """File with the API key that the server requires; null: none."""
    connections: int = field(default=16, validator=v.ge(1))
    """Most concurrent requests (one connection each), 1 or more."""
    timeout_s: float = field(default=60.0, validator=v.gt(0))
    """Seconds, above 0, after which a server that does not answer counts as lost and the run stops."""


def check_key_map(config: RemoteConfig, context: CheckContext) -> None:
    """Check that the key map can be read."""
    from vla_rl.toolkit.models.acting.key_maps import read_key_map

    if config.keys is not None:
        with at("keys"):
            read_key_map(config.keys)

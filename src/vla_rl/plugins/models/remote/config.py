"""What a spec says about a remote policy; light to import."""

from __future__ import annotations

from typing import Any

from attrs import Attribute, field, frozen
from attrs import validators as v

from vla_rl.core.spec.structure import at
from vla_rl.core.types import Context
from vla_rl.plugins.models.remote.address import check_address


def _is_websocket(config: RemoteConfig, attribute: Attribute[Any], value: str) -> None:
    check_address(value)


@frozen(kw_only=True)
class RemoteConfig:
    """Keys of `model:` in a spec with `type: remote`."""

    url: str = field(validator=_is_websocket)
    """Where it is served: `ws://HOST:PORT`."""
    keys: str | None = None
    """Names in requests: libero, droid, aloha, or a YAML file. None: those that the server asks for, if it is ours."""
    api_key_file: str | None = None
    """File with the key that the server wants."""
    connections: int = field(default=16, validator=v.ge(1))
    """Requests that are under way at the same time, at most."""
    timeout_s: float = field(default=60.0, validator=v.gt(0))
    """Seconds after which a server that is silent, or gone, is given up."""


def check(config: RemoteConfig, context: Context) -> None:
    """For `Plugin.check`: a key map that cannot be read."""
    from vla_rl.toolkit.models.key_maps import read_key_map

    if config.keys is not None:
        with at("keys"):
            read_key_map(config.keys)

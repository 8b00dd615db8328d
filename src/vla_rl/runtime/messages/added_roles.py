"""Roles that a part of the training step adds to a worker, as they are described to it."""

from __future__ import annotations

from typing import Any

from attrs import frozen


@frozen(kw_only=True)
class AddedRoles:
    """What builds roles in a worker with simulators, once these are built."""

    build: str
    """Function "module:name" of a `runtime.workers.added_roles.RoleContext` and settings, returning `BuiltRoles`."""
    settings: Any
    """Settings of that function; they are pickled."""

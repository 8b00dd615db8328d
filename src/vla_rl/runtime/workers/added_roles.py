"""Roles that parts of the training step add to a worker with simulators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attrs import frozen

from vla_rl.core.declarations import resolve_target
from vla_rl.core.manager import Named
from vla_rl.core.spec.spec import Spec
from vla_rl.core.types import EnvInfo
from vla_rl.runtime.messages.added_roles import AddedRoles
from vla_rl.runtime.workers.env.episodes import Bootstrap, RolloutObserver


@frozen(kw_only=True)
class RoleContext:
    """What a role is built from."""

    spec: Spec
    info: EnvInfo
    """Description of the simulator."""
    device: str
    wrappers: Named
    """Modules of `plugins:`, which wrap components."""
    bootstrap: Bootstrap
    """Ends of episodes after which policies get the observations, to compute values or to keep them."""
    heartbeat: Callable[[], None]
    """Called within long calls."""
    stop_requested: Callable[[], bool]
    """Whether a long call has to end early, with StopRequested."""


@frozen(kw_only=True)
class BuiltRoles:
    """Roles by their names, and what they have to do with the worker's episodes."""

    roles: Mapping[str, Any]
    plugin: str
    """Kind and type of the plugin that they run, for messages."""
    make_observer: Callable[[], RolloutObserver] | None = None
    """Makes an observer for the training episodes of a lane; None: they are not observed."""


def build_roles(added: AddedRoles, context: RoleContext) -> BuiltRoles:
    """Build the roles that a part of the training step adds."""
    built: BuiltRoles = resolve_target(added.build, "roles")(context, added.settings)
    return built

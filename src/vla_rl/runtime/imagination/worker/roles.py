"""Construction of the roles that training in imagination adds to workers."""

from __future__ import annotations

from typing import Any

from vla_rl.runtime.imagination.interfaces import IMAGINED, RECORDINGS, WORLD_MODEL
from vla_rl.runtime.imagination.messages import ImaginationRoles
from vla_rl.runtime.imagination.worker.imagined_envs import ImaginedEnvs
from vla_rl.runtime.imagination.worker.recording import WorldModelRecordings
from vla_rl.runtime.imagination.worker.world_model_worker import WorldModelWorker
from vla_rl.runtime.workers.added_roles import BuiltRoles, RoleContext


def build_roles(context: RoleContext, settings: ImaginationRoles) -> BuiltRoles:
    """Build the recordings of a worker and, in the first, the world model and its envs."""
    assert context.spec.world_model is not None
    recordings = WorldModelRecordings()
    roles: dict[str, Any] = {RECORDINGS: recordings}
    if settings.lanes is not None:
        world_model = WorldModelWorker(context, settings.folder)
        roles[WORLD_MODEL] = world_model
        roles[IMAGINED] = ImaginedEnvs(world_model, settings.lanes, context.bootstrap)
    plugin = f"world model {context.spec.world_model.type!r}"
    return BuiltRoles(roles=roles, plugin=plugin, make_observer=recordings.create_observer)

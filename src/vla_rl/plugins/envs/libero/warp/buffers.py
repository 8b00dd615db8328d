"""Sizes of the buffers in which MuJoCo Warp keeps contacts and constraints, which are fixed when a batch is built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import mujoco
from attrs import frozen

from vla_rl.core.errors import UserError

if TYPE_CHECKING:
    from vla_rl.plugins.envs.libero.warp.task_model import EpisodeStart

HEADROOM = 4
"""Space for contacts, as a multiple of those at the start of an episode."""
LEAST_CONTACTS = 300
ROWS = 4
"""Rows of constraints for each contact: friction cones of most contacts have three or four."""
OF_BATCH, OF_WORLD, OF_CONTACT, OF_PIXEL = 512 * 2**20, 400_000, 11_600, 18
"""Bytes of a batch, of each world, of each contact it has space for (collisions of meshes), and of each pixel."""


@frozen(kw_only=True)
class BufferSizes:
    """Entries for each world. Contacts share one buffer for all worlds, constraints do not."""

    contacts: int
    constraints: int

    def predict_bytes(self, num_worlds: int, cameras: Mapping[str, int]) -> int:
        """Return the memory that a batch needs on its device."""
        pixels = sum(size * size for size in cameras.values())
        return OF_BATCH + num_worlds * (OF_WORLD + OF_CONTACT * self.contacts + OF_PIXEL * pixels)

    def explain_contacts(self, task: str, needed: int) -> str:
        """Return why a world broke that has at least `needed` contacts."""
        return (
            f"libero_warp: {task}: a world has at least {needed} contacts, and the batch has space for "
            f"{self.contacts} a world; raise env.contacts"
        )

    def explain_constraints(self, task: str) -> str:
        return (
            f"libero_warp: {task}: a world needs more rows of constraints than there is space for, {self.constraints}; "
            "raise env.constraints"
        )


def choose_sizes(
    model: mujoco.MjModel, start: EpisodeStart, contacts: int | None, constraints: int | None
) -> BufferSizes:
    """Return the sizes that a spec gives, or for None those that fit the start of a task's episodes with headroom.
    Raise UserError for sizes that do not fit it."""
    data = prepare_data(model, start)
    for key, given, needed in (("contacts", contacts, data.ncon), ("constraints", constraints, data.nefc)):
        if given is not None and given < needed:
            raise UserError(f"libero_warp: env.{key} is {given}, and a task needs {needed} at the start of an episode")
    contacts = contacts or max(LEAST_CONTACTS, HEADROOM * data.ncon)
    return BufferSizes(contacts=contacts, constraints=constraints or max(ROWS * contacts, HEADROOM * data.nefc))


def prepare_data(model: mujoco.MjModel, start: EpisodeStart) -> mujoco.MjData:
    """Return simulation data on the host, at the start of an episode."""
    model.body_pos[:], model.body_quat[:] = start.body_pos, start.body_quat
    data = mujoco.MjData(model)
    data.qpos[:], data.qvel[:] = start.qpos, start.qvel
    data.ctrl[:], data.qacc_warmstart[:] = start.control, start.warm_start
    mujoco.mj_forward(model, data)
    return data

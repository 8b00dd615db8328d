"""Settings of `libero_warp`."""

from __future__ import annotations

import attrs
from attrs import field, frozen, validators

from vla_rl.plugins.envs.libero.config import LiberoConfig, LiberoTasksConfig

A_NUMBER = validators.optional(validators.ge(1))


@frozen(kw_only=True)
class LiberoWarpConfig(LiberoTasksConfig):
    """Spec keys of the simulator `libero_warp`."""

    worlds: int | None = field(default=None, validator=A_NUMBER)
    """Worlds of a batch, which all have the same task; null: the envs divided by the number of tasks. Where more envs
    play a task, it gets further batches."""
    contacts: int | None = field(default=None, validator=A_NUMBER)
    """Contacts for which a batch has space, per world; null: four times those at the start of an episode, and at least
    300. A world with more breaks, and its episode is run again."""
    constraints: int | None = field(default=None, validator=A_NUMBER)
    """Rows of constraints for which a world has space; null: four for each of `contacts`."""
    graphs: bool = True
    """On a GPU, launch the kernels of an action as one CUDA graph; false: one by one, which is slower."""

    def official(self) -> LiberoConfig:
        """Return the settings of `libero` for the same tasks and initial states, without cameras."""
        shared = {each.name: getattr(self, each.name) for each in attrs.fields(LiberoTasksConfig)}
        return LiberoConfig(**shared | {"cameras": {}})

"""Scenes that the rows of a process share: one simulator a task, in which they take turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define

from vla_rl.plugins.envs.libero import LiberoConfig
from vla_rl.plugins.envs.libero.suites import LiberoTask

if TYPE_CHECKING:
    from vla_rl.plugins.envs.libero.compiled import Kept
    from vla_rl.plugins.envs.libero.scene import LiberoScene
    from vla_rl.plugins.envs.libero.stepping import SavedStep

MIB = 2**20


@define(eq=False)
class SceneEpisode:
    """What a row plays."""

    task: LiberoTask
    moment: SavedStep | None = None
    """Where it stands, while another is played in its scene."""


class SceneCache:
    """Those that rows play in, and of the others those that were used last, as many as fit into memory."""

    def __init__(self, config: LiberoConfig, device: str) -> None:
        self._config, self._device = config, device
        self._built: dict[LiberoTask, LiberoScene] = {}  # the one used last is the last
        self._there: dict[LiberoTask, SceneEpisode] = {}
        self._played: dict[int, SceneEpisode] = {}
        self._kept: Kept | None = None
        self.seeds: dict[int, int] = {}
        """Of train states that were drawn: id -> seed."""

    def begin(self, row: int, task: LiberoTask) -> LiberoScene:
        """A row turns to an episode of this task. -> Its scene, in any state."""
        self._played[row] = SceneEpisode(task)
        return self.of(row)

    def of(self, row: int) -> LiberoScene:
        """The scene that a row plays in, as it left it."""
        episode = self._played[row]
        scene = self._built.pop(episode.task, None) or self._build(episode.task)
        self._built[episode.task] = scene
        before = self._there.get(episode.task)
        if before is not episode:
            if before is not None:
                before.moment = scene.save()
            if episode.moment is not None:
                scene.load(episode.moment)
            self._there[episode.task] = episode
        return scene

    def leave(self, row: int) -> None:
        """A row is given up, perhaps because it broke: so its scene, if it stands as the row left it, is built anew."""
        episode = self._played.pop(row, None)
        if episode is not None and self._there.get(episode.task) is episode:
            self._close(episode.task)
        if not self._played:
            for task in list(self._built):
                self._close(task)

    def _build(self, task: LiberoTask) -> LiberoScene:
        from vla_rl.plugins.envs.libero.compiled import Kept
        from vla_rl.plugins.envs.libero.scene import LiberoScene

        config = self._config
        if self._kept is None:
            self._kept = Kept(config.disk_mib * MIB)
        before = {texture for scene in self._built.values() for texture in scene.textures}
        self._make_room()
        scene = LiberoScene(
            task,
            config.cameras,
            config.fast_render,
            fast_physics=config.fast_physics,
            device=self._device,
            kept=self._kept,
        )
        before.clear()  # some of those that went are shown again
        return scene

    def _make_room(self) -> None:
        """For one more of the usual size."""
        played = {episode.task for episode in self._played.values()}
        for task in [task for task in self._built if task not in played]:
            textures = {texture for scene in self._built.values() for texture in scene.textures}
            taken = [scene.memory for scene in self._built.values()]
            if sum(taken) + max(taken) + sum(texture.memory for texture in textures) > self._config.memory_mib * MIB:
                self._close(task)

    def _close(self, task: LiberoTask) -> None:
        self._built.pop(task).close()
        self._there.pop(task, None)

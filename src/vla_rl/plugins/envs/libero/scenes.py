"""Scenes that the env instances of a process share: one simulator per task, used in turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define

from vla_rl.plugins.envs.libero.config import LiberoConfig
from vla_rl.plugins.envs.libero.suites import LiberoTask

if TYPE_CHECKING:
    from vla_rl.plugins.envs.libero.compiled import CompiledModels
    from vla_rl.plugins.envs.libero.scene import LiberoScene
    from vla_rl.plugins.envs.libero.stepping import SavedStep

MIB = 2**20


@define(eq=False)
class SceneEpisode:
    """Episode of one env instance."""

    task: LiberoTask
    moment: SavedStep | None = None
    """State of the episode while another one uses its scene."""


class SceneCache:
    """Cache of scenes: those in use, and as many of the most recently used others as fit into memory."""

    def __init__(self, config: LiberoConfig, device: str) -> None:
        self._config = config
        self._device = device
        self._built: dict[LiberoTask, LiberoScene] = {}  # in order of use, the most recent one last
        self._loaded_episodes: dict[LiberoTask, SceneEpisode] = {}
        self._episodes_of: dict[int, SceneEpisode] = {}
        self._compiled: CompiledModels | None = None
        self.seeds: dict[int, int] = {}
        """State id -> seed, for the train states drawn so far."""

    def begin_episode(self, env_id: int, task: LiberoTask) -> LiberoScene:
        """Start an episode of this task in an env instance. Return its scene, in any state."""
        self._episodes_of[env_id] = SceneEpisode(task)
        return self.resume_scene(env_id)

    def resume_scene(self, env_id: int) -> LiberoScene:
        """Return the scene of an env instance, in the state in which the instance left it."""
        episode = self._episodes_of[env_id]
        scene = self._built.pop(episode.task, None) or self._build_scene(episode.task)
        self._built[episode.task] = scene
        before = self._loaded_episodes.get(episode.task)
        if before is not episode:
            if before is not None:
                before.moment = scene.save()
            self._loaded_episodes[episode.task] = episode  # first: if loading fails, `drop_env` closes the scene
            if episode.moment is not None:
                scene.load(episode.moment)
        return scene

    def drop_env(self, env_id: int) -> None:
        """Forget an env instance, perhaps because it broke. If it was the last to use its task's scene, which may be
        broken too, that is closed, and built again when needed. With the last instance all scenes are closed."""
        episode = self._episodes_of.pop(env_id, None)
        if episode is not None and self._loaded_episodes.get(episode.task) is episode:
            self._close_scene(episode.task)
        if not self._episodes_of:
            for task in list(self._built):
                self._close_scene(task)

    def _build_scene(self, task: LiberoTask) -> LiberoScene:
        from vla_rl.plugins.envs.libero.compiled import CompiledModels
        from vla_rl.plugins.envs.libero.scene import LiberoScene

        config = self._config
        if self._compiled is None:
            self._compiled = CompiledModels(config.disk_mib * MIB)
        before = {texture for scene in self._built.values() for texture in scene.textures}
        self._make_room()
        scene = LiberoScene(
            task,
            config.cameras,
            config.fast_render,
            fast_physics=config.fast_physics,
            device=self._device,
            compiled=self._compiled,
        )
        before.clear()  # some of the textures of closed scenes may be used again
        return scene

    def _make_room(self) -> None:
        """Close unused scenes until one more of the usual size fits into memory."""
        tasks_in_use = {episode.task for episode in self._episodes_of.values()}
        for task in [task for task in self._built if task not in tasks_in_use]:
            textures = {texture for scene in self._built.values() for texture in scene.textures}
            scene_sizes = [scene.memory_bytes for scene in self._built.values()]
            if (
                sum(scene_sizes) + max(scene_sizes) + sum(texture.memory_bytes for texture in textures)
                > self._config.memory_mib * MIB
            ):
                self._close_scene(task)

    def _close_scene(self, task: LiberoTask) -> None:
        self._built.pop(task).close()
        self._loaded_episodes.pop(task, None)

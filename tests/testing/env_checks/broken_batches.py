"""Batches that are broken in one place; each names what `check_env` has to say of it."""

from __future__ import annotations

import copy
from typing import Any

import attrs
import numpy as np
from small_simulators import LIMIT, Scene, SmallEnv

from vla_rl.core.types import ChunkResult, Observation, ResetState

ONE_END = "the same end in a chunk as with single actions"


class FirstActionOnly(SmallEnv):
    """the same episode with chunks of other lengths"""

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        return super().chunk_step(np.repeat(actions[:, :1], actions.shape[1], 1), active, stop_at_end)


class LastActionOnly(SmallEnv):
    """the same episode with chunks of other lengths"""

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        return super().chunk_step(np.repeat(actions[:, -1:], actions.shape[1], 1), active, stop_at_end)


class MeanAction(SmallEnv):
    """the same episode with chunks of other lengths"""

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        mean = actions.mean(1, keepdims=True).repeat(actions.shape[1], 1)
        return super().chunk_step(mean, active, stop_at_end)


class Backwards(SmallEnv):
    """the same episode with chunks of other lengths"""

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        return super().chunk_step(actions[:, ::-1], active, stop_at_end)


class ByChunkLength(SmallEnv):
    """the same episode with chunks of other lengths"""

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        return super().chunk_step(actions / np.float32(actions.shape[1]), active, stop_at_end)


class WholeChunksOnly(SmallEnv):
    """expected no exception, got AssertionError"""

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        assert actions.shape[1] == self.chunk
        return super().chunk_step(actions, active, stop_at_end)


class FillsChunksUp(SmallEnv):
    """the same episode with chunks of other lengths|[3, 1]"""

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        width = actions.shape[1]
        full = np.concatenate([actions, actions[:, -1:].repeat(self.chunk - width, 1)], 1)
        result = super().chunk_step(full, active, stop_at_end)
        names = ("rewards", "terminated", "truncated", "executed", "succeeded")
        return attrs.evolve(result, **{name: getattr(result, name)[:, :width] for name in names})


class MovesOn(SmallEnv):
    """the same end in a chunk as with single actions"""

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        result = super().chunk_step(actions, active, stop_at_end)
        for env_id, column in np.argwhere(~result.executed & active[:, None]):
            self.scenes[env_id].move(actions[env_id, column])
        return attrs.evolve(result, obs=self.observe(range(self.num_envs)))


class DriftsOn(SmallEnv):
    """the same end in a chunk as with single actions"""

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        result = super().chunk_step(actions, active, stop_at_end)
        for env_id, _ in np.argwhere(~result.executed & active[:, None]):
            self.scenes[env_id].place += 0.05
        return attrs.evolve(result, obs=self.observe(range(self.num_envs)))


class NeverStops(SmallEnv):
    """expected nothing after the end, got more actions"""

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        return super().chunk_step(actions, active, False)


class AlwaysStops(SmallEnv):
    """expected all actions of active envs, got fewer"""

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        return super().chunk_step(actions, active, True)


class SaysItWentOn(SmallEnv):
    """stop_at_end=False|expected all actions of active envs"""

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        result = super().chunk_step(actions, active, True)
        return (
            result
            if stop_at_end
            else attrs.evolve(result, rewards=result.rewards + 0, executed=result.executed & False)
        )


class EndsLate(SmallEnv):
    """the same episode with|the same end"""

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        result = super().chunk_step(actions, active, False)
        last = np.arange(actions.shape[1]) == actions.shape[1] - 1
        terminated = result.terminated.any(1, keepdims=True) & last
        truncated = result.truncated.any(1, keepdims=True) & last & ~terminated
        return attrs.evolve(result, terminated=terminated, truncated=truncated)


class EndsAtTheFirst(SmallEnv):
    """the same episode with|the same end|expected"""

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        result = super().chunk_step(actions, active, stop_at_end)
        return attrs.evolve(result, terminated=np.roll(result.terminated, 1, 1))


class RewardsLate(SmallEnv):
    """the same episode with|the same end|expected"""

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        result = super().chunk_step(actions, active, stop_at_end)
        rewards = np.zeros_like(result.rewards)
        rewards[:, -1] = result.rewards.sum(1)
        return attrs.evolve(result, rewards=rewards)


class RewardsSpread(SmallEnv):
    """the same episode with|the same end|expected"""

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        result = super().chunk_step(actions, active, stop_at_end)
        share = result.rewards.sum(1, keepdims=True) / np.maximum(result.executed.sum(1, keepdims=True), 1)
        return attrs.evolve(result, rewards=(share * result.executed).astype(np.float32))


class MovesIdleEnvs(SmallEnv):
    """expected envs that are not active unchanged"""

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        for env_id in np.flatnonzero(~active):
            self.scenes[env_id].move(actions[env_id, 0])
        return super().chunk_step(actions, active, stop_at_end)


class PushesIdleEnvs(SmallEnv):
    """expected no change by a call without active envs"""

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        for env_id in np.flatnonzero(~active):
            self.scenes[env_id].speed += 0.1
        return super().chunk_step(actions, active, stop_at_end)


class AgesIdleEnvs(SmallEnv):
    """expected no change by a call without active envs"""

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        for env_id in np.flatnonzero(~active):
            self.scenes[env_id].steps += 1
        return super().chunk_step(actions, active, stop_at_end)


class FirstEnvsActions(SmallEnv):
    """another env|alone as with others"""

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        return super().chunk_step(np.repeat(actions[:1], len(actions), 0), active, stop_at_end)


class ActionsOfActiveEnvs(SmallEnv):
    """another env|alone as with others|the same end"""

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        moved = actions.copy()
        moved[active] = actions[: int(active.sum())]
        return super().chunk_step(moved, active, stop_at_end)


class EnvsPull(SmallEnv):
    """alone as with others|the same episode"""

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        mean = actions[active].mean(0) if active.any() else 0
        return super().chunk_step((0.9 * actions + 0.1 * mean).astype(np.float32), active, stop_at_end)


class SlowerTogether(SmallEnv):
    """alone as with others"""

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        return super().chunk_step(actions / np.float32(max(active.sum(), 1)), active, stop_at_end)


class AllStopTogether(SmallEnv):
    """expected all up to the end, got fewer actions"""

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        kept = copy.deepcopy(self.scenes)
        result = super().chunk_step(actions, active, stop_at_end)
        if not stop_at_end or not active.any():
            return result
        self.scenes = kept
        return (
            super().chunk_step(actions[:, : max(result.executed[active].sum(1).min(), 1)], active, True)
            if (result.executed[active].all())
            else self._short(actions, active, int(result.executed[active].sum(1).min()))
        )

    def _short(self, actions: Any, active: Any, width: int) -> ChunkResult:
        result = super().chunk_step(actions[:, :width], active, True)
        missing = ((0, 0), (0, actions.shape[1] - width))
        names = ("rewards", "terminated", "truncated", "executed", "succeeded")
        return attrs.evolve(result, **{name: np.pad(getattr(result, name), missing) for name in names})


class AllEndTogether(SmallEnv):
    """expected nothing after the end, got more actions"""

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        result = super().chunk_step(actions, active, stop_at_end)
        return attrs.evolve(result, terminated=result.terminated.any(0)[None] & result.executed)


class ResetsAll(SmallEnv):
    """expected the other envs untouched"""

    def reset(self, env_ids: Any, state_ids: Any, seed: Any) -> Observation:
        for env_id in set(range(self.num_envs)) - set(env_ids.tolist()):
            self.scenes[env_id].reset(1, 0)
        return super().reset(env_ids, state_ids, seed)


class ResetStopsNeighbours(SmallEnv):
    """expected the other envs untouched"""

    def reset(self, env_ids: Any, state_ids: Any, seed: Any) -> Observation:
        for scene in self.scenes:
            scene.speed = 0.0
        return super().reset(env_ids, state_ids, seed)


class ResetRenewsCounters(SmallEnv):
    """expected the other envs untouched|an episode"""

    def reset(self, env_ids: Any, state_ids: Any, seed: Any) -> Observation:
        for scene in self.scenes:
            scene.steps = 0
        return super().reset(env_ids, state_ids, seed)


class SortedAnswers(SmallEnv):
    """observations in the order of `env_ids`|expected instruction"""

    def reset(self, env_ids: Any, state_ids: Any, seed: Any) -> Observation:
        super().reset(env_ids, state_ids, seed)
        return self.observe(np.sort(env_ids))


class AnswersOfAllEnvs(SmallEnv):
    """reset: image 'top': expected uint8 [1, 8, 24, 3], got uint8 [3, 8, 24, 3]"""

    def reset(self, env_ids: Any, state_ids: Any, seed: Any) -> Observation:
        super().reset(env_ids, state_ids, seed)
        return self.observe(range(self.num_envs))


class ImagesOfOtherEnvs(SmallEnv):
    """another env"""

    def observe(self, env_ids: Any) -> Observation:
        obs = super().observe(env_ids)
        return attrs.evolve(obs, images={"top": obs.images["top"][::-1].copy()})


class OneImageBuffer(SmallEnv):
    """expected observations and results that stay as returned, got chunk_step: image|expected observations and results"""

    buffer = np.zeros((3, 8, 24, 3), np.uint8)

    def observe(self, env_ids: Any) -> Observation:
        obs = super().observe(env_ids)
        self.buffer[: len(env_ids)] = obs.images["top"]
        return attrs.evolve(obs, images={"top": self.buffer[: len(env_ids)]})


class OneStateBuffer(SmallEnv):
    """expected observations and results that stay as returned"""

    buffer = np.zeros((3, 3), np.float32)

    def observe(self, env_ids: Any) -> Observation:
        obs = super().observe(env_ids)
        self.buffer[env_ids] = obs.state
        state = self.buffer if len(env_ids) == self.num_envs else self.buffer[env_ids]
        return attrs.evolve(obs, state=state)


class OneRewardBuffer(SmallEnv):
    """expected observations and results that stay as returned"""

    buffer = np.zeros((3, 8), np.float32)

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        result = super().chunk_step(actions, active, stop_at_end)
        view = self.buffer[:, : actions.shape[1]]
        view[:] = result.rewards
        return attrs.evolve(result, rewards=view)


class OneFlagBuffer(SmallEnv):
    """expected observations and results that stay as returned"""

    buffer = np.zeros((3, 8), bool)

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        result = super().chunk_step(actions, active, stop_at_end)
        view = self.buffer[:, : actions.shape[1]]
        view[:] = result.executed
        return attrs.evolve(result, executed=view)


class WritesActions(SmallEnv):
    """expected its actions unchanged"""

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        actions *= 0.5
        return super().chunk_step(actions, active, stop_at_end)


class WritesActive(SmallEnv):
    """expected its active unchanged"""

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        result = super().chunk_step(actions, active, stop_at_end)
        active &= ~result.terminated.any(1) & ~result.truncated.any(1)
        return result


class WritesEnvs(SmallEnv):
    """expected its env_ids unchanged"""

    def reset(self, env_ids: Any, state_ids: Any, seed: Any) -> Observation:
        obs = super().reset(env_ids, state_ids, seed)
        env_ids += 1
        return obs


class WritesSeeds(SmallEnv):
    """expected its seed unchanged"""

    def reset(self, env_ids: Any, state_ids: Any, seed: Any) -> Observation:
        seed %= 2**32
        return super().reset(env_ids, state_ids, seed)


class SuccessOfAnyEnv(SmallEnv):
    """another env|alone as with others|the same|expected as succeeded"""

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        result = super().chunk_step(actions, active, stop_at_end)
        return attrs.evolve(result, success=np.full(len(active), result.success.any()), succeeded=None)


class SuccessOfTheChunkBefore(SmallEnv):
    """success False instead of True|success True instead of False"""

    before = np.zeros(3, bool)

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        result = super().chunk_step(actions, active, stop_at_end)
        shown, self.before = self.before, result.success
        return attrs.evolve(result, success=shown, succeeded=None)


class SuccessAnyTime(SmallEnv):
    """the same|expected as succeeded"""

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        result = super().chunk_step(actions, active, stop_at_end)
        return attrs.evolve(result, success=~result.success)


class SeesLate(SmallEnv):
    """the same|to show what was done"""

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        before = self.observe(range(self.num_envs))
        return attrs.evolve(super().chunk_step(actions, active, stop_at_end), obs=before)


class SeesTheLastButOne(SmallEnv):
    """the same|expected"""

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        ahead = copy.deepcopy(self)
        if actions.shape[1] == 1:
            return super().chunk_step(actions, active, stop_at_end)
        SmallEnv.chunk_step(ahead, actions[:, :-1], active, stop_at_end)
        return attrs.evolve(super().chunk_step(actions, active, stop_at_end), obs=ahead.observe(range(self.num_envs)))


class ShowsTheNextEpisode(SmallEnv):
    """expected the final observation of the episode that ended"""

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        result = super().chunk_step(actions, active, stop_at_end)
        for env_id in np.flatnonzero((result.terminated | result.truncated).any(1)):
            self.scenes[env_id].reset(self.scenes[env_id].state, 0)
        return attrs.evolve(result, obs=self.observe(range(self.num_envs)))


class ShowsNothingAtTheEnd(SmallEnv):
    """expected envs that are not active unchanged|the same|final observation"""

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        result = super().chunk_step(actions, active, stop_at_end)
        image = result.obs.images["top"].copy()
        image[(result.terminated | result.truncated).any(1)] = 0
        return attrs.evolve(result, obs=attrs.evolve(result.obs, images={"top": image}))


class NeedsAllEnvs(SmallEnv):
    """an env that was never reset"""

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        if any(scene.mark == 0.0 for scene in self.scenes):
            raise ValueError("an env that was never reset")
        return super().chunk_step(actions, active, stop_at_end)


class NeedsAnActiveEnv(SmallEnv):
    """ValueError"""

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        max(np.flatnonzero(active).tolist())
        return super().chunk_step(actions, active, stop_at_end)


class SnapshotForgets(SmallEnv):
    """expected the same step after a restore"""

    def restore(self, snapshot: Any) -> None:
        for saved in snapshot:
            saved["speed"] = 0.0
        super().restore(snapshot)


class Targets(Scene):
    """An action moves a target, which the dot follows."""

    target = 0.0

    def reset(self, state: int, seed: int) -> None:
        super().reset(state, seed)
        self.target = self.place

    def move(self, action: Any) -> None:
        self.target += 0.3 * float(action[0])
        self.place += 0.5 * (self.target - self.place)
        self.grip = float(action[1])


class TargetIsNotSaved(SmallEnv):
    """expected the same step after a restore"""

    scene_type = Targets

    def restore(self, snapshot: Any) -> None:
        """ManiSkill 3.0.1: the state lacks where the controller was heading."""
        super().restore([saved | {"target": saved["place"]} for saved in snapshot])


class RestoresASubStepOff(SmallEnv):
    """expected the same step after a restore"""

    def restore(self, snapshot: Any) -> None:
        """gymnasium-robotics 1.4.2, Fetch: the controller reads a position that the restore computes newly."""
        super().restore([saved | {"speed": saved["speed"] + 7e-4} for saved in snapshot])


class SnapshotIsLive(SmallEnv):
    """expected the same step after a restore"""

    def snapshot(self) -> Any:
        return [vars(scene) for scene in self.scenes]


class CloseTwice(SmallEnv):
    """close, twice: expected no exception, got RuntimeError"""

    closed = False

    def close(self) -> None:
        if self.closed:
            raise RuntimeError("closed already")
        self.closed = True


class NoEval(SmallEnv):
    """reset_states('eval'): expected at least one state, got none"""

    def reset_states(self, split: str) -> tuple[ResetState, ...]:
        return super().reset_states(split) if split == "train" else ()


class SharedIds(SmallEnv):
    """expected splits without a common id"""

    def reset_states(self, split: str) -> tuple[ResetState, ...]:
        return super().reset_states("train")


class TwiceTheSameId(SmallEnv):
    """expected ids that differ"""

    def reset_states(self, split: str) -> tuple[ResetState, ...]:
        return super().reset_states(split) * 2


class OtherOrder(SmallEnv):
    """expected the same order in every call"""

    calls = 0

    def reset_states(self, split: str) -> tuple[ResetState, ...]:
        self.calls += 1
        return super().reset_states(split)[:: -1 if self.calls % 3 == 0 else 1]


class UnknownTask(SmallEnv):
    """expected tasks among ['left', 'right']"""

    def reset_states(self, split: str) -> tuple[ResetState, ...]:
        return tuple(attrs.evolve(state, task="up") for state in super().reset_states(split))


class NoState(SmallEnv):
    """state: expected float32 [1, 3], got None"""

    def observe(self, env_ids: Any) -> Observation:
        return attrs.evolve(super().observe(env_ids), state=None)


class WideState(SmallEnv):
    """expected float32 [1, 3], got float64 [1, 3]"""

    def observe(self, env_ids: Any) -> Observation:
        obs = super().observe(env_ids)
        return attrs.evolve(obs, state=np.float64(obs.state))


class FloatImage(SmallEnv):
    """expected uint8 [1, 8, 24, 3], got float64"""

    def observe(self, env_ids: Any) -> Observation:
        obs = super().observe(env_ids)
        return attrs.evolve(obs, images={"top": obs.images["top"] / 255})


class IntFlags(SmallEnv):
    """terminated: expected bool"""

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        result = super().chunk_step(actions, active, stop_at_end)
        return attrs.evolve(result, terminated=result.terminated.astype(np.int64))


class RewardForNothing(SmallEnv):
    """expected 0 where nothing was executed"""

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        result = super().chunk_step(actions, active, stop_at_end)
        return attrs.evolve(result, rewards=result.rewards - np.float32(0.01))


class LimitForAll(SmallEnv):
    """alone as with others|the same episode|the other envs untouched|equal observations"""

    total = 0

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        result = super().chunk_step(actions, active, stop_at_end)
        self.total += int(result.executed.sum())
        cut = result.executed & (self.total % (5 * LIMIT) < 8) & (np.arange(actions.shape[1]) == actions.shape[1] - 1)
        return attrs.evolve(result, truncated=result.truncated | cut)


class Measured(SmallEnv):
    """Simulator that reports numbers of its own; it keeps to the contract."""

    def __init__(self, num_envs: int = 3, chunk: int = 4) -> None:
        super().__init__(num_envs, chunk)
        self.info = attrs.evolve(self.info, extras={"effort": "C", "energy": ""})

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        effort = np.abs(actions).sum(-1, dtype=np.float32)
        extras = {"effort": effort, "energy": effort.sum(-1)}
        return attrs.evolve(super().chunk_step(actions, active, stop_at_end), extras=self.reported(extras))

    def reported(self, extras: dict[str, Any]) -> dict[str, Any]:
        return extras


class ExtraMissing(Measured):
    """chunk_step(stop_at_end=True): extras['energy']: expected an array, as EnvInfo.extras declares, got none"""

    def reported(self, extras: dict[str, Any]) -> dict[str, Any]:
        return {"effort": extras["effort"]}


class ExtraUndeclared(Measured):
    """extras: expected names of ['effort', 'energy'], got ['torque']"""

    def reported(self, extras: dict[str, Any]) -> dict[str, Any]:
        return {**extras, "torque": extras["effort"]}


class ExtraShape(Measured):
    """extras['energy']: expected float32 [3], got float32 [3, 4]"""

    def reported(self, extras: dict[str, Any]) -> dict[str, Any]:
        return {**extras, "energy": extras["effort"]}


class ExtraNotFinite(Measured):
    """extras['energy']: expected finite numbers, got NaN or inf"""

    def reported(self, extras: dict[str, Any]) -> dict[str, Any]:
        return {**extras, "energy": extras["energy"] * np.float32(np.inf)}


BATCHES = tuple(
    kind
    for kind in vars().copy().values()
    if isinstance(kind, type) and issubclass(kind, SmallEnv) and kind not in (SmallEnv, Measured)
)


class ExpertOfTheFirstEnv(SmallEnv):
    """expert_chunk: expected success in 50% of train states"""

    def expert_chunk(self) -> Any:
        return np.repeat(super().expert_chunk()[:1], self.num_envs, 0)


class ExpertShape(SmallEnv):
    """expert_chunk: expected float32 [3, 4, 2], got float32 [3, 3, 2]"""

    def expert_chunk(self) -> Any:
        return super().expert_chunk()[:, :-1]


class ExpertType(SmallEnv):
    """expert_chunk: expected float32 [3, 4, 2], got float64 [3, 4, 2]"""

    def expert_chunk(self) -> Any:
        return super().expert_chunk().astype(float)


class ExpertWithABug(SmallEnv):
    """expected no exception, got TypeError: object of type 'NoneType' has no len()"""

    def expert_chunk(self) -> Any:
        return len(None)  # type: ignore[arg-type]


EXPERTS = (ExpertOfTheFirstEnv, ExpertShape, ExpertType, ExpertWithABug)

"""Simulators in which a person takes over, broken in one place each. Their docstrings quote the finding."""

from __future__ import annotations

from typing import Any

import numpy as np
from attrs import evolve
from small_simulators import Scene, SmallEnv

from vla_rl.core.types import ActionSource, ChunkResult

FAR = 0.3
"""Distance from the middle, away from the mark, at which the person takes over."""
INFO = evolve(Scene.info, takeovers=True, control_hz=10.0)


class AssistedScene(Scene):
    """Scene in which a person brings a dot back that goes the wrong way."""

    info = INFO
    late = False
    """The last action began late: every third one does."""

    def step(self, action: Any) -> Any:
        outcome = super().step(action)
        self.late = self.steps % 3 == 0
        return outcome

    def needs_person(self) -> bool:
        return self.place * np.sign(self.mark) < -FAR

    def person(self) -> Any:
        return np.array([np.sign(self.mark), 0.25 + 0.125 * np.sign(self.place)], np.float32)


class AssistedEnv(SmallEnv):
    """Simulator in which a person may act; it keeps to the contract."""

    scene_type = AssistedScene

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        shape = actions.shape[:2]
        source = np.full(shape, ActionSource.POLICY, np.int8)
        executed_actions = np.array(actions, np.float32)
        late = np.zeros(shape, bool)
        results = []
        running = np.array(active)
        for c in range(shape[1]):
            for env_id in np.flatnonzero(running):
                if self.takes_over(int(env_id)):
                    source[env_id, c] = ActionSource.PERSON
                    executed_actions[env_id, c] = self.scenes[env_id].person()
            result = super().chunk_step(executed_actions[:, c : c + 1], running, stop_at_end)
            for env_id in np.flatnonzero(running):
                late[env_id, c] = self.scenes[env_id].late
            if stop_at_end:
                running = running & ~(result.terminated | result.truncated)[:, 0]
            results.append(result)
        arrays = {
            name: np.concatenate([getattr(result, name) for result in results], axis=1)
            for name in ("rewards", "terminated", "truncated", "executed", "succeeded")
        }
        last = np.maximum(arrays["executed"].sum(1) - 1, 0)
        success = arrays["succeeded"][np.arange(shape[0]), last]
        whole = evolve(results[-1], **arrays, success=success, source=source, late=late)
        return self.told(evolve(whole, executed_actions=executed_actions), np.array(actions, np.float32))

    def takes_over(self, env_id: int) -> bool:
        return bool(self.scenes[env_id].needs_person())

    def told(self, result: ChunkResult, actions: Any) -> ChunkResult:
        """What is reported. `actions`: those of the policy."""
        return result


class AlwaysAPerson(AssistedEnv):
    """A person acts in every step; it keeps to the contract."""

    def takes_over(self, env_id: int) -> bool:
        return True


class EverybodyIsAPerson(AssistedEnv):
    """executed_actions: expected actions of whoever took over, got the policy's"""

    def takes_over(self, env_id: int) -> bool:
        return False

    def told(self, result: ChunkResult, actions: Any) -> ChunkResult:
        return evolve(result, source=np.full_like(result.source, ActionSource.PERSON))


class ActionsOfThePolicy(AssistedEnv):
    """executed_actions: expected actions of whoever took over, got the policy's"""

    def told(self, result: ChunkResult, actions: Any) -> ChunkResult:
        return evolve(result, executed_actions=actions)


class NoExecutedActions(AssistedEnv):
    """source: expected arrays, as executed_actions, got None"""

    def told(self, result: ChunkResult, actions: Any) -> ChunkResult:
        return evolve(result, executed_actions=None)


class OtherUnits(AssistedEnv):
    """executed_actions: expected actions within the bounds of EnvInfo"""

    def told(self, result: ChunkResult, actions: Any) -> ChunkResult:
        return evolve(result, executed_actions=100 * result.executed_actions)


class SourceOfAnotherEnv(AssistedEnv):
    """the same episode in envs that run the same state, seed and actions, got after"""

    def told(self, result: ChunkResult, actions: Any) -> ChunkResult:
        return evolve(result, source=np.roll(result.source, 1, axis=0))


class SourceOfItsOwn(AssistedEnv):
    """source: expected values of ActionSource"""

    def told(self, result: ChunkResult, actions: Any) -> ChunkResult:
        return evolve(result, source=np.where(result.source == ActionSource.POLICY, 0, 7).astype(np.int8))


class SourceAChunkLate(AssistedEnv):
    """source 1 instead of 0|source 0 instead of 1"""

    last: Any = None

    def told(self, result: ChunkResult, actions: Any) -> ChunkResult:
        before, self.last = self.last, result.source
        same = before is not None and before.shape == result.source.shape
        return evolve(result, source=before if same else result.source)


class LateWithoutAction(AssistedEnv):
    """late: expected False where nothing was executed"""

    def told(self, result: ChunkResult, actions: Any) -> ChunkResult:
        return evolve(result, late=result.late | ~result.executed)


class NoLate(AssistedEnv):
    """late: expected bool [3, 4], got object"""

    def told(self, result: ChunkResult, actions: Any) -> ChunkResult:
        return evolve(result, late=None)


class StaysForTheNextEpisode(AssistedEnv):
    """expected the same episode again after other ones"""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.there = np.zeros(self.num_envs, bool)

    def takes_over(self, env_id: int) -> bool:
        self.there[env_id] = self.there[env_id] or super().takes_over(env_id)
        return bool(self.there[env_id])


class OneBuffer(AssistedEnv):
    """executed_actions that changed in a later chunk_step"""

    def told(self, result: ChunkResult, actions: Any) -> ChunkResult:
        width = result.executed_actions.shape[1]
        self.buffers = getattr(self, "buffers", {})
        buffer = self.buffers.setdefault(width, np.empty_like(result.executed_actions))
        buffer[:] = result.executed_actions
        return evolve(result, executed_actions=buffer)


class Undeclared(AssistedEnv):
    """source: expected None, as executed_actions, got an array"""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.info = evolve(self.info, takeovers=False)


class LateWithoutARate(AssistedEnv):
    """late: expected None, as EnvInfo.control_hz, got an array"""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.info = evolve(self.info, control_hz=None)


class Unlabelled(AssistedEnv):
    """executed_actions: expected the policy's actions where `source` says that it chose, got others"""

    def told(self, result: ChunkResult, actions: Any) -> ChunkResult:
        return evolve(result, source=np.zeros_like(result.source))


class FirstActionUnlabelled(AssistedEnv):
    """executed_actions: expected the policy's actions where `source` says that it chose, got others"""

    def told(self, result: ChunkResult, actions: Any) -> ChunkResult:
        source = result.source.copy()
        source[:, 0] = ActionSource.POLICY
        return evolve(result, source=source)


class UnfilledWhereThePolicyActs(AssistedEnv):
    """Executed actions are given where they are read alone; it keeps to the contract."""

    def told(self, result: ChunkResult, actions: Any) -> ChunkResult:
        others = (result.source != ActionSource.POLICY)[..., None]
        return evolve(result, executed_actions=np.where(others, result.executed_actions, np.float32(0)))


BATCHES: tuple[type[SmallEnv], ...] = (
    EverybodyIsAPerson,
    ActionsOfThePolicy,
    NoExecutedActions,
    OtherUnits,
    SourceOfAnotherEnv,
    SourceOfItsOwn,
    SourceAChunkLate,
    LateWithoutAction,
    NoLate,
    StaysForTheNextEpisode,
    OneBuffer,
    Undeclared,
    LateWithoutARate,
    Unlabelled,
    FirstActionUnlabelled,
)
RIGHT: tuple[type[SmallEnv], ...] = (AssistedEnv, AlwaysAPerson, UnfilledWhereThePolicyActs)

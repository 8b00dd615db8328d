"""Requests for episodes: the reset state, the version of the weights and the previous ticket from which each ticket
starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vla_rl.core.catalogue import load
from vla_rl.core.reset_states import draw_state
from vla_rl.core.run.flow import Ticket
from vla_rl.core.run.shape import RunShape
from vla_rl.core.spec.sections import WeightedTasks
from vla_rl.core.spec.spec import Spec
from vla_rl.core.types import Episode, Requirements, ResetState
from vla_rl.runtime.driver.collecting.env_streams import EnvStreams
from vla_rl.runtime.driver.collecting.recordings import RecordingSchedule
from vla_rl.runtime.driver.collecting.task_weights import TaskWeighting
from vla_rl.runtime.messages.requests import EnvTrajectory, EpisodeRequest


class EpisodeRequests:
    """Turns tickets into episode requests."""

    def __init__(self, spec: Spec, states: Sequence[ResetState], needs: Requirements):
        """Create the requests' source. `needs`: requirements of the algorithm."""
        self.spec = spec
        self.states = states
        self.keep_frames = needs.frames
        self.shape = RunShape.from_spec(spec)
        self.streams = EnvStreams()
        self.recording_schedule = RecordingSchedule(spec)
        self._expert_share = load("trainer", spec.trainer.type, spec.plugins).expert_share
        self.task_weighting: TaskWeighting | None = None
        """Outcomes of each task, for `rollout.task_sampling: {type: weighted}`; None otherwise."""
        sampling = spec.rollout.task_sampling
        if isinstance(sampling, WeightedTasks):
            tasks = [state.task for state in states]
            self.task_weighting = TaskWeighting(tasks, sampling.window, sampling.smoothing, self.shape.max_lag)

    def build_request(self, ticket: Ticket, step: int, version: int) -> EpisodeRequest:
        """Return the request for a ticket that was issued while `step` ran and `version` was the newest."""
        spec = self.spec
        shape = self.shape
        weights = self.task_weighting.group_weights(step, ticket.group) if self.task_weighting else None
        steps_before = ticket.group // shape.groups_per_step if shape.has_overlap else step - 1
        share = 0.0 if self._expert_share is None else self._expert_share(spec.trainer.config, steps_before + 1)
        pinned = max(0, steps_before - shape.pinned_lag) if shape.pinned_lag else -1
        if spec.rollout.auto_reset is None:
            return EpisodeRequest(
                state=draw_state(self.states, spec.seed, ticket.group, weights=weights),
                number=ticket.number,
                record=self.keep_frames,
                recorded=self.recording_schedule.is_next_recorded(steps_before + 1),
                version=pinned,
                least=version,
                expert_share=share,
            )
        env = ticket.number % shape.envs
        request = EpisodeRequest(
            state=draw_state(self.states, spec.seed, env // shape.group_size, weights=weights),
            number=ticket.number,
            env_id=env,
            weights=weights,
            version=pinned,
            least=version,
            expert_share=share,
        )
        return self.streams.continue_stream(request)

    def record_outcomes(self, step: int, episodes: Sequence[Episode], last_ticket: int) -> dict[str, float]:
        """Record the outcomes of `step`'s rollout for the weights of tasks. Return metrics."""
        if self.task_weighting is None:
            return {}
        self.task_weighting.record_step_outcomes(step, episodes)
        weights = self.task_weighting.group_weights(step, last_ticket // self.shape.group_size)
        return {f"sampling/weight/{task}": weight for task, weight in weights.items()}

    def consume_trajectories(self, trajectories: Sequence[EnvTrajectory]) -> None:
        """Record that a step has trained on these trajectories, in the order of their tickets."""
        for trajectory in trajectories:
            self.streams.consume_trajectory(trajectory)

    def save(self, folder: Path) -> None:
        self.streams.save(folder / "streams.npz")
        if self.task_weighting:
            self.task_weighting.save(folder / "tasks.json")

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""
        self.streams.load(folder / "streams.npz", {state.id: state for state in self.states})
        if self.task_weighting:
            self.task_weighting.load(folder / "tasks.json")

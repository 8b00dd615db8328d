"""A person as a reward model: answers, deadlines and the safety stop, whatever the person answers through."""

from __future__ import annotations

import numpy as np

from vla_rl.core.contexts import CheckContext, RewardModelContext
from vla_rl.core.errors import UserError
from vla_rl.core.reward_models import RewardModel
from vla_rl.core.types import Array, Observation, to_numpy
from vla_rl.plugins.reward_models.person.config import PersonConfig, check_one_env
from vla_rl.toolkit.people.panel import Answer, Panel
from vla_rl.toolkit.people.questions import ask_person, check_stop, open_panel

RUNNING = "the robot acts: press success or failure when the episode is over"
RESET = "reset the scene: ready?"
OUTCOME = "the episode is over: was it a success?"


class PersonRewards(RewardModel):
    """Success and failure by a person, who watches one robot."""

    deterministic = False
    watches = True

    def __init__(self, config: PersonConfig, context: RewardModelContext) -> None:
        """Open the page or the terminal. Raises UserError for several envs, and for a camera that is not there."""
        check_one_env(config, CheckContext(num_envs=context.num_envs))
        cameras = tuple(context.env.cameras)
        if config.camera is not None and config.camera not in cameras:
            raise UserError(
                f"rewards.camera: the simulator has no camera {config.camera!r}; it has: {', '.join(cameras) or 'none'}"
            )
        self.waits_s = config.deadline_s
        self._config = config
        self._camera = config.camera or next(iter(cameras), None)
        self._answer: Answer | None = None
        """Answer about the running episode."""
        self.panel: Panel = open_panel(config, "rewards")

    def before_reset(self, env_ids: Array) -> None:
        """Wait until the person has reset the scene. Raises SafetyStop."""
        if self._config.reset:
            self._ask_person(RESET, ("ready",))
        self._answer = None
        self.panel.show_text(RUNNING, ("success", "failure"))

    def watch(self, obs: Observation | None) -> None:
        """Show the image, and note an answer. Raises SafetyStop."""
        if obs is not None and self._camera is not None:
            self.panel.show_image(to_numpy(obs.images[self._camera][0]))
        answer = self.panel.take_answer(0.0)
        check_stop(self.panel, answer)
        self._answer = answer or self._answer

    def success_probability(self, obs: Observation, ends: Array) -> Array:
        """Return 1 or 0 by the person's answer; at the end of an episode, ask for it."""
        self.watch(obs)
        if ends[0] and self._answer is None and self._config.outcome:
            self._answer = self._ask_person(OUTCOME, ("success", "failure"))
        return np.array([self._answer == "success"], np.float32)

    def failed(self, obs: Observation) -> Array:
        return np.array([self._answer == "failure"])

    def close(self) -> None:
        self.panel.close()

    def _ask_person(self, question: str, answers: tuple[Answer, ...]) -> Answer:
        """Wait for an answer. Raises as `ask`."""
        return ask_person(
            self.panel,
            question,
            answers,
            deadline_s=self._config.deadline_s,
            stop_requested=self.stop_requested,
            path="rewards",
        )

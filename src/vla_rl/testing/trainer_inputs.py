"""Parts of `check_trainer`: changes of single parts of the data, after which updates lead to other weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from attrs import evolve

from vla_rl.core.augmentation import AugmentSpec
from vla_rl.core.declarations import TrainingData
from vla_rl.core.trainers import DemonstrationsData, ImitationStep, TrajectoryData, Transitions, TransitionsData
from vla_rl.core.types import ActionSource, Array, EnvInfo, to_numpy
from vla_rl.testing.common.comparison import differing_weights
from vla_rl.testing.common.findings import Findings
from vla_rl.testing.common.interpreter import call_elsewhere
from vla_rl.testing.trainer_case import SAMPLES, Rank, TrainerBuilder
from vla_rl.testing.trainer_samples import LearningSource, RecordedSamples, made_up_data

UPDATES = 3
"""Updates of two optimiser steps each; those of transitions are two."""
ROW = 1
"""Sample that is changed, counted from the end of a recording; it belongs to the second of two optimiser steps."""
Change = Callable[[Any], Any]
"""Function of an update's data that returns them with a change."""


def check_trainer_inputs(f: Findings, builder: TrainerBuilder, learns_from: LearningSource) -> None:
    """Change each part of the data in turn, and compare the weights after some updates."""
    if builder.kind is TrainingData.TRAJECTORIES:
        _check_trajectories(f, builder)
    elif builder.kind is TrainingData.TRANSITIONS:
        _check_transitions(f, builder, learns_from)
    else:
        _check_demonstrations(f, builder)


def keep_unchanged(data: Any) -> Any:
    """Return the data."""
    return data


class _Answers:
    """The weights that updates lead to, with and without changes of their data."""

    def __init__(
        self,
        builder: TrainerBuilder,
        *,
        train: Mapping[str, Any] | None = None,
        from_images: bool = False,
        base: Change = keep_unchanged,
    ) -> None:
        """Make the updates without a change.

        Args:
            train, from_images: as `TrainerBuilder.make_case` takes them.
            base: change of the data that others are compared with.
        """
        self._builder = builder
        self._train = train
        self._from_images = from_images
        self._base = base
        of_transitions = builder.kind is TrainingData.TRANSITIONS
        self._updates = 2 if of_transitions else UPDATES
        self._micro_batch = SAMPLES if of_transitions else SAMPLES // 2
        self.weights = self._weights_after(keep_unchanged, None)

    def weights_depend_on(self, change: Change, only: int | None = None) -> bool:
        """Return whether other weights follow from changed data. `only`: number of the update whose data are changed;
        None: those of all."""
        weights = self._weights_after(change, only)
        return bool(differing_weights(self.weights, weights))

    def expect(self, f: Findings, what: str, change: Change, remedy: str, only: int | None = None) -> None:
        """Record a finding unless the weights depend on it. `only`: as `weights_depend_on` takes it."""
        expected = f"other weights after other data ({what})"
        f.expect(self.weights_depend_on(change, only), "update", expected, "the same", remedy)

    def _weights_after(self, change: Change, only: int | None) -> dict[str, torch.Tensor]:
        case = self._builder.make_case(self._micro_batch, train=self._train, from_images=self._from_images)
        for number in range(1, self._updates + 1):
            data = self._base(made_up_data(case, number, steps=2))
            case.trainer.update(change(data) if only in (None, number) else data)
        return case.copy_weights()


# ---------------------------------------------------------------------------------------------------- trajectories


def _check_trajectories(f: Findings, builder: TrainerBuilder) -> None:
    answers = _Answers(builder, train={"lr_schedule": "linear", "steps": 2 * UPDATES})
    answers.expect(f, "advantages", _changed_field("advantages", np.negative), "multiply the loss by them")
    answers.expect(f, "samples of the second optimiser step", _other_sample, "make all steps, each on its own")
    schedule = "set the rates of `TrainSpec.factor(data.step)` (vla_rl.toolkit.trainers.optimizer.set_rates)"
    later: Change = lambda data: evolve(data, step=data.step + 1)  # noqa: E731
    answers.expect(f, "the training step, and with it train.lr_schedule", later, schedule)
    case = builder.make_case()
    case.trainer.update(made_up_data(case, 1))
    if case.algorithm.calls:  # else the trainer has its own loss
        remedy = "give it to the algorithm's loss as the data have it (vla_rl.toolkit.trainers.micro_batches)"
        changed = _changed_field("log_probs", lambda x: x - 1)
        answers.expect(f, "weights", _changed_field("weights", lambda x: x + 1), remedy)
        answers.expect(f, "log_probs of the policy that acted", changed, remedy)
        answers.expect(f, "valid", _changed_field("valid", np.logical_not), remedy)
        answers.expect(f, "returns", _changed_field("returns", lambda x: x + 1), remedy)


def _changed_field(name: str, change: Callable[[Array], Array]) -> Change:
    def change_row(data: TrajectoryData) -> TrajectoryData:
        array = np.array(data.fields[name])
        array[ROW] = change(array[ROW])
        return evolve(data, fields={**data.fields, name: array})

    return change_row


def _other_sample(data: TrajectoryData) -> TrajectoryData:
    first, second = data.steps
    part, *rest = second.micro_batches
    part = np.array(part)
    part[0] = first.micro_batches[0][0]
    return evolve(data, steps=[first, evolve(second, micro_batches=(part, *rest))])


# -------------------------------------------------------------------------------------------------- demonstrations


def _check_demonstrations(f: Findings, builder: TrainerBuilder) -> None:
    answers = _Answers(builder)
    turned = partial(_opposite_actions, builder.make_case().trained.info)
    changed = _changed_recording("actions", -ROW, turned)
    answers.expect(f, "actions", changed, "clone the actions of the recording")
    answers.expect(f, "samples of the second optimiser step", _other_index, "make all steps, each on its own")
    remedy = "set it before the step (optimizer.set_rate)"
    answers.expect(f, "ImitationStep.lr", _changed_steps(lambda step: {"lr": 2 * step.lr}), remedy)
    if builder.kind is TrainingData.RECORDINGS:
        remedy = "read them by `Demonstrations.read_rewards`"
        answers.expect(f, "rewards", _changed_recording("rewards", -ROW, lambda x: x + 0.5), remedy)
        earlier = _changed_recording("following", ROW, lambda x: -1)
        answers.expect(f, "the ends of episodes, by `following`", earlier, remedy)
    remedy = "read samples by `read_samples` of vla_rl.toolkit.trainers.reader"
    augmented = _changed_steps(lambda step: {"augment": AugmentSpec(random_brightness=0.5)})
    _Answers(builder, from_images=True).expect(f, "ImitationStep.augment", augmented, remedy)


def _changed_recording(name: str, row: int, change: Callable[[Array], Any]) -> Change:
    def change_row(data: DemonstrationsData) -> DemonstrationsData:
        recording = data.demonstrations
        assert isinstance(recording, RecordedSamples)
        array = np.array(getattr(recording, name))
        array[row] = change(array[row])
        changes: dict[str, Any] = {name: array}
        return evolve(data, demonstrations=evolve(recording, **changes))

    return change_row


def _changed_steps(change: Callable[[ImitationStep], Mapping[str, Any]]) -> Change:
    return lambda data: evolve(data, steps=[evolve(step, **change(step)) for step in data.steps])


def _opposite_actions(info: EnvInfo, actions: Array) -> Array:
    """Return the actions as far from the other end of their range."""
    opposite: Array = np.array(info.action_low) + np.array(info.action_high) - actions
    return opposite.astype(np.float32)


def _other_index(data: DemonstrationsData) -> DemonstrationsData:
    first, second = data.steps
    indices = np.array(second.indices)
    indices[0] = first.indices[0]
    return evolve(data, steps=[first, evolve(second, indices=indices)])


# ---------------------------------------------------------------------------------------------------- transitions


def _check_transitions(f: Findings, builder: TrainerBuilder, learns_from: LearningSource) -> None:
    """Check that a trainer of transitions depends on all parts of what it learns from."""
    answers = _Answers(builder)
    info = builder.make_case().trained.info
    other_frames = _changed(lambda t: {"frames": evolve(t.frames, state=-np.asarray(t.frames.state))})
    never_terminated = _changed(lambda t: {"terminated": np.zeros_like(t.terminated)})
    other_following = _changed(lambda t: {"following": np.roll(t.following, 3)})
    by_person = _changed(lambda t: {"source": np.full_like(t.source, ActionSource.PERSON)})
    remedy = "keep the new transitions of each update"
    answers.expect(f, "transitions of a later update", other_frames, remedy, only=2)
    other_actions = _changed(lambda t: {"actions": _opposite_actions(info, t.actions)})
    if learns_from is LearningSource.LABELS or answers.weights_depend_on(other_actions):
        # One that learns from the policy's extras alone has none of what a person did.
        what = "transitions of a later update, where a person acted in every chunk"
        _Answers(builder, base=by_person).expect(f, what, other_frames, "train on what a person did, too", only=2)
    if learns_from is LearningSource.LABELS:
        answers.expect(f, "expert_actions", _turned_field("expert_actions", info), "clone the labels")
        return
    remedy = "learn from what was executed, whoever chose it"
    answers.expect(f, "actions, and the policy's extras", _turned_field("actions", info), remedy)
    if learns_from is LearningSource.TAKEOVERS:
        remedy = "learn from rewards, from takeovers, or from an expert's labels (TrainerPlugin.expert_share)"
        answers.expect(f, "source, and rewards", _changed(_other_source), remedy)
        return
    remedy = "add up the rewards of all actions of a chunk, discounted"
    answers.expect(f, "reward of a chunk's last action", _more_reward(slice(-1, None)), remedy)
    endless = _Answers(builder, base=never_terminated)
    if not (answers.weights_depend_on(never_terminated) or endless.weights_depend_on(other_following)):
        return  # a bandit, which learns from each chunk's own reward
    remedy = "add the value of the observations in which chunks end, but for episodes that terminated"
    answers.expect(f, "terminated", never_terminated, remedy)
    endless.expect(f, "what follows chunks that did not terminate", other_following, remedy)


def learning_source(builder: TrainerBuilder) -> LearningSource:
    """Return what a trainer learns from. One of transitions that does not depend on rewards learns from takeovers."""
    if builder.kind is not TrainingData.TRANSITIONS:
        return LearningSource.REWARDS if builder.kind is not TrainingData.DEMONSTRATIONS else LearningSource.LABELS
    if builder.plugin.expert_share is not None:
        return LearningSource.LABELS
    return (
        LearningSource.REWARDS
        if _Answers(builder).weights_depend_on(_more_reward(slice(None)))
        else LearningSource.TAKEOVERS
    )


def _get_transitions(data: TransitionsData) -> Transitions:
    assert data.transitions is not None
    return data.transitions


def _changed(change: Callable[[Transitions], Mapping[str, Any]]) -> Change:
    return lambda data: evolve(data, transitions=evolve(_get_transitions(data), **change(_get_transitions(data))))


def _turned_field(name: str, info: EnvInfo) -> Change:
    def turn_field(transitions: Transitions) -> Mapping[str, Any]:
        extras = {key: -array for key, array in transitions.extras.items()}
        return {name: _opposite_actions(info, getattr(transitions, name)), "extras": extras}

    return _changed(turn_field)


def _more_reward(of_actions: slice) -> Change:
    def add_reward(transitions: Transitions) -> Mapping[str, Any]:
        rewards = np.array(transitions.rewards)
        rewards[::2, of_actions] += 1
        return {"rewards": rewards}

    return _changed(add_reward)


def _other_source(transitions: Transitions) -> Mapping[str, Any]:
    others = np.where(transitions.source == ActionSource.POLICY, ActionSource.PERSON, ActionSource.POLICY)
    return {"source": others.astype(np.int8)}


# ---------------------------------------------------------------------------------------------- for right trainers

KEPT = 48
"""Transitions of an update that a trainer draws batches from, several times as many as a batch has."""
STEPS = 40
"""Optimiser steps after which most of them have been drawn."""
BY_PERSON, BY_POLICY = range(KEPT - 1, 0, -6), range(KEPT - 2, 0, -6)
"""Transitions that are changed in turn, the newest first: a person acts in all of them, or in none."""


def check_drawn_batches(f: Findings, builder: TrainerBuilder, learns_from: LearningSource) -> None:
    """Check that a trainer of transitions draws others in each optimiser step."""
    if builder.kind is not TrainingData.TRANSITIONS:
        return
    first, steps = _weights_from_kept(builder, None, learns_from)
    if steps < STEPS // 2:
        return
    used = []
    for row in BY_POLICY if learns_from is LearningSource.REWARDS else BY_PERSON:
        changed, _ = _weights_from_kept(builder, row, learns_from)
        used.append(bool(differing_weights(first, changed)))
    newest = used.index(False) if False in used else len(used)
    kept = len(used) if any(used[newest:]) or not newest else newest  # a small store has forgotten older ones
    expected = f"most of {KEPT} transitions in the batches of {steps} optimiser steps"
    got = f"{sum(used)} of {kept} that were looked at"
    f.expect(2 * sum(used) >= kept, "update", expected, got, "draw by the number of the update (vla_rl.generator)")


def _weights_from_kept(
    builder: TrainerBuilder, row: int | None, learns_from: LearningSource
) -> tuple[dict[str, torch.Tensor], int]:
    """Return weights after updates on the same transitions, one of them changed, and the number of optimiser steps."""
    rank = Rank()
    rank.world = 1
    case = builder.make_case(strategy=rank)
    data = made_up_data(case, 1, np.arange(KEPT))
    if row is not None:
        name = {LearningSource.REWARDS: "rewards", LearningSource.LABELS: "expert_actions"}.get(learns_from, "actions")
        array = np.array(getattr(_get_transitions(data), name))
        array[row] = array[row] + 1 if name == "rewards" else _opposite_actions(case.trained.info, array[row])
        data = _changed(lambda transitions: {name: array})(data)
    case.trainer.update(data)
    for number in range(2, STEPS // 2 + 1):
        if not 0 < len(rank.reductions) < STEPS:
            break
        case.trainer.update(TransitionsData(step=number, version=number - 1, transitions=None))
    return case.copy_weights(), len(rank.reductions)


def check_hashes(f: Findings, builder: TrainerBuilder) -> None:
    """Check that weights do not depend on the hashes of strings, which are others in each process."""
    try:
        elsewhere = call_elsewhere(_updated_weights, builder)
    except Exception as exc:
        f.notice(f"not compared with another process: {exc}")
        return
    here = _updated_weights(builder)
    differ = [name for name, array in here.items() if not np.allclose(array, elsewhere[name], atol=1e-5)]
    remedy = "order nothing by hash() of a string and go through no set of strings: sort them"
    f.expect(not differ, "update", "the same weights in each process", f"others in {differ[:3]}", remedy)


def _updated_weights(builder: TrainerBuilder) -> dict[str, Array]:
    """Return the weights after some updates of several micro-batches."""
    return {name: to_numpy(tensor) for name, tensor in _Answers(builder).weights.items()}

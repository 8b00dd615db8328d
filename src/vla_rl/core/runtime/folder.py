"""The run folder: spec, environment, checkpoints (written beside and renamed) and results."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import attrs
from attrs import define

from vla_rl.core.errors import UserError
from vla_rl.core.events import Evaluation
from vla_rl.core.plugins import KINDS, installed
from vla_rl.core.spec import Spec

LAST = "last"
LIBRARIES = (
    "vla-rl",
    "torch",
    "numpy",
    "ray",
    "transformers",
    "peft",
    "gymnasium",
    "mujoco",
    "pluggy",
    "attrs",
    "cattrs",
)


class CheckpointError(UserError):
    """A checkpoint could not be written or read; the previous one is untouched."""


@define
class State:
    """What a run remembers besides weights. There is no generator state: randomness is keyed."""

    step: int = 0
    wall_seconds: float = 0.0
    env_steps: int = 0
    faults: int = 0
    """Simulator rows that broke and were replaced."""
    evaluated: int = -1
    """Last step that was evaluated."""
    before: dict[str, Any] | None = None
    """Result of the evaluation at step 0."""
    last: dict[str, Any] | None = None
    """Result of the last evaluation."""
    warmed_up: bool = False
    """The expert was cloned; a run that is stopped before that starts again."""
    statistics: Mapping[str, Any] | None = None
    """By which the model scales, where it took them from demonstrations."""

    def remember(self, evaluation: Evaluation) -> None:
        self.evaluated, self.last = evaluation.step, summary(evaluation)
        if evaluation.step == 0:
            self.before = self.last


def summary(evaluation: Evaluation) -> dict[str, Any]:
    """An evaluation as results.json has it."""
    mean = sum(evaluation.repeats) / max(len(evaluation.repeats), 1)
    spread = sum((r - mean) ** 2 for r in evaluation.repeats)
    count = len(evaluation.repeats)
    return {
        "step": evaluation.step,
        "success": attrs.asdict(evaluation.success),
        "tasks": {name: attrs.asdict(rate) for name, rate in evaluation.tasks.items()},
        "repeats": list(evaluation.repeats),
        "deviation": (spread / (count - 1)) ** 0.5 if count > 1 else None,
        "seconds": evaluation.seconds,
    }


class RunFolder:
    def __init__(self, path: Path):
        self.path = path
        self.checkpoints = path / "checkpoints"

    def create(self, spec: Spec, resume: bool) -> None:
        """Make the folder. Raises UserError when it holds a run already and `resume` is not asked for."""
        if (self.path / "spec.yaml").exists() and not resume:
            raise UserError(
                f"{self.path} already holds a run; add --resume to go on with it, or choose another --folder"
            )
        self.path.mkdir(parents=True, exist_ok=True)
        spec.dump(self.path / "spec.yaml")
        self._write_json("environment.json", environment(spec))

    def latest(self) -> Path | None:
        """The newest complete checkpoint."""
        last = self.checkpoints / LAST
        return last.resolve() if last.exists() else None

    def save(self, state: State, write: Callable[[Path, Path], None], keep: int) -> Path:
        """Write a checkpoint beside, sync it, rename it and move `last`; only then drop those beyond `keep`.
        Raises CheckpointError, and then the previous checkpoint is still the last one."""
        target = self.checkpoints / f"step_{state.step:06d}"
        partial = self.checkpoints / f".{target.name}.partial"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            (partial / "model").mkdir(parents=True)
            (partial / "trainer").mkdir()
            write(partial / "model", partial / "trainer")
            (partial / "trainer" / "state.json").write_text(json.dumps(attrs.asdict(state), indent=1))
            for file in sorted(partial.rglob("*")):
                _sync(file)
            shutil.rmtree(target, ignore_errors=True)
            os.replace(partial, target)
            _sync(self.checkpoints)
            link = self.checkpoints / f".{LAST}"
            link.unlink(missing_ok=True)
            link.symlink_to(target.name)
            os.replace(link, self.checkpoints / LAST)
        except Exception as exc:
            free = shutil.disk_usage(self.path).free / 2**20  # libraries do not always say that it is this
            shutil.rmtree(partial, ignore_errors=True)
            previous = self.latest()
            raise CheckpointError(
                f"the checkpoint of step {state.step} could not be written to {self.checkpoints}: {exc}\n"
                f"  {free:.1f} MiB were free on that disk\n"
                f"  last complete checkpoint: {previous or 'none'}; make room and run again with --resume"
            ) from exc
        complete = sorted(self.checkpoints.glob("step_*"))
        for old in complete[:-keep] if keep else []:
            if old != target:
                shutil.rmtree(old, ignore_errors=True)
        return target

    def restore(self) -> tuple[State, Path] | None:
        """State and trainer folder of the newest complete checkpoint."""
        last = self.latest()
        if last is None:
            return None
        return read_state(last), last / "trainer"

    def write_results(
        self, spec: Spec, state: State, notes: Sequence[str], doing: str, roles: Mapping[str, Any]
    ) -> dict[str, Any]:
        """`notes`: what the simulator has to say of its settings; `doing`: as in `Run`; `roles`: `Trace.roles` of this
        attempt at the run."""
        last, before = state.last or {}, state.before
        results = {
            "doing": doing,
            "success": last.get("success"),
            "before": before and before["success"],
            "tasks": last.get("tasks", {}),
            "repeats": last.get("repeats", []),
            "deviation": last.get("deviation"),
            "split": "eval",
            "seeds": {"run": spec.seed, "rule": "episode seeds are keyed by (run seed, row, episode)"},
            "max_steps": spec.rollout.max_steps or "the task's own limit",
            "greedy": spec.eval.greedy,
            "steps": state.step,
            "env_steps": state.env_steps,
            "faults": state.faults,
            "roles": roles,
            "notes": list(notes),
            "versions": versions(),
            "wall_seconds": state.wall_seconds,
        }
        self._write_json("results.json", results)
        return results

    def _write_json(self, name: str, data: Any) -> None:
        partial = self.path / f".{name}.partial"
        partial.write_text(json.dumps(data, indent=1, default=str) + "\n")
        _sync(partial)
        os.replace(partial, self.path / name)


def read_state(checkpoint: Path) -> State:
    """Of a checkpoint folder. Raises CheckpointError."""
    try:
        return State(**json.loads((checkpoint / "trainer" / "state.json").read_text()))
    except (OSError, ValueError, TypeError) as exc:
        raise CheckpointError(f"{checkpoint} is not a readable checkpoint: {exc}") from exc


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def environment(spec: Spec) -> dict[str, Any]:
    """What is needed to understand a number later: versions, plugins, renderer, machine, argv."""
    import torch

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "versions": versions(),
        "plugins": {
            kind: {name: [item.origin for item in items] for name, items in installed(kind, spec.plugins).items()}
            for kind in KINDS
        },
        "renderer": os.environ.get("MUJOCO_GL", "default"),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "gpus": devices,
        "argv": sys.argv,
    }


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

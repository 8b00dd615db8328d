"""The run folder: who may write to it, spec, environment, checkpoints (written aside and renamed), results."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs

from vla_rl.core.errors import CheckpointError, UserError, WorkerDied
from vla_rl.core.events import Run
from vla_rl.core.paths import explain_path_errors, link_or_copy, resolve_path
from vla_rl.core.run.state import State
from vla_rl.core.spec.spec import Spec, checkpoint_record
from vla_rl.core.spec.yaml import dump_yaml
from vla_rl.runtime.run_folder.changes import changes_of, describe_changes, refuse_changes
from vla_rl.runtime.run_folder.environment import describe_environment, library_versions
from vla_rl.runtime.run_folder.lock import RunLock
from vla_rl.runtime.run_folder.manifest import NAME as MANIFEST
from vla_rl.runtime.run_folder.manifest import find_damage, same_manifest, write_manifest
from vla_rl.runtime.run_folder.state_file import read_state_file, write_state
from vla_rl.toolkit.models.checkpoints.files import open_to_readers

logger = logging.getLogger(__name__)

LAST, STATE = "last", "state.json"
ENVIRONMENT = "environment.json"
LOGS = (".log", ".out", ".err")
SHOWN = 5
"""Number of file names in a message."""
LITTLE = 2**30
"""Free bytes below which a full disk may be the reason why a checkpoint could not be written."""
STEP = re.compile(r"step_(\d+)")
RESULTS = ("results.json", "*.jsonl", "videos/*")
"""Files that show that a run has begun, besides checkpoints."""


class RunFolder:
    """Folder of one run. Files appear complete: each is written under another name and renamed."""

    def __init__(self, path: Path):
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.spec_file = path / "spec.yaml"
        self._lock: RunLock | None = None
        self._unlinked = False
        """True once the warning was logged that the disk has no links."""

    # ------------------------------------------------------------------------------------------ start and resume

    def claim_storage(self, resume: bool, lost: Callable[[UserError], None] = lambda error: None) -> RunLock:
        """Create the folder, or with `resume` expect a run in it, and lock it until the lock's release. Raises
        UserError where that is not possible, FolderInUse when another process holds the lock. `lost` is called with
        an error if the folder is moved later."""
        try:
            if resume and not self.spec_file.is_file():
                problem = "holds no run (there is no spec.yaml)" if self.path.exists() else "does not exist"
                raise UserError(
                    f"there is nothing to resume: {self.path} {problem}\n"
                    "  give the folder of the run with --folder, or leave out --resume to start one there"
                )
            if not resume:
                self._refuse_strangers()
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = RunLock(self.path, lost=lost)
            return self._lock
        except OSError as exc:
            why = "it is a file" if isinstance(exc, FileExistsError) else exc.strerror or exc
            raise UserError(f"no run can be kept in {self.path}: {why}; choose another place with --folder") from exc

    def begin_run(self, spec: Spec, mode: str, resume: bool) -> tuple[State, Path | None]:
        """Return what to start from: the state, and the trainer folder of its checkpoint, if any. `mode` is as in
        `Run`. Raises UserError where the folder holds a run and `resume` is not asked for, or where the run to resume
        is another one; CheckpointError when none of its checkpoints is sound."""
        if not resume:
            self._refuse_to_overwrite()
            self.record_training(spec)
            return State(mode=mode), None
        changed = changes_of(self.spec_file, spec, mode)
        refuse_changes(changed, self.path, self.latest_checkpoint())
        state, trainer = self.restore_checkpoint() or (State(mode=mode), None)
        if state.mode != mode:
            raise UserError(
                f"{self.path} is a run that does {state.mode}, not {mode}; choose another --folder, and give its "
                f"weights as model.checkpoint={self.checkpoints / LAST / 'model'} if you mean to start from them"
            )
        if trainer is None:
            logger.warning("%s has no checkpoint yet: it starts over at step 0", self.path)
        if advice := describe_changes(changed):
            logger.warning(
                "%s continues with other settings; those until step %d are kept next to its spec.yaml:\n%s",
                self.path,
                state.step,
                advice,
            )
        return state, trainer

    def record_training(self, spec: Spec, resumed: int | None = None) -> None:
        """Write spec and environment. Another spec, valid until the step that a run resumes from, is kept as a copy."""
        self._write_file(ENVIRONMENT, _to_json(describe_environment(spec)))
        text = dump_yaml(spec.to_dict())
        if resumed is not None and self.spec_file.read_text(encoding="utf-8") != text:
            old_spec = self.path / f"spec-until_step_{resumed:06d}.yaml"
            if not old_spec.exists():  # an earlier attempt from this step saved no checkpoint, so its spec made nothing
                shutil.copyfile(self.spec_file, old_spec)
        self._write_file("spec.yaml", text)

    def _refuse_strangers(self) -> None:
        """UserError for a folder neither empty nor of a run. Hidden files and logs, perhaps the run's, do not count."""
        if not self.path.is_dir() or (self.path / ENVIRONMENT).exists():
            return
        if self.spec_file.exists():
            raise UserError(
                f"{self.spec_file} was not written by a run, which would replace it; choose another --folder"
            )
        others = sorted(entry.name for entry in self.path.iterdir() if not _may_be_there(entry))
        if others:
            more = f" and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
            raise UserError(
                f"{self.path} is neither empty nor the folder of a run: it holds {', '.join(others[:SHOWN])}{more}; "
                "choose another --folder"
            )

    def _refuse_to_overwrite(self) -> None:
        """Raise UserError for a folder with a run. One that failed before its first step or evaluation is none."""
        results = (file for pattern in RESULTS for file in self.path.glob(pattern))
        if self.latest_checkpoint() or any(file.stat().st_size for file in results):
            raise UserError(f"{self.path} already holds a run; add --resume to continue it, or choose another --folder")

    # ----------------------------------------------------------------------------------------------- checkpoints

    def latest_checkpoint(self) -> Path | None:
        """Return the newest checkpoint, without a check of its files. It needs no link: `last` is for people."""
        saved = self._saved_checkpoints()
        if saved:
            return saved[0]
        last = self.checkpoints / LAST
        return last if (last / MANIFEST).is_file() else None  # a copy of a run may contain only the folder `last`

    def save_checkpoint(self, state: State, write: Callable[[Path, Path], None], keep: int) -> Path:
        """Write a checkpoint next to the others with its manifest, sync it, rename it and point `last` to it; only then
        delete all but the newest `keep`. Return its folder. `write(model, trainer)` fills two folders. Raises
        RunFolderGone before anything is written; CheckpointError, or WorkerDied where a worker died meanwhile: then no
        complete checkpoint is lost."""
        if self._lock is not None:
            self._lock.check_place()
        target = self.checkpoints / f"step_{state.step:06d}"
        partial, replaced = (self.checkpoints / f".{target.name}.{end}" for end in ("partial", "replaced"))
        try:
            self._repair_checkpoints()
            (partial / "model").mkdir(parents=True)
            (partial / "trainer").mkdir()
            write(partial / "model", partial / "trainer")
            write_state(partial / "trainer" / STATE, state)
            open_to_readers(partial)
            write_manifest(partial)
            for file in sorted(partial.rglob("*")):
                _sync_file(file)
            if target.exists():
                os.replace(target, replaced)
            os.replace(partial, target)
            _sync_file(self.checkpoints)
            self._point_last_to(target)
        except WorkerDied:  # the disk is not to blame, and the run may continue from an earlier checkpoint
            with suppress(OSError):
                self._repair_checkpoints()
            raise
        except Exception as exc:
            free = shutil.disk_usage(self.path).free
            if isinstance(exc, OSError):
                full, reason = exc.errno in (errno.ENOSPC, errno.EDQUOT), str(exc)
            else:  # libraries report a full disk in words of their own: "basic_ios::clear", "enforce fail"
                full = free < LITTLE
                reason = f"the disk seems to be full ({str(exc).partition(chr(10))[0]})" if full else str(exc)
            with suppress(OSError):  # an error in tidying would hide the first one
                self._repair_checkpoints()
            raise CheckpointError(
                f"the checkpoint of step {state.step} could not be written to {self.checkpoints}: {reason}\n"
                f"  {free / 2**20:.1f} MiB were free on that disk\n"
                f"  last complete checkpoint: {self.latest_checkpoint() or 'none'}; "
                f"{'make room' if full else 'mend that'}, and resume the run"
            ) from exc
        shutil.rmtree(replaced, ignore_errors=True)
        for old in self._saved_checkpoints()[keep:]:
            if old != target:
                shutil.rmtree(old, ignore_errors=True)
        return target

    def replace_state(self, state: State, keep: int) -> Path:
        """Replace the state in the checkpoint of its step, whose other files stay; otherwise as `save_checkpoint`."""
        saved = self.checkpoints / f"step_{state.step:06d}"

        def link_files(model: Path, trainer: Path) -> None:
            shutil.copytree(saved, model.parent, copy_function=link_or_copy, dirs_exist_ok=True)
            for file in (trainer / STATE, model.parent / MANIFEST):
                file.unlink()  # writing to a link would change the checkpoint itself

        return self.save_checkpoint(state, link_files, keep)

    def restore_checkpoint(
        self, refused: Mapping[Path, CheckpointError] = MappingProxyType({})
    ) -> tuple[State, Path] | None:
        """Return state and trainer folder of the newest sound checkpoint; None without any checkpoint. Newer
        ones that are damaged are named and set aside. Raises CheckpointError when all are damaged.

        Args:
            refused: trainer folders to not continue from, and why; `set_aside` moves their checkpoints after the next.
        """
        self._repair_checkpoints()
        damaged: dict[Path, CheckpointError] = {}
        for checkpoint in self._saved_checkpoints():
            trainer = checkpoint / "trainer"
            if trainer in refused:
                continue
            try:
                state = read_state(checkpoint)
            except CheckpointError as exc:
                damaged[checkpoint] = exc
                continue
            self._keep_aside(damaged, checkpoint)
            return state, trainer
        if damaged or refused:
            advice = f"put back sound copies of these files, or start again with another --folder than {self.path}"
            sound = [trainer.parent / "model" for trainer in refused]
            if sound:
                advice += f"; these weights are sound: model.checkpoint={sound[0]}"
            reasons = [*(f"{trainer.parent}: {why}" for trainer, why in refused.items()), *damaged.values()]
            raise CheckpointError("\n  ".join(["no checkpoint to continue from:", *map(str, reasons), advice]))
        return None

    def set_aside(self, refused: Mapping[Path, CheckpointError], trainer: Path) -> None:
        """Set checkpoints aside whose trainer folders were refused, as the run continues from another one."""
        self._keep_aside({folder.parent: why for folder, why in refused.items()}, trainer.parent)

    def _keep_aside(self, unusable: Mapping[Path, CheckpointError], continued: Path) -> None:
        for other, why in unusable.items():
            aside = self._mark_damaged(other)
            logger.warning("%s\n  kept as %s; continuing from %s", why, aside.name, continued.name)
        if unusable:
            self._point_last_to(continued)

    def _saved_checkpoints(self) -> list[Path]:
        """Return the checkpoints, newest first."""
        return list(saved_checkpoints(self.path).values())

    def _repair_checkpoints(self) -> None:
        """Clean up after a kill or a copy: restore a checkpoint that was being replaced, unless it was replaced; delete
        half-written ones; replace what a copy made of the link."""
        for replaced in self.checkpoints.glob(".step_*.replaced"):
            target = self.checkpoints / replaced.stem.removeprefix(".")
            if target.exists():
                shutil.rmtree(replaced, ignore_errors=True)
            else:
                os.replace(replaced, target)
        for partial in self.checkpoints.glob(".step_*.partial"):
            shutil.rmtree(partial, ignore_errors=True)
        for name in (LAST, f".{LAST}"):
            link = self.checkpoints / name
            if os.path.lexists(link) and not link.is_symlink():
                self._make_room_for_link(link)

    def _make_room_for_link(self, link: Path) -> None:
        """Make room for the link where a copy of the run (`cp -rL`, a bucket, a zip) has a folder or a file in its
        place. Content that is nowhere else becomes a checkpoint, or is kept under another name."""
        if not link.is_dir():
            names_one = link.stat().st_size < 100 and STEP.fullmatch(
                link.read_text(encoding="utf-8", errors="replace").strip()
            )
            link.unlink() if names_one else self._keep_under_another_name(link)
            return
        same = [saved for saved in self._saved_checkpoints() if same_manifest(saved, link)]
        if any(not find_damage(saved) for saved in same):
            shutil.rmtree(link)
            return
        try:
            step = read_state(link).step
        except CheckpointError as exc:
            logger.warning("%s\n  kept as %s", exc, self._keep_under_another_name(link).name)
            return
        target = self.checkpoints / f"step_{step:06d}"
        if target.exists() and not find_damage(target):
            logger.warning(
                "%s differs from %s; kept as %s", link, target.name, self._keep_under_another_name(link).name
            )
            return
        if target.exists():
            self._mark_damaged(target)
        os.replace(link, target)
        logger.warning("%s is a folder, as copies of runs have it; taken for %s", link, target.name)

    def _keep_under_another_name(self, other: Path) -> Path:
        name = f"kept_{other.name.removeprefix('.')}"
        free = (self.checkpoints / (name if number == 1 else f"{name}{number}") for number in count(1))
        aside = next(path for path in free if not os.path.lexists(path))
        os.replace(other, aside)
        return aside

    def _mark_damaged(self, damaged: Path) -> Path:
        aside = damaged.with_name(f"damaged_{damaged.name}")
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(damaged, aside)
        return aside

    def _point_last_to(self, checkpoint: Path) -> None:
        link = self.checkpoints / f".{LAST}"
        try:
            link.unlink(missing_ok=True)
            link.symlink_to(checkpoint.name)
            os.replace(link, self.checkpoints / LAST)
        except OSError as exc:  # some file systems have no links
            if not self._unlinked:
                logger.warning(
                    "no link %s: %s; commands find the newest checkpoint without it, and model.checkpoint takes its "
                    "own name, such as %s",
                    self.checkpoints / LAST,
                    exc,
                    checkpoint / "model",
                )
            self._unlinked = True

    # --------------------------------------------------------------------------------------------------- results

    def write_results(
        self, spec: Spec, state: State, notes: Sequence[str], run: Run, roles: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Write the results of the run.

        Args:
            notes: remarks of the simulator on its settings.
            roles: result of `Trace.role_shares` for this attempt at the run.
        """
        last, before = state.last or {}, state.before or {}
        results = {
            "mode": run.mode,
            "success": last.get("success"),
            "success_before": before.get("success"),
            "tasks": last.get("tasks", {}),
            "tasks_before": before.get("tasks", {}),
            "repeats": last.get("repeats", []),
            "repeats_std": last.get("repeats_std"),
            **{
                f"{name}{suffix}": evaluation[name]
                for name in ("interventions", "late_actions", "missing", "immediate_successes")
                for suffix, evaluation in (("", last), ("_before", before))
                if name in evaluation
            },
            "split": "eval",
            "seeds": {"run": spec.seed, "rule": "episode seeds are keyed by (run seed, ticket, episode)"},
            "max_steps": spec.rollout.max_steps or "the task's own limit",
            "greedy": spec.eval.greedy,
            "steps": state.step,
            "stop_reason": run.stop_reason,
            "env_steps": state.env_steps,
            "tickets": attrs.asdict(state.tickets),
            **state.parts,
            "replay": {"reused": state.reused, "refilled": state.refilled},
            "faults": state.faults,
            "roles": roles,
            "notes": list(notes),
            "checkpoint": checkpoint_record(spec),
            "versions": library_versions(),
            "wall_seconds": state.wall_seconds,
        }
        self._write_file("results.json", _to_json(results))
        return results

    def _write_file(self, name: str, text: str) -> None:
        partial = self.path / f".{name}.partial"
        try:
            partial.write_text(text, encoding="utf-8")
            _sync_file(partial)
            os.replace(partial, self.path / name)
        except OSError as exc:
            raise UserError(f"{self.path / name} cannot be written: {exc.strerror or exc}") from exc


def saved_checkpoints(run_folder: Path) -> dict[int, Path]:
    """Return step -> checkpoint of a run, newest first."""
    folders = (run_folder / "checkpoints").glob("step_*")
    return dict(sorted(((int(match[1]), p) for p in folders if (match := STEP.fullmatch(p.name))), reverse=True))


def read_state(checkpoint: Path) -> State:
    """Return the state in a checkpoint folder after checking its files. Raises CheckpointError naming damaged ones."""
    if problems := find_damage(checkpoint):
        raise CheckpointError(f"{checkpoint} is damaged: {'; '.join(problems)}")
    return read_state_file(checkpoint / "trainer" / STATE)


def checkpoint_in(path: Path) -> Path:
    """Return the checkpoint folder that a path means: itself, or a run's newest. Raises UserError naming them."""
    names_last = path.name == LAST and path.parent.name == "checkpoints"
    run = path.parents[1] if names_last and not (path.is_symlink() and path.is_dir()) else path
    newest = RunFolder(run).latest_checkpoint() if (run / "spec.yaml").is_file() else None
    with explain_path_errors("RUN|CHECKPOINT", path):
        folder = resolve_path(newest or path)
    if not (folder / "model").is_dir() or not (folder.parents[1] / "spec.yaml").is_file():
        reason = "is neither a run with a checkpoint nor a checkpoint of a run" if path.exists() else "does not exist"
        raise UserError(
            f"{path} {reason}; give RUN, or RUN/checkpoints/step_...\n"
            f"  {_checkpoints_near(path)}; `vla-rl run` makes one"
        )
    return folder


def _checkpoints_near(path: Path) -> str:
    """Describe what exists instead of a missing checkpoint: its neighbours, or runs in the folder or next to it."""
    if path.parent.name == "checkpoints" and path.parent.is_dir():
        names = sorted(checkpoint.name for checkpoint in path.parent.glob("step_*"))
        return f"in {path.parent} there are: {', '.join(names[-5:]) or 'none'}"
    folders = (path, path.parent, Path("runs"))
    for place in folders:
        runs = sorted({checkpoint.parents[1].name for checkpoint in place.glob("*/checkpoints/step_*")})
        if runs:
            return f"runs with a checkpoint in {place}: {', '.join(runs[:8])}{' ...' if len(runs) > 8 else ''}"
    where = " and ".join(dict.fromkeys(str(place) for place in folders[1:]))
    return f"there is no run with a checkpoint in {where}"


def _may_be_there(entry: Path) -> bool:
    """Return whether a run may begin in a folder that contains this file."""
    if entry.name.startswith(".") or entry.name == "lost+found" or entry.suffix in LOGS:
        return True
    for output in (1, 2):
        with suppress(OSError):  # the output is closed
            if os.path.samestat(entry.lstat(), os.fstat(output)):
                return True
    return False


def _to_json(data: Any) -> str:
    return json.dumps(data, indent=1, default=str) + "\n"


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

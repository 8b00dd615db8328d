"""Saves checkpoints in processes that are killed at their first, second, third... operation on files, until one gets
through; after each kill, the folder has to hold the checkpoint before or the new one, whole, and take another."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from vla_rl.runtime.run_folder.folder import RunFolder, State

WATCHED = ("open", "os.rename", "os.symlink", "os.remove", "os.rmdir", "os.mkdir", "os.link", "shutil.rmtree")


def save(folder: RunFolder, step: int) -> None:
    def write(model: Path, trainer: Path) -> None:
        (model / "weights").write_text(f"weights {step}")
        (trainer / "learner.pt").write_text(f"learner {step}")

    folder.save_checkpoint(State(step=step), write, keep=2)


def die_at(count: int, place: Path, told: int) -> Callable[[str, tuple[object, ...]], None]:
    """An audit hook that kills the process at its `count`-th operation below a folder."""
    seen = 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if event in WATCHED and any(str(place) in str(argument) for argument in arguments):
            seen += 1
            if seen == count:
                os.write(told, event.encode())
                os.kill(os.getpid(), signal.SIGKILL)

    return hook


def main(place: Path) -> None:
    operations = []
    for step in (2, 3):
        save(RunFolder(place / "before"), step)
    while True:
        path = shutil.copytree(place / "before", place / str(len(operations)), symlinks=True)
        folder = RunFolder(path)
        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            sys.addaudithook(die_at(len(operations) + 1, path, tell))
            save(folder, 3)
            save(folder, 4)
            folder.replace_state(State(step=4, evaluated=4), keep=2)
            os._exit(0)
        os.close(tell)
        _, status = os.waitpid(child, 0)
        operation = os.read(told, 100).decode()
        os.close(told)
        state, trainer = RunFolder(path).restore_checkpoint()
        assert state.step in (3, 4), (operation, state)
        assert (trainer / "learner.pt").read_text() == f"learner {state.step}", operation
        assert (trainer.parent / "model" / "weights").read_text() == f"weights {state.step}", operation
        save(RunFolder(path), 5)
        left = sorted(p.name for p in (path / "checkpoints").iterdir())
        assert left == ["last", f"step_{state.step:06d}", "step_000005"], (operation, left)
        assert RunFolder(path).restore_checkpoint()[0].step == 5
        if os.waitstatus_to_exitcode(status) == 0:
            break
        operations.append(operation)
    print(json.dumps([len(operations), sorted(set(operations))]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

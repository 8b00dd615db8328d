"""Print what one training step enters while it runs: files, functions and their lines.

    python tools/traced_step.py [--list]

The second step of a fixed run is traced (PPO of OpenVLA-OFT on tabletop, on the local backend), from the collection of
its rollout to the end of the step. Model, simulator, backend and hooks are left out. Lambdas and comprehensions count
as functions, as `sys.setprofile` sees them; how many of them there are is printed, too. `--list` prints the functions
of each file, in the order in which the step comes to them.
"""

from __future__ import annotations

import argparse
import ast
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import vla_rl
from vla_rl.core.run import loop

ROOT = Path(vla_rl.__file__).parent
LEFT_OUT = ("plugins/models/", "toolkit/models/", "plugins/envs/", "runtime/comm/backends/", "plugins/hooks/")
SPEC = {
    "name": "traced",
    "model": {"type": "openvla_oft", "checkpoint": "builtin:tabletop", "value_head": {"type": "mlp"}},
    "env": {"type": "tabletop", "num_envs": 8},
    "rollout": {"chunk": 4, "episodes": 16},
    "algorithm": {"type": "ppo"},
    "placement": {"type": "collocated"},
    "runtime": {"backend": "local"},
    "train": {"steps": 2, "lr": 1e-4, "micro_batch": 64, "global_batch": 64},
    "eval": {"every": 0, "before": False},
    "hooks": [{"type": "console"}],
}
TRACED_STEP = 2
"""Nothing is built any more in the second step."""

Entered = dict[tuple[str, int], str]
"""(file within the package, first line) -> qualified name of a function that was entered."""


class Tracer:
    """Notes which functions of the package run between the collection of the traced step and its end."""

    def __init__(self) -> None:
        self.entered: Entered = {}
        self.traces = False

    def note_call(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or not self.traces:
            return
        code = frame.f_code
        if code.co_filename.startswith(str(ROOT)):
            file = Path(code.co_filename).relative_to(ROOT).as_posix()
            if not file.startswith(LEFT_OUT):
                self.entered.setdefault((file, code.co_firstlineno), code.co_qualname)

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Context of the run."""
        collect, finish = loop.collect_rollout, loop.finish_step

        def begin_step(runtime: Any, flow: Any, step: int) -> Any:
            self.traces = step == TRACED_STEP
            return collect(runtime, flow, step)

        def end_step(runtime: Any, step: int, trained: Any) -> Any:
            self.traces = False
            return finish(runtime, step, trained)

        loop.collect_rollout, loop.finish_step = begin_step, end_step
        threading.setprofile(self.note_call)
        sys.setprofile(self.note_call)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
            loop.collect_rollout, loop.finish_step = collect, finish


def count_lines(entered: Entered) -> int:
    """Return the lines of all functions that were entered; those of a lambda or comprehension belong to the function
    around it."""
    total = 0
    for file in {file for file, _ in entered}:
        tree = ast.parse((ROOT / file).read_text("utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                total += (node.end_lineno or first) - first + 1 if (file, first) in entered else 0
    return total


def trace_step() -> Entered:
    """Run the fixed spec in a temporary folder. Return what its second step entered."""
    tracer = Tracer()
    with tempfile.TemporaryDirectory() as folder, tracer.between_steps():
        vla_rl.run(SPEC, Path(folder) / "run")
    return tracer.entered


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="print what each file has, in order of entry")
    listed = parser.parse_args().list
    entered = trace_step()
    files = Counter(file for file, _ in entered)
    nameless = sum(name.endswith(">") for name in entered.values())
    print(
        f"{len(files)} files, {len(entered)} functions ({nameless} of them lambdas and comprehensions), "
        f"{count_lines(entered)} lines of functions"
    )
    for file, count in files.items() if listed else ():
        names = [name for (at, _), name in entered.items() if at == file and not name.endswith(">")]
        print(f"{count:4} {file}: {', '.join(names)}")


if __name__ == "__main__":
    main()

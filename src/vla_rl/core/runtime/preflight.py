"""What would go wrong in the workers' processes, said before there are any."""

from __future__ import annotations

from vla_rl.core.errors import UserError
from vla_rl.core.machine import interpreter_problems
from vla_rl.core.plugins import load
from vla_rl.core.spec import Component, Spec


def check_simulators(spec: Spec) -> None:
    """For the driver. Raises UserError."""
    python = spec.env.python
    if on_this_machine(spec):
        ask_plugin(spec)
    if python is not None:
        problems = interpreter_problems(python)
        if spec.runtime.backend == "local":
            problems.append("runtime.backend: local has one process and so one interpreter; use ray")
        if problems:
            raise UserError("env.python: " + "\n  ".join(problems))


def on_this_machine(spec: Spec) -> bool:
    """Whether simulators run in this interpreter, and on no other machine."""
    return spec.env.python is None and spec.runtime.address is None


def ask_plugin(spec: Spec) -> None:
    """Let the simulator plugin look for what is lacking here. Raises UserError."""
    _look("env", spec.env, spec)


def check_training(spec: Spec) -> None:
    """For the driver of a run that trains: what the algorithm lacks here. Raises UserError."""
    _look("algorithm", spec.algorithm, spec)


def _look(kind: str, part: Component, spec: Spec) -> None:
    look = load(kind, part.type, spec.plugins).preflight
    if look is not None:
        look(part.config)

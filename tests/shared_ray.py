"""One Ray for all tests of a pytest process that only use it, because a start takes seconds."""

from __future__ import annotations

import logging
import os
import sys

from vla_rl.runtime.comm.backends.own_ray import OwnRay

_started: list[OwnRay] = []


def start_shared_ray() -> None:
    """Start it unless it runs. It has four CPUs whatever the machine has, since workers of tests mostly wait."""
    if not _started:
        shared = OwnRay()
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        shared.start(
            num_cpus=4, logging_level=logging.ERROR, log_to_driver=False, runtime_env={"env_vars": environment}
        )
        _started.append(shared)


def stop_shared_ray() -> None:
    """Stop it where it runs."""
    while _started:
        _started.pop().stop()

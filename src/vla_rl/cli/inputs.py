"""Inputs of commands: a spec, the folder of a run, a checkpoint."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vla_rl.cli.shipped_specs import find_shipped, suggest_specs
from vla_rl.core.errors import SpecError
from vla_rl.core.plan import Cluster
from vla_rl.core.spec.spec import Spec, load_spec, parse_spec
from vla_rl.runtime.run_folder.spec_file import load_run_spec

GIB = 2**30
CPUS_PER_DEVICE, MEMORY_PER_DEVICE = 16, 128 * GIB
"""Assumed with --devices alone; usual of machines with eight GPUs."""


def read_spec(source: Spec | Mapping[str, Any] | str | Path, overrides: Sequence[str] = ()) -> tuple[Spec, Path | None]:
    """A spec, plain data, a file, or a run's folder. -> the spec, and the run folder if given. Raises SpecError."""
    if isinstance(source, Spec):
        return (parse_spec(source.to_dict(), overrides=overrides) if overrides else source), None
    if isinstance(source, Mapping):
        return parse_spec(source, overrides=overrides), None
    path = Path(source)
    if not os.path.exists(path):  # noqa: PTH110 - False for a name that is too long
        file = find_shipped(path)
        if file is not None:
            print(f"{path}: using the spec that comes with vla-rl, {file}", file=sys.stderr)
            path = file
        elif path.suffix in (".yaml", ".yml") or len(path.parts) == 1:
            raise SpecError([f"{path}: no such file{suggest_specs(path)}"])
    of_run = path if os.path.isfile(path / "spec.yaml") else None  # noqa: PTH113 - as above
    return (load_run_spec(of_run, overrides) if of_run else load_spec(path, overrides)), of_run


def checkpoint_of(path: Path) -> Path | None:
    """The checkpoint folder that a path means; None for a spec file. Raises CheckpointError."""
    if os.path.isfile(path) or path.suffix in (".yaml", ".yml"):  # noqa: PTH113 - as above
        return None
    from vla_rl.runtime.run_folder.folder import checkpoint_in

    return checkpoint_in(path)


def name_of(checkpoint: Path | None, what: object) -> str:
    """Return a policy's name in tables: RUN/step_..., wherever the run is; without a checkpoint `what`, as given."""
    return f"{checkpoint.parents[1].name}/{checkpoint.name}" if checkpoint else str(what)


def cluster_of(
    devices: int | None, cpus: float | None, memory: float | None, gpu_memory: float | None = None
) -> Cluster:
    """Build a cluster of these GPUs, CPUs and GiB of memory, also of each GPU. Defaults: this machine, assumed GPUs."""
    from vla_rl.runtime.placement.hardware import machine_resources

    local_machine = machine_resources()
    gpus = local_machine.gpus if devices is None else devices
    assumed = (
        Cluster(cpus=CPUS_PER_DEVICE * gpus, gpus=gpus, memory=MEMORY_PER_DEVICE * gpus) if devices else local_machine
    )
    return Cluster(
        cpus=assumed.cpus if cpus is None else cpus,
        gpus=gpus,
        memory=assumed.memory if memory is None else int(memory * GIB),
        gpu_memory=assumed.gpu_memory if gpu_memory is None else int(gpu_memory * GIB),
    )


def other_machine(
    devices: int | None, cpus: float | None, memory: float | None, gpu_memory: float | None = None
) -> Cluster | None:
    """The machine that is meant; None: this one, as none of it is given."""
    return None if devices is cpus is memory is gpu_memory is None else cluster_of(devices, cpus, memory, gpu_memory)

"""`vla-rl doctor`: what works on this machine, what does not, and the command that fixes it."""

from __future__ import annotations

import json
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from typing import Any, Literal

from attrs import frozen

from vla_rl.core.installation import OWN_DIST, pip_arguments, pip_command
from vla_rl.core.requirements import install_command, keep_build, missing_requirements, unmet_base
from vla_rl.runtime.comm.backends.reservation import LEAST_SHARED, SHARED
from vla_rl.runtime.run_folder.environment import LIBRARIES
from vla_rl.toolkit.envs.mujoco_installation import find_damage
from vla_rl.toolkit.envs.rendering import FIXES, ProbeResult, probe_rendering
from vla_rl.toolkit.process_limits import FEW_PROCESSES, count_cpus, count_free_processes, read_memory

State = Literal["ok", "missing", "broken"]
GIB = 2**30


@frozen(kw_only=True)
class Finding:
    """One line of the report."""

    area: str
    what: str
    state: State
    """missing: something optional is not there; broken: runs will fail."""
    detail: str
    fix: str = ""
    """A command, or what to do; empty when nothing has to be done."""


def print_report(rows: Sequence[Mapping[str, Any]], given: Any) -> int:
    """Print the report, or JSON. Return 1 if something is broken that every run needs."""
    if given.json:
        print(json.dumps(rows, indent=1))
    else:
        _print_table([Finding(**row) for row in rows])
    return int(any(row["state"] == "broken" for row in rows))


def examine_machine() -> list[Finding]:
    """Run all checks; those that can hang or crash run in a separate process, at most 90 s each."""
    probes = ("egl", "osmesa", "vulkan", "cuda", "ray")
    with ThreadPoolExecutor(len(probes)) as pool:
        outcomes = dict(zip(probes, pool.map(probe_rendering, probes), strict=True))
    return [
        *_check_machine(),
        *_check_runtimes(outcomes),
        *_check_drawing(outcomes),
        *_check_extras(),
    ]


def _check_machine() -> Iterator[Finding]:
    if unmet := unmet_base():  # what everything needs comes first: later findings may follow from it
        detail = f"{OWN_DIST} needs {', '.join(unmet)}"
        yield Finding(area="machine", what="requirements", state="broken", detail=detail, fix=keep_build(unmet))
    versions = f"Python {platform.python_version()}, vla-rl {_installed_version(OWN_DIST)}, {platform.platform()}"
    yield Finding(area="machine", what="versions", state="ok", detail=versions)
    packages = ", ".join(f"{name} {version}" for name in LIBRARIES if (version := _installed_version(name)))
    yield Finding(area="machine", what="packages", state="ok", detail=packages)
    yield Finding(area="machine", what="cores", state="ok", detail=f"{count_cpus()} usable")
    if (processes := count_free_processes()) is not None:
        detail = f"{processes} more may start, threads included; a run with two workers takes about 250"
        fix = "docker run --pids-limit=-1, or systemd's TasksMax=infinity; else runtime.backend=local"
        yield _describe_part("machine", "processes", processes >= FEW_PROCESSES, detail, fix)
    total, free = read_memory()
    detail = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    yield _describe_part("machine", "memory", free >= 4 * GIB, detail, "close other programs, or lower env.num_envs")
    shm = shutil.disk_usage(SHARED).free if SHARED.is_dir() else 0
    suffices = shm >= LEAST_SHARED
    files = "" if suffices else f"; Ray takes files in {tempfile.gettempdir()} instead, slower where there are many"
    detail = f"{shm / GIB:.1f} GiB free, for samples on their way to learners in other workers{files}"
    fix = f"docker run --shm-size=8g, or mount -o remount,size=8G {SHARED}"
    yield _describe_part("machine", str(SHARED), suffices, detail, fix)
    if damage := find_damage():
        yield Finding(area="machine", what="MuJoCo", state="broken", detail=damage.detail, fix=damage.fix)


def _check_runtimes(outcomes: dict[str, ProbeResult]) -> Iterator[Finding]:
    ray = outcomes["ray"]
    fixes = [ray.choose_remedy(""), "" if ray.works else "until Ray starts here: runtime.backend=local"]
    state: State = "ok" if ray.works else "broken"
    yield Finding(area="runtime", what="Ray", state=state, detail=ray.detail, fix="; ".join(filter(None, fixes)))
    cuda, has_driver = outcomes["cuda"], shutil.which("nvidia-smi") is not None
    fix = cuda.choose_remedy("install a torch build with CUDA: https://pytorch.org/get-started") if has_driver else ""
    detail = cuda.detail + ("" if cuda.works or has_driver else ", and there is no NVIDIA driver; runs use the CPU")
    yield _describe_part("runtime", "CUDA", cuda.works, detail, fix)


def _check_drawing(outcomes: dict[str, ProbeResult]) -> Iterator[Finding]:
    backends = {
        "egl": ("GL: EGL", "MuJoCo simulators, MUJOCO_GL=egl"),
        "osmesa": ("GL: OSMesa", "MuJoCo simulators, MUJOCO_GL=osmesa"),
        "vulkan": ("Vulkan", "SAPIEN simulators, Mesa 24.3 or newer without a GPU"),
    }
    for name, (what, users) in backends.items():
        result = outcomes[name]
        fix = result.choose_remedy(FIXES[name])
        yield _describe_part("drawing", what, result.works, f"{result.detail} ({users})", fix)


def _check_extras() -> Iterator[Finding]:
    try:
        extras = metadata.metadata(OWN_DIST).get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:
        detail = "not installed as a distribution, so no plugin is known"
        arguments = pip_arguments(OWN_DIST)
        install = f"{pip_command('install')} {arguments}"
        fix = install if arguments else f"install {OWN_DIST} from its clone or its wheel"
        yield Finding(area="extras", what=OWN_DIST, state="broken", detail=detail, fix=fix)
        return
    for extra in extras:
        missing = missing_requirements(OWN_DIST, extra)
        detail = f"needs {', '.join(missing)}" if missing else "installed"
        yield _describe_part("extras", extra, not missing, detail, install_command(OWN_DIST, extra) if missing else "")


def _describe_part(area: str, what: str, works: bool, detail: str, fix: str) -> Finding:
    """Return the finding of something that only some runs need; `fix` counts where it does not work."""
    return Finding(area=area, what=what, state="ok" if works else "missing", detail=detail, fix="" if works else fix)


def _installed_version(dist: str) -> str:
    try:
        return metadata.version(dist)
    except metadata.PackageNotFoundError:
        return ""


def _print_table(findings: list[Finding]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    marks = {"ok": ("✓", "green"), "missing": ("–", "yellow"), "broken": ("✗", "bold red")}
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=False, show_edge=False)
    table.add_column(no_wrap=True, style="dim")
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    area = ""
    for finding in findings:
        mark, style = marks[finding.state]
        detail = Text(finding.detail)
        if finding.fix:
            detail.append("\n→ ", style="dim").append(finding.fix, style="cyan")
        if finding.area != area and area:
            table.add_section()
        shown, area = ("" if finding.area == area else finding.area), finding.area
        table.add_row(shown, Text(mark, style=style), finding.what, detail)
    console.print(table)
    counts = {state: sum(finding.state == state for finding in findings) for state in marks}
    console.print(
        f"\n[green]{counts['ok']} work[/], [yellow]{counts['missing']} optional parts are missing[/], "
        f"[{'bold red' if counts['broken'] else 'dim'}]{counts['broken']} broken[/]"
    )

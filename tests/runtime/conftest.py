from __future__ import annotations

import subprocess

import pytest
from scripted_runs import read_metrics, scripted_spec

from vla_rl.core.spec.spec import parse_spec
from vla_rl.runtime.start import run


@pytest.fixture
def train(tmp_path):
    """Run the scripted spec; -> (results, metrics without times)."""

    def start(folder="run", resume=False, **changes):
        results = run(parse_spec(scripted_spec(**changes)), tmp_path / folder, resume)
        return results, read_metrics(tmp_path / folder)

    return start


@pytest.fixture
def start_run(fork_server):
    """Start `vla-rl run` in another process; -> the process. Its output is in one pipe, if nothing else is asked for."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}

    def start(spec_file, folder, *options, **streams):
        command = ("-m", "vla_rl.cli.main", "run", spec_file, "--folder", folder)
        return fork_server.start_python(*command, *options, **(pipes | streams))

    return start

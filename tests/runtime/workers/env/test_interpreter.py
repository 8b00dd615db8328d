"""Simulators in a separate interpreter: another NumPy, the same run."""

from __future__ import annotations

import shlex
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from test_env_faults import fragile_spec, without_faults

from vla_rl.core.errors import UserError
from vla_rl.runtime.checks.interpreter import interpreter_problems
from vla_rl.runtime.comm.backends.ray import _interpreter_environment

NUMPY = "1.26.4"


@pytest.fixture(scope="session")
def second_python(tmp_path_factory):
    """A virtual environment with an old NumPy; everything else it sees in this one, but pyarrow, which needs NumPy 2."""
    folder = tmp_path_factory.mktemp("a second")
    venv.create(folder, with_pip=False, symlinks=True)
    own = sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)})
    installed = subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", own, f"numpy=={NUMPY}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if installed.returncode:
        pytest.skip(f"numpy {NUMPY} cannot be installed: {installed.stderr.strip().splitlines()[-1]}")
    (Path(own) / "pyarrow.py").write_text("raise ModuleNotFoundError('pyarrow')\n")
    shared = [path for path in sys.path if path.endswith(("site-packages", "src"))]
    (Path(own) / "shared.pth").write_text("\n".join(shared) + "\n")
    return folder / "bin" / "python"


@pytest.mark.ray
@pytest.mark.slow
def test_a_run_with_simulators_in_another_interpreter(train, tmp_path, second_python):
    version = subprocess.run(
        [second_python, "-c", "import numpy; print(numpy.__version__)"], capture_output=True, text=True, check=True
    )
    assert version.stdout.strip() == NUMPY
    calm, calm_metrics = train("calm", **fragile_spec(tmp_path, "none"))
    env = {"python": str(second_python), "report_numpy": str(tmp_path / "numpy")}
    results, metrics = train("apart", **fragile_spec(tmp_path, "none", env=env), runtime={"backend": "ray"})
    assert (tmp_path / "numpy").read_text() == NUMPY, "the envs ran elsewhere"
    assert results["success"] == calm["success"]
    assert without_faults(metrics) == without_faults(calm_metrics)


@pytest.mark.parametrize(
    ("python", "message"),
    [
        ("/nowhere/bin/python", "is not an interpreter; give the bin/python of a virtual environment"),
        ("/bin/ls", "is not a Python interpreter that runs"),
        (getattr(sys, "_base_executable", sys.executable), r"has no (vla-rl|ray); try: .* -m pip install"),
    ],
)
def test_an_interpreter_that_cannot_serve_is_refused_before_anything_starts(train, tmp_path, python, message):
    spec = fragile_spec(tmp_path, "none", env={"python": python})
    with pytest.raises(UserError, match=message):
        train(**spec, runtime={"backend": "ray"})


def test_a_relative_interpreter_is_of_the_folder_where_the_run_starts(monkeypatch):
    python = Path(sys.executable).absolute()
    monkeypatch.chdir(python.parent)
    assert interpreter_problems(Path(python.name)) == []
    assert shlex.split(_interpreter_environment(Path(python.name))["py_executable"]) == [str(python)]


def test_the_local_backend_has_one_interpreter(train, tmp_path):
    with pytest.raises(UserError, match="runtime.backend: local has one process and so one interpreter; use ray"):
        train(**fragile_spec(tmp_path, "none", env={"python": sys.executable}))

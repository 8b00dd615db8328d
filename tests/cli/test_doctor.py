from __future__ import annotations

import json
from importlib.metadata import requires
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import vla_rl
from vla_rl.cli import doctor, list_plugins
from vla_rl.cli.doctor import print_report
from vla_rl.cli.main import app
from vla_rl.cli.probes import PROBES
from vla_rl.core import requirements
from vla_rl.core.spec.spec import parse_spec
from vla_rl.toolkit.envs import rendering
from vla_rl.toolkit.envs.rendering import BUSY, FIXES, INSTALLERS, ProbeResult

TORCH = next(line for line in requires("vla-rl") or () if line.startswith("torch>="))
TEXT, JSON = SimpleNamespace(json=False), SimpleNamespace(json=True)
FINE = dict.fromkeys(PROBES, ProbeResult(True, "works"))


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> dict[str, ProbeResult]:
    """What probes say, here without running them."""
    said = dict(FINE)
    monkeypatch.setattr(doctor, "probe_rendering", lambda name: said[name])
    return said


def test_a_machine_where_all_works(outcomes, capsys) -> None:
    assert print_report(vla_rl.doctor(), JSON) == 0
    found = {row["what"]: row for row in json.loads(capsys.readouterr().out)}
    assert {"versions", "packages", "cores", "memory", "/dev/shm", "Ray", "CUDA", "GL: EGL", "GL: OSMesa"} < set(found)
    assert "torch 2" in found["packages"]["detail"]
    assert found["openvla"]["area"] == "extras"
    assert all(bool(row["fix"]) == (row["state"] != "ok") for row in found.values())


def test_what_is_missing_comes_with_the_command_that_mends_it(outcomes, capsys) -> None:
    outcomes["egl"] = ProbeResult(False, "libEGL.so.1: cannot open shared object file")
    outcomes["ray"] = ProbeResult(False, "RaySystemError: the node died")
    assert print_report(vla_rl.doctor(), TEXT) == 1
    out = capsys.readouterr().out
    assert "apt-get install -y libegl1 libegl-mesa0" in out
    assert "✗   Ray" in out
    assert "1 broken" in out
    assert "runtime.backend=local" in out


def test_a_probe_that_hangs_or_dies_is_an_answer() -> None:
    assert doctor.probe_rendering("no such probe") == ProbeResult(False, "KeyError: 'no such probe'")
    assert doctor.probe_rendering("ray", seconds=0.05) == ProbeResult(False, "no answer within 0.05 s", timed_out=True)


@pytest.mark.ray
@pytest.mark.own_ray
def test_ray_is_tried_as_a_run_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """No cluster that is up on this machine or named in the environment has a say."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    result = doctor.probe_rendering("ray")
    assert result.works and result.detail.startswith("starts and runs a task in"), result


def test_no_answer_within_the_time_is_not_a_missing_package(outcomes, capsys) -> None:
    for name in ("ray", "egl", "vulkan"):
        outcomes[name] = ProbeResult(False, "no answer within 90 s", timed_out=True)
    assert print_report(vla_rl.doctor(), JSON) == 1
    found = {row["what"]: row["fix"] for row in json.loads(capsys.readouterr().out)}
    assert found["GL: EGL"] == found["Vulkan"] == BUSY
    assert found["Ray"] == f"{BUSY}; until Ray starts here: runtime.backend=local"


def osmesa_renderer() -> str:
    """What the probe of OSMesa says; few machines have that, so the test is skipped without it."""
    result = doctor.probe_rendering("osmesa")
    if not result.works:
        pytest.skip(f"OSMesa does not work here ({result.detail}): {FIXES['osmesa']}")
    return result.detail


@pytest.mark.sim
def test_the_probe_of_egl_names_a_renderer() -> None:
    result = doctor.probe_rendering("egl")
    assert result.works and result.detail, result


@pytest.mark.sim
def test_the_probe_of_osmesa_names_a_renderer() -> None:
    assert osmesa_renderer()


def test_a_machine_without_osmesa_gets_the_command_that_installs_it(outcomes) -> None:
    outcomes["osmesa"] = ProbeResult(False, "libOSMesa is not installed")
    with pytest.raises(pytest.skip.Exception, match=r"libOSMesa is not installed\): apt-get install -y libosmesa6"):
        osmesa_renderer()


@pytest.fixture
def old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU image: torch is older than we ask for, and h5py (extra `data`) is not there."""
    versions = {"torch": "2.8.0+cu128", "h5py": None}
    real = requirements._installed_version
    monkeypatch.setattr(
        requirements, "_installed_version", lambda name, path: versions[name] if name in versions else real(name, path)
    )


@pytest.mark.usefixtures("old_torch")
def test_an_unmet_need_of_everything_is_said_once_and_first(outcomes, capsys) -> None:
    assert print_report(vla_rl.doctor(), JSON) == 1
    first, *others = json.loads(capsys.readouterr().out)
    assert first["state"] == "broken" and first["detail"] == f"vla-rl needs {TORCH} (2.8.0+cu128 is installed)"
    assert "pip freeze | grep -iE '^(torch|nvidia)' > keep.txt" in first["fix"]
    assert not any("torch>=" in row["detail"] for row in others)
    (data,) = [row for row in others if row["what"] == "data"]
    assert data["fix"].startswith("pip install 'h5py>=3.12'") and "vla-rl[" not in data["fix"]


@pytest.mark.usefixtures("old_torch")
def test_plugins_do_not_each_ask_for_it(capsys) -> None:
    list_plugins.print_plugins(vla_rl.list_plugins(), TEXT)
    line, *table = capsys.readouterr().out.splitlines()
    assert line.startswith(f"vla-rl needs {TORCH} (2.8.0+cu128 is installed): installing vla-rl again would rep")
    assert not any("pip install -e" in row or "torch>=" in row for row in table)
    assert {row["name"]: row["ready"] for row in list_plugins.plugin_rows()}["tabletop"]


@pytest.mark.usefixtures("old_torch")
def test_a_run_is_warned_and_not_refused(caplog) -> None:
    from vla_rl.runtime.checks.run import check_spec

    spec = parse_spec(
        {
            "name": "old",
            "plugins": ["vla_rl.testing.scripted"],
            "model": {"type": "linear"},
            "env": {"type": "tabletop", "num_envs": 2},
            "rollout": {"chunk": 4, "episodes": 2, "group_size": 2},
            "algorithm": {"type": "grpo"},
            "runtime": {"backend": "local"},
            "train": {"steps": 1, "lr": 0.1, "micro_batch": 8},
        }
    )
    check_spec(spec, training=True)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"warning: vla-rl needs {TORCH} (2.8.0+cu128 is installed)")


def test_the_commands_of_missing_interfaces_exist_in_a_wheel() -> None:
    """No script of the clone: a command of this package, or the one of the system."""
    assert "tools/" not in "".join(FIXES.values())
    for name, script in INSTALLERS.items():
        assert FIXES[name].startswith("vla-rl install-gl")
        assert Path(rendering.__file__).with_name(script).is_file()
    assert CliRunner().invoke(app, ["install-gl", "metal"]).output.startswith("'metal' cannot be installed")

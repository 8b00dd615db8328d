from __future__ import annotations

import json

import pytest

from vla_rl.cli import doctor
from vla_rl.cli.probes import PROBES
from vla_rl.toolkit.envs.rendering import FIXES

FINE = dict.fromkeys(PROBES, (True, "works"))


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[bool, str]]:
    """What probes say, here without running them."""
    said = dict(FINE)
    monkeypatch.setattr(doctor, "probe", lambda name: said[name])
    return said


def test_a_machine_where_all_works(outcomes, capsys) -> None:
    assert doctor.main(json=True) == 0
    found = {row["what"]: row for row in json.loads(capsys.readouterr().out)}
    assert {"versions", "packages", "cores", "memory", "/dev/shm", "Ray", "CUDA", "GL: EGL", "GL: OSMesa"} < set(found)
    assert "torch 2" in found["packages"]["detail"]
    assert found["openvla"]["area"] == "extras"
    assert all(bool(row["fix"]) == (row["state"] != "ok") for row in found.values())


def test_what_is_missing_comes_with_the_command_that_mends_it(outcomes, capsys) -> None:
    outcomes["egl"] = (False, "libEGL.so.1: cannot open shared object file")
    outcomes["ray"] = (False, "no answer within 90 s")
    assert doctor.main(json=False) == 1
    out = capsys.readouterr().out
    assert "apt-get install -y libegl1 libegl-mesa0" in out
    assert "✗   Ray" in out
    assert "1 broken" in out
    assert "runtime.backend=local" in out


def test_a_probe_that_hangs_or_dies_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    works, said = doctor.probe("no such probe")
    assert (works, said) == (False, "KeyError: 'no such probe'")
    works, said = doctor.probe("ray", seconds=0.05)
    assert (works, said) == (False, "no answer within 0.05 s")


def osmesa_renderer() -> str:
    """What the probe of OSMesa says; few machines have that, so the test is skipped without it."""
    works, said = doctor.probe("osmesa")
    if not works:
        pytest.skip(f"OSMesa does not work here ({said}): {FIXES['osmesa']}")
    return said


@pytest.mark.sim
def test_the_probe_of_egl_names_a_renderer() -> None:
    works, said = doctor.probe("egl")
    assert works, said
    assert said


@pytest.mark.sim
def test_the_probe_of_osmesa_names_a_renderer() -> None:
    assert osmesa_renderer()


def test_a_machine_without_osmesa_is_told_how_to_get_it(outcomes) -> None:
    outcomes["osmesa"] = (False, "libOSMesa is not installed")
    with pytest.raises(pytest.skip.Exception, match=r"libOSMesa is not installed\): apt-get install -y libosmesa6"):
        osmesa_renderer()

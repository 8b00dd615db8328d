"""Recognising a MuJoCo whose distributions have overwritten each other, from metadata alone."""

from __future__ import annotations

from pathlib import Path

import pytest

import vla_rl
from vla_rl.cli import doctor
from vla_rl.core.errors import UserError
from vla_rl.plugins.envs.gymnasium.config import CameraSettings, GymnasiumConfig
from vla_rl.plugins.envs.gymnasium.single_env import try_out
from vla_rl.toolkit.envs.mujoco_installation import PARTS, find_damage
from vla_rl.toolkit.envs.rendering import require_mujoco

LIBRARY = "mujoco/libmujoco.so.4.0.0"


def install(folder: Path, name: str, version: str, *files: str) -> None:
    """Write what pip writes of a distribution."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    records = [*files, "mujoco/__pycache__/gone.cpython-311.pyc", "../../../bin/mujoco", f"{info.name}/RECORD"]
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in records))
    for file in files:
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).touch()


def install_parts(folder: Path, version: str = "4.0.0") -> None:
    for name, file in zip(PARTS, ("mujoco/__init__.py", LIBRARY, "mujoco/studio.py"), strict=True):
        install(folder, name, version, file)


def test_one_version_is_whole(tmp_path: Path) -> None:
    assert find_damage([str(tmp_path)]) is None, "not installed"
    install(tmp_path, "mujoco-core", "4.0.0", LIBRARY)
    assert find_damage([str(tmp_path)]) is None, "not installed"
    (new := tmp_path / "new").mkdir()
    install_parts(new)
    (old := tmp_path / "old").mkdir()
    install(old, "mujoco", "3.3.2", "mujoco/__init__.py")
    assert find_damage([str(new)]) is find_damage([str(old)]) is None
    assert find_damage([str(new), str(old)]) is None, "the first folder with a distribution decides"


def test_parts_of_other_versions_are_named_with_the_command_that_repairs_them(tmp_path: Path) -> None:
    """A downgrade leaves the parts of 4.0, and the repair that MuJoCo itself prints takes a newer part."""
    install(tmp_path, "mujoco", "3.3.2", "mujoco/__init__.py")
    for name in PARTS[1:]:
        install(tmp_path, name, "4.0.0")
    damage = find_damage([str(tmp_path)])
    assert damage is not None
    assert damage.detail.startswith("mujoco 3.3.2 is mixed with mujoco-core 4.0.0 and mujoco-studio 4.0.0")
    assert damage.fix == "pip uninstall -y mujoco mujoco-core mujoco-studio && pip install mujoco==3.3.2"


@pytest.fixture
def damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An upgrade to 4.0 has removed files that it had just written; this interpreter finds it first."""
    install_parts(tmp_path)
    for file in ("mujoco/__init__.py", LIBRARY):
        (tmp_path / file).unlink()
    (tmp_path / "needs_mujoco.py").write_text("raise ImportError('core bindings (mujoco-core) are missing')\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_files_that_pip_has_removed_are_missed(damaged: Path) -> None:
    damage = find_damage()
    assert damage is not None and "lacks mujoco/__init__.py of mujoco 4.0.0 and 1 other files" in damage.detail


@pytest.mark.usefixtures("damaged")
def test_simulators_and_the_doctor_say_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"libero needs MuJoCo, and mujoco 4.0.0 lacks (.|\n)*pip uninstall -y mujoco"):
        require_mujoco("libero")
    config = GymnasiumConfig(
        id="Fetch-v0",
        imports=("needs_mujoco",),
        instruction="lift",
        success="success",
        cameras={"main": CameraSettings(size=64)},
    )
    with pytest.raises(UserError, match=r"Fetch-v0 needs MuJoCo, and mujoco 4.0.0 lacks"):
        try_out(config)
    monkeypatch.setattr(doctor, "probe_rendering", lambda name: doctor.ProbeResult(True, "works"))
    [found] = [row for row in vla_rl.doctor() if row["what"] == "MuJoCo"]
    assert found["state"] == "broken" and found["fix"].endswith("pip install mujoco==4.0.0")

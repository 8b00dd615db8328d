"""Compiled models on disk: found again, whole, within bounds."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vla_rl.plugins.envs.libero.compiled import CompiledModels, take_apart

os.environ.setdefault("MUJOCO_GL", "egl")  # loading a model imports mujoco
pytestmark = pytest.mark.skipif(find_spec("mujoco") is None, reason="needs MuJoCo: pip install -e '.[libero]'")


def scene(image_file: Path, size: float = 1.0) -> str:
    return f"""<mujoco><asset>
        <texture type="skybox" builtin="gradient" width="32" height="32"/>
        <texture name="wood" type="2d" file="{image_file}"/> <texture type="cube" file="{image_file}"/>
        <material name="wood" texture="wood"/> <material name="side" texture="{image_file.stem}"/>
        </asset><worldbody><geom type="sphere" size="{size}" material="wood"/></worldbody></mujoco>"""


@pytest.fixture
def image_file(tmp_path: Path) -> Path:
    file = tmp_path / "oak.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (16, 16, 3), np.uint8)).save(file)
    return file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "kept"
    folder.mkdir()
    return folder


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.mjb"))


def arrays(model: Any) -> dict[str, Any]:
    found = {name: getattr(model, name) for name in dir(model) if not name.startswith("_")}
    return {name: value for name, value in found.items() if isinstance(value, np.ndarray)}


def test_a_scene_taken_apart_is_the_same_but_for_its_textures(image_file: Path, folder: Path) -> None:
    import mujoco

    whole = mujoco.MjModel.from_xml_string(scene(image_file))
    sources, kept = take_apart(scene(image_file)), CompiledModels(10**9, folder)
    model = kept.load_model(sources.scene)
    assert [alone is None for alone in sources.texture_xmls] == [True, False, False]
    for name, value in arrays(model).items():
        assert name.startswith("tex_") or np.array_equal(value, arrays(whole)[name], equal_nan=True), name
    assert model.tex_type.tolist() == whole.tex_type.tolist()
    for number, alone in enumerate(sources.texture_xmls):
        if alone is not None:
            shown, begin = kept.load_model(alone), whole.tex_adr[number]
            assert shown.ntex == 1 and shown.tex_type[0] == whole.tex_type[number]
            assert np.array_equal(shown.tex_data, whole.tex_data[begin : begin + len(shown.tex_data)])


ROOM = """<mujoco><compiler inertiagrouprange="0 0"/><asset>
    <mesh name="hull" vertex="0 0 0 .2 0 0 0 .2 0 0 0 .2 .2 .2 .2"/>
    <mesh name="shell" vertex="0 0 0 .3 0 0 0 .4 0 0 0 .5 .3 .3 .3"/>
    <mesh name="label" vertex="0 0 0 .1 0 0 0 .1 0 0 0 .3 .3 .3 .3"/>
    </asset><worldbody><geom type="plane" size="1 1 1"/><body pos="0 0 .3"><freejoint/>
    <geom type="mesh" mesh="hull" group="0"/> <geom type="mesh" mesh="label" group="0" contype="0" conaffinity="0"/>
    <geom name="shell" type="mesh" mesh="shell" group="1" contype="0" conaffinity="0"/></body></worldbody></mujoco>"""
DRAWN_ALONE = ("geom_aabb", "geom_pos", "geom_quat", "geom_rbound", "geom_sameframe", "geom_size")
"""What MuJoCo works out for each geom of a mesh from the mesh."""


def test_physics_have_all_but_the_meshes_that_are_only_drawn() -> None:
    """A mesh stays if a geom with it collides or has mass, and every mesh if drawn geoms have mass."""
    import mujoco

    sources = take_apart(ROOM)
    whole, light = (mujoco.MjModel.from_xml_string(xml) for xml in (sources.scene, sources.physics))
    assert light.mesh_vertnum.tolist() == [5, 4, 5] != whole.mesh_vertnum.tolist()
    kept = np.arange(whole.ngeom) != whole.geom("shell").id
    for name, value in arrays(whole).items():
        if name in DRAWN_ALONE:
            assert np.array_equal(value[kept], arrays(light)[name][kept]), name
        elif not name.startswith(("mesh_", "bvh_")):
            assert np.array_equal(value, arrays(light)[name]), name
    states = []
    for model in (whole, light):
        data = mujoco.MjData(model)
        mujoco.mj_step(model, data, 400)
        states.append(data.qpos.copy())
    assert np.array_equal(*states) and abs(states[0][3]) < 1, "it has fallen over"
    heavy = take_apart(ROOM.replace(' inertiagrouprange="0 0"', ""))
    assert heavy.physics == heavy.scene


def test_what_was_compiled_is_found_again_until_something_changes(image_file: Path, folder: Path) -> None:
    wood = take_apart(scene(image_file)).texture_xmls[1]
    assert wood is not None
    CompiledModels(10**9, folder).load_model(wood)
    [file] = files(folder)
    written = file.stat().st_ino
    CompiledModels(10**9, folder).load_model(wood)
    assert [f.stat().st_ino for f in files(folder)] == [written]
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(image_file)
    assert CompiledModels(10**9, folder).load_model(wood).tex_width[0] == 8 and len(files(folder)) == 2


@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
def test_a_damaged_file_is_made_again(image_file: Path, folder: Path, damage: str) -> None:
    xml = take_apart(scene(image_file)).scene
    before = arrays(CompiledModels(10**9, folder).load_model(xml))
    [file] = files(folder)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes({"cut": bytes(content[: len(content) // 2]), "flip": bytes(content), "empty": b""}[damage])
    after = arrays(CompiledModels(10**9, folder).load_model(xml))
    assert all(np.array_equal(value, after[name], equal_nan=True) for name, value in before.items())
    assert len(files(folder)) == 1


def test_what_was_used_longest_ago_goes_first(image_file: Path, folder: Path) -> None:
    xmls = [take_apart(scene(image_file, size)).scene for size in (1.0, 2.0, 3.0)]
    kept = CompiledModels(10**9, folder)
    kept.ensure_compiled(xmls[:2])
    [size] = {file.stat().st_size for file in files(folder)}
    for file in files(folder):
        os.utime(file, (1, 1))
    kept.load_model(xmls[0])
    (folder / "drafts-of-a-killed-process").mkdir()
    os.utime(folder / "drafts-of-a-killed-process", (1, 1))
    CompiledModels(int(2.5 * size), folder).ensure_compiled(xmls[2:])
    assert len(files(folder)) == 2 and not list(folder.glob("drafts-*"))
    made = {file: file.stat().st_ino for file in files(folder)}
    CompiledModels(10**9, folder).ensure_compiled([xmls[0], xmls[2]])
    assert {file: file.stat().st_ino for file in files(folder)} == made, "the second had gone"


def test_the_compilers_words_are_said(folder: Path) -> None:
    with pytest.raises(RuntimeError, match=r"could not compile a model \(exit code 1\)(.|\n)*nonsense"):
        CompiledModels(10**9, folder).load_model("<mujoco><nonsense/></mujoco>")
    assert not files(folder)


def test_without_a_place_in_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from vla_rl.plugins.envs.libero.compiled import usual_folder

    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    usual_folder.cache_clear()
    folder = usual_folder()
    usual_folder.cache_clear()
    assert folder.is_dir() and tmp_path not in folder.parents

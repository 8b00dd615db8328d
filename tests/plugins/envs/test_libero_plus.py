"""LIBERO-Plus without a simulator: its table, the choice of variants, sensor noise, and what is said of bad input."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from libero_plus_wheel import CAN, LIT, TABLE, YEAST, write_descriptions, write_task

from vla_rl.core.errors import UserError
from vla_rl.core.spec.spec import SpecError, read_env
from vla_rl.plugins.envs.libero import plus_files as files
from vla_rl.plugins.envs.libero.config import LiberoConfig
from vla_rl.plugins.envs.libero.plus import ASSETS_VARIABLE, PlusConfig
from vla_rl.plugins.envs.libero.plus.noise import add_noise
from vla_rl.plugins.envs.libero.plus.variants import (
    Variant,
    all_variants,
    filter_variants,
    list_remarks,
    parse_variant,
    sample_variants,
    select_variants,
    variant_of,
)
from vla_rl.plugins.envs.libero.plus_assets import FOLDERS, INNER_FOLDERS, assets_folder, require_assets, scene_changes
from vla_rl.plugins.envs.libero.scene_changes import UNCHANGED_SCENE, SceneChanges

LEVELS = {
    "camera": (199, 360, 325, 228, 487),
    "robot": (248, 292, 374, 285, 351),
    "language": (328, 280, 259, 328, 342),
    "light": (111, 197, 244, 242, 227),
    "background": (233, 271, 263, 163, 146),
    "noise": (177, 500, 300, 383, 241),
    "layout": (348, 302, 329, 257, 289),
}
"""Variants of each dimension in levels 1 to 5, as the authors report them; 121 of `light` have no level."""
OFFICIAL = Path(__file__).with_name("libero_plus_noise.npz")
"""Images of the authors' code (repository at 4976dc3, ImageMagick 6.9.11 Q16): `picture`, and `noise_N` with NumPy's
generator seeded by N."""


@pytest.fixture(autouse=True)
def no_assets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ASSETS_VARIABLE, raising=False)


def test_counts_are_those_of_the_authors() -> None:
    counts = Counter((variant.dimension, variant.level) for variant in all_variants())
    assert counts.pop(("light", None)) == 121
    assert counts == {(name, level): n for name, row in LEVELS.items() for level, n in enumerate(row, 1)}
    assert Counter(variant.suite for variant in all_variants()) == {
        "libero_spatial": 2402,
        "libero_object": 2518,
        "libero_goal": 2591,
        "libero_10": 2519,
    }
    assert len({variant.state_id for variant in all_variants()}) == 10_030
    assert len({variant.base for variant in all_variants()}) == 40
    assert all(variant_of(variant.state_id) is variant for variant in all_variants()[::100])


def test_names_are_read_from_their_end() -> None:
    table = parse_variant(
        "libero_spatial", 1, "pick_up_the_black_bowl_from_table_center_and_place_it_table_7", "background", 2
    )
    assert table.base == "pick_up_the_black_bowl_from_table_center_and_place_it" and table.needs_assets
    moved = parse_variant("libero_goal", 2, "turn_on_the_stove_moved_level1_sample4", "layout", 3)
    assert moved.base == "turn_on_the_stove" and not moved.needs_assets
    words = parse_variant("libero_goal", 3, "turn_on_the_stove_language_12_view_0_0_100_0_0_initstate_0", "language", 3)
    assert (words.base, words.language, words.robot) == ("turn_on_the_stove", 12, 0)
    view = parse_variant("libero_goal", 4, "turn_on_the_stove_view_45_15_122_6_356_initstate_0", "camera", 3)
    assert view.view == (45, 15, 122, 6, 356)
    assert view.suffix_words == " view 45 15 122 6 356 initstate 0"
    with pytest.raises(ValueError, match="no variant of LIBERO-Plus is called 'turn_on_the_stove'"):
        parse_variant("libero_goal", 5, "turn_on_the_stove", "camera", 1)


def test_variants_are_chosen_by_suite_dimension_and_level() -> None:
    variants = filter_variants(PlusConfig(suites=("libero_10",), dimensions=("noise", "camera"), levels=(5,)))
    assert {(v.suite, v.level) for v in variants} == {("libero_10", 5)}
    assert {v.dimension for v in variants} == {"noise", "camera"}
    assert len(select_variants(PlusConfig())) == 6983


def test_a_sample_is_stratified_keyed_and_nested() -> None:
    variants = select_variants(PlusConfig())
    sample = select_variants(PlusConfig(sample=700))
    assert len(sample) == 700 and sample == select_variants(PlusConfig(sample=700))
    strata, in_sample = (Counter((v.dimension, v.level) for v in of) for of in (variants, sample))
    assert all(abs(in_sample[key] - n * 700 / 6983) < 1 for key, n in strata.items())
    assert set(sample) < set(sample_variants(variants, 1400, 0))
    assert len(set(sample) & set(select_variants(PlusConfig(sample=700, sample_seed=1)))) < 150
    assert len(select_variants(PlusConfig(dimensions=("camera",), sample=5000))) == sum(LEVELS["camera"])


def test_results_say_what_was_played_and_what_was_left_out() -> None:
    notes = "\n".join(list_remarks(PlusConfig(sample=100)))
    assert "100 of 10030 variants are evaluated: 23 camera" in notes and "sample_seed 0" in notes
    assert "left out: 1142 light, 1076 background, 829 layout need scenes" in notes
    assert "env.plus.assets=FOLDER or LIBERO_PLUS_ASSETS" in notes
    assert "robot_states: official" in notes and "instructions: task" in notes
    plain = "\n".join(list_remarks(PlusConfig(dimensions=("camera",), instructions="official")))
    assert "left out" not in plain and "robot_states" not in plain and "instructions" not in plain


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("plus.dimensions=[camara]", "no dimension 'camara'; did you mean 'camera'"),
        ("plus.levels=[6]", "no level 6; it has 1, 2, 3, 4, 5"),
        ("plus.suites=[libero_90]", "no suite 'libero_90'"),
        ("plus.dimensions=[]", "name at least one dimension"),
        ("plus.levels=[1,1]", "a level is named twice"),
        ("plus.sample=0", "sample"),
    ],
)
def test_bad_settings_are_named(override: str, said: str) -> None:
    with pytest.raises(SpecError) as error:
        read_env("libero", [override])
    assert said in str(error.value)


def test_one_choice_of_tasks() -> None:
    with pytest.raises(ValueError, match="give one of suite"):
        LiberoConfig(suite="libero_10", plus=PlusConfig())
    with pytest.raises(ValueError, match="tasks belong to suite"):
        LiberoConfig(tasks=(0,), plus=PlusConfig())


def test_what_lacks_assets_or_files_says_what_to_get(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"none of these variants can run: 1142 light need scenes, .* assets.zip"):
        select_variants(PlusConfig(dimensions=("light",)))
    monkeypatch.setattr(files, "find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"1550 robot, 1537 language, 696 layout variants need .*: pip install --no-deps"
    ):
        files.require_files(select_variants(PlusConfig()))
    files.require_files(select_variants(PlusConfig(dimensions=("camera", "noise"))))
    robot = next(variant for variant in all_variants() if variant.language)
    with pytest.raises(UserError, match="task files are not installed: pip install --no-deps"):
        files.task_file(robot)


@pytest.mark.parametrize("noise", [5, 15, 25, 35, 45])
def test_noise_equals_the_authors_code(noise: int) -> None:
    official = np.load(OFFICIAL)
    frame = official["picture"].copy()
    result = add_noise(frame, noise, np.random.RandomState(noise))
    assert np.array_equal(result, official[f"noise_{noise}"])
    assert np.array_equal(frame, official["picture"]), "the frame itself stays"
    again = add_noise(frame, noise, np.random.RandomState(noise + 1))
    assert np.array_equal(again, result) == (noise in (15, 25)), "three of five kinds are random"


def test_severity_grows() -> None:
    frame = np.load(OFFICIAL)["picture"]
    for kind in range(5):
        first, last = (add_noise(frame, 10 * kind + n, np.random.RandomState(0)).astype(int) for n in (1, 10))
        assert abs(last - frame).mean() > abs(first - frame).mean() > 0


def test_fog_covers_large_images() -> None:
    assert add_noise(np.zeros((300, 300, 3), np.uint8) + np.uint8(9), 31, np.random.RandomState(0)).shape == (
        300,
        300,
        3,
    )


# ---------------------------------------------------------------------------------------------------- assets


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "wheel"
    write_descriptions(folder)
    monkeypatch.setattr(files, "files_folder", lambda: folder)
    return folder


@pytest.fixture
def assets(tmp_path: Path) -> Path:
    """An empty folder in the archive's layout."""
    folder = tmp_path / "unpacked"
    for name in FOLDERS:
        (folder / name).mkdir(parents=True)
    return folder


def variant_with(ending: str, suite: str = "libero_spatial") -> Variant:
    return next(v for v in all_variants() if v.suite == suite and re.search(rf"_{ending}_\d+$", v.name))


def write_model(folder: Path, name: str, *named: str) -> Path:
    """Write a model that names these files: TEXTURE=FILE."""
    model = folder / name
    model.parent.mkdir(parents=True, exist_ok=True)
    textures = "".join('<texture name="{}" file="{}"/>'.format(*entry.split("=")) for entry in named)
    model.write_text(f"<mujoco><asset>{textures}</asset></mujoco>")
    return model


def test_with_assets_all_variants_run(tmp_path: Path) -> None:
    with_assets = PlusConfig(assets=tmp_path)
    assert Counter(v.dimension for v in select_variants(with_assets)) == {
        "camera": 1599,
        "robot": 1550,
        "language": 1537,
        "light": 1142,
        "background": 1076,
        "noise": 1601,
        "layout": 1525,
    }
    notes = "\n".join(list_remarks(with_assets))
    assert "10030 of 10030 variants are evaluated" in notes and "left out" not in notes
    assert "assets: 1142 light, 1076 background, 829 layout variants are built from the files in plus.assets" in notes
    assert "plus.assets" not in "\n".join(list_remarks(PlusConfig(assets=tmp_path, dimensions=("camera",))))


def test_the_folder_is_named_by_the_key_or_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def assets_of(override: str) -> Path | None:
        folder: Path | None = read_env("libero", [override]).config.plus.assets
        return folder

    monkeypatch.chdir(tmp_path)
    assert assets_of("plus.assets=mine") == tmp_path / "mine"
    assert assets_of("plus.levels=[1]") is None
    monkeypatch.setenv(ASSETS_VARIABLE, "shared")
    assert assets_of("plus.levels=[1]") == tmp_path / "shared"
    assert assets_of("plus.assets=mine") == tmp_path / "mine"


def test_the_folder_is_found_as_the_archive_unpacks(tmp_path: Path) -> None:
    assert assets_folder(None) is None
    for number, inner in enumerate((".", *INNER_FOLDERS)):
        named = tmp_path / str(number)
        for name in FOLDERS:
            (named / inner / name).mkdir(parents=True)
        assert assets_folder(named) == named / inner


def test_a_folder_without_the_assets_is_named(tmp_path: Path) -> None:
    (tmp_path / "scenes").mkdir()
    with pytest.raises(UserError, match=rf"assets: {tmp_path} lacks new_objects/, textures/, .*Sylvest/LIBERO-plus"):
        assets_folder(tmp_path)
    with pytest.raises(UserError, match=r"assets: /nowhere does not exist; it is to be the unpacked .*assets.zip"):
        assets_folder(Path("/nowhere"))
    (tmp_path / "assets.zip").touch()
    with pytest.raises(UserError, match=r"assets.zip is a file, not the folder into which it is unpacked"):
        assets_folder(tmp_path / "assets.zip")


def test_scenes_are_those_that_the_wheel_describes(wheel: Path, assets: Path) -> None:
    """A room with other lights; a table; a floor in LIBERO's room, whose file the class inherits; added objects."""
    light, table, add = (variant_with(ending) for ending in ("light", "table", "add"))
    floor = variant_with("table", "libero_object")
    write_task(wheel, light.suite, light.name, "LIBERO_Tabletop_Manipulation_light_7")
    write_task(wheel, table.suite, table.name, "Libero_Tabletop_Manipulation_Wicker")
    write_task(wheel, floor.suite, floor.name, "Libero_Floor_Manipulation_FloorWicker")
    objects = "milk_1 - milk\n can_of_soda__1_1 can_of_soda__1_2 - can_of_soda__1\n bag_of_yeast_1 - bag_of_yeast"
    write_task(wheel, add.suite, add.name, "LIBERO_Tabletop_Manipulation", objects)
    base_floor = "scenes/libero_floor_base_style.xml"
    for model in (LIT, TABLE, base_floor, YEAST, CAN):
        write_model(assets, model)
    plain = {"floor": "light-gray-floor-tile.png", "wall": "light-gray-plaster.png"}
    wicker = {"floor": "Wicker copy.png", "wall": "canvas_sky_blue.png"}
    assert scene_changes(light, assets) == SceneChanges(arena=str(assets / LIT), **plain)
    assert scene_changes(table, assets) == SceneChanges(arena=str(assets / TABLE), **wicker)
    assert scene_changes(floor, assets) == SceneChanges(arena=str(assets / base_floor), **wicker)
    added = (("bag_of_yeast", str(assets / YEAST)), ("can_of_soda__1", str(assets / CAN)))
    assert scene_changes(add, assets) == SceneChanges(objects=added)
    moved = next(v for v in all_variants() if v.dimension == "layout" and not v.needs_assets)
    assert scene_changes(moved, None) == UNCHANGED_SCENE
    require_assets([light, table, floor, add, moved], assets)


def test_a_missing_file_is_named_with_its_variant_and_the_archive(wheel: Path, assets: Path) -> None:
    table, add = variant_with("table"), variant_with("add")
    write_task(wheel, table.suite, table.name, "Libero_Tabletop_Manipulation_Wicker")
    write_task(wheel, add.suite, add.name, "LIBERO_Tabletop_Manipulation", "bag_of_yeast_1 - bag_of_yeast")

    def missing(variant: Variant) -> Path:
        with pytest.raises(UserError) as error:
            require_assets([variant], assets)
        told = str(error.value)
        assert variant.task_name in told and f"unpack it again into {assets}" in told and "Sylvest/LIBERO-plus" in told
        return Path(told.partition(" is missing")[0])

    assert missing(table) == assets / TABLE
    room = write_model(assets, TABLE, "texplane=../../textures/other.png", "tex-table=wicker.png")
    assert missing(table) == assets / "textures/Wicker copy.png", "the variant's floor, not the one in the file"
    (assets / "textures/Wicker copy.png").touch()
    assert missing(table) == assets / "scenes/tabletop250/wicker.png"
    room.write_text("<mujoco><asset>")
    with pytest.raises(UserError, match=r"Wicker.xml is damaged .*; unpack it again: .*assets.zip"):
        require_assets([table], assets)
    assert missing(add) == assets / YEAST
    write_model(assets, YEAST, "tex=textures/yeast.png")
    assert missing(add) == (assets / YEAST).parent / "textures/yeast.png"


@pytest.mark.parametrize(
    ("break_wheel", "told"),
    [
        (lambda wheel: (wheel / "envs/problems/libero_tabletop_manipulation.py").unlink(), "does not describe the sc"),
        (lambda wheel: (wheel / "envs/arenas/style.py").write_text("FLOOR_STYLE = {}"), "has no table 'WALL_STYLE'"),
        (lambda wheel: (wheel / "envs/arenas/style.py").unlink(), "style.py is missing"),
    ],
)
def test_another_version_of_the_wheel_is_named(
    wheel: Path, assets: Path, break_wheel: Callable[[Path], object], told: str
) -> None:
    table = variant_with("table")
    write_task(wheel, table.suite, table.name, "Libero_Tabletop_Manipulation_Wicker")
    break_wheel(wheel)
    with pytest.raises(UserError, match=rf"{told}.*install the tested version: pip install"):
        scene_changes(table, assets)

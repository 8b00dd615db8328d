"""A recorded contract double of RoboTwin 2.0: the two public APIs with their signatures, shapes and errors, and no physics.

`lay_out` writes it to a folder as one of the published sources has it, so that what imports RoboTwin finds the same
module names, files and order of calls:

| kind | recorded from | what is there |
| wheel | rlinf-robotwin-runtime 0.1.3 (PyPI) | package `robotwin`: `envs.vector_env`, `envs.<task>`, `config`, `description` |
| RLinf_support | RoboTwin-Platform/RoboTwin, branch RLinf_support, 0008ae6 | `robotwin.envs.vector_env` and `envs.<task>` |
| main | branch main, cf47ab5 | `envs.<task>`, settings in `env_cfg/task_config` |
| stable_2.0 | branch stable_2.0, 13c3c47 | `envs.<task>`, settings in `task_config` |

What it does not take over is stricter, never laxer: it raises for a keyword, a shape or a dtype that the source would
read past, because that is always a mistake of the caller.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import yaml

FILES = Path(__file__).parent / "files"
Kind = Literal["wheel", "RLinf_support", "main", "stable_2.0"]

DEMO_CLEAN = {
    "render_freq": 0,
    "episode_num": 50,
    "use_seed": False,
    "save_freq": 15,
    "embodiment": ["aloha-agilex"],
    "language_num": 100,
    "domain_randomization": {
        "random_background": False,
        "cluttered_table": False,
        "clean_background_rate": 1,
        "random_head_camera_dis": 0,
        "random_table_height": 0,
        "random_light": False,
        "crazy_random_light_rate": 0,
    },
    "camera": {
        "head_camera_type": "D435",
        "wrist_camera_type": "D435",
        "collect_head_camera": True,
        "collect_wrist_camera": True,
    },
    "data_type": {
        "rgb": True,
        "third_view": False,
        "depth": False,
        "pointcloud": False,
        "observer": False,
        "endpose": True,
        "qpos": True,
        "mesh_segmentation": False,
        "actor_segmentation": False,
    },
    "pcd_down_sample_num": 1024,
    "pcd_crop": True,
    "save_path": "./data",
    "clear_cache_freq": 5,
    "collect_data": True,
    "eval_video_log": True,
}
"""task_config/demo_clean.yml, alike in all sources (main adds eval_instruction: seen)."""
DEMO_RANDOMIZED = DEMO_CLEAN | {
    "domain_randomization": {
        "random_background": True,
        "cluttered_table": True,
        "clean_background_rate": 0.02,
        "random_head_camera_dis": 0,
        "random_table_height": 0.03,
        "random_light": True,
        "crazy_random_light_rate": 0.02,
    },
}
CAMERAS = {
    "L515": {"fovy": 45, "w": 320, "h": 180},
    "Large_L515": {"fovy": 45, "w": 640, "h": 360},
    "D435": {"fovy": 37, "w": 320, "h": 240},
    "Large_D435": {"fovy": 37, "w": 640, "h": 480},
}
EMBODIMENTS = {
    "aloha-agilex": {"file_path": "./assets/embodiments/aloha-agilex/"},
    "franka-panda": {"file_path": "./assets/embodiments/franka-panda/"},
}
STEP_LIMITS = {"beat_block_hammer": 400, "place_empty_cup": 500}
"""Step limits of the two tasks that the double has."""
TASKS = tuple(STEP_LIMITS)
BRANCH_IMPORTS = {
    "from robotwin.assets import validate_root": "from envs._GLOBAL_CONFIGS import CONFIGS_PATH",
    "from robotwin.config import load_task_config\n": "",
    "from robotwin.description import": "from description.utils.generate_episode_instructions import",
    'validate_root(os.environ["ROBOTWIN_ASSETS_ROOT"])["root"]': 'os.environ["ASSETS_PATH"]',
    "load_task_config(": "_settings(",
}
"""In which the branch's vector_env.py differs from the wheel's."""

INSTRUCTIONS = {
    "beat_block_hammer": {
        "full_description": "there is a hammer, <grab it> and <beat the block>",
        "schema": "{A} notifies the hammer, {a} notifies the arm",
        "preference": "few words",
        "seen": ["Hit the block with {A}.", "Use {a} to swing {A} at the block."],
        "unseen": ["Let {A} fall on the block."],
    },
    "place_empty_cup": {
        "full_description": "put the empty cup on the coaster",
        "schema": "{A} notifies the cup, {B} notifies the coaster",
        "preference": "few words",
        "seen": ["Put {A} on {B}."],
        "unseen": ["Make {A} stand on {B}."],
    },
}
OBJECTS = {
    **{f"020_hammer/base{i}": {"seen": [f"{colour} hammer"], "unseen": [f"{colour} tool"]}
       for i, colour in enumerate(("red", "green", "blue", "black"))},
    **{f"021_cup/base{i}": {"seen": [f"cup number {i}"], "unseen": [f"beaker number {i}"]} for i in range(4)},
    "019_coaster/base0": {"seen": ["coaster"], "unseen": []},
}  # fmt: skip


def lay_out(kind: Kind, root: Path) -> Path:
    """Write the double. -> `root`, to be put on the path; a checkout is one, and has its assets in it."""
    wheel, rlinf = kind == "wheel", kind in ("wheel", "RLinf_support")
    home = root / "robotwin" if wheel else root
    package = "robotwin.envs" if wheel else "envs"

    def copy(name: str, to: Path, **changes: str) -> None:
        text = (FILES / name).read_text().replace("robotwin.envs", package)
        for old, new in changes.items():
            assert old in text, f"{name} has no {old}"
            text = text.replace(old, new)
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_text(text)

    envs = home / "envs"
    copy("create_actor.py", envs / "utils" / "create_actor.py")
    copy("scene.py", envs / "scene.py")
    copy("planner.py", envs / "robot" / "planner.py")
    copy("camera.py", envs / "camera" / "camera.py")
    copy("base_task.py", envs / ("_main_base_task.py" if rlinf else "_base_task.py"))
    if rlinf:
        copy("rlinf_base_task.py", envs / "_base_task.py")
    for task in TASKS:
        copy(f"{task}.py", envs / f"{task}.py")
    if wheel:
        settings, descriptions = home / "configs" / "task", home / "description"
        copy("assets.py", home / "assets.py")
        copy("config.py", home / "config.py")
        copy("vector_env.py", envs / "vector_env.py")
        copy("instructions.py", descriptions / "instructions.py")
    else:
        settings = root / ("env_cfg/task_config" if kind == "main" else "task_config")
        descriptions = root / "description"
        copy("global_configs.py", envs / "_GLOBAL_CONFIGS.py", SETTINGS=str(settings.relative_to(root)))
        sentences = descriptions / "utils" / "generate_episode_instructions.py"
        no_seed = {", seed: int | None = None": "", "random.Random(seed) if seed is not None else random": "random"}
        copy("instructions.py", sentences, **{".parent\n": ".parent.parent\n"}, **({} if rlinf else no_seed))
        make_assets(root)
    if kind == "RLinf_support":
        copy("vector_env.py", root / "robotwin" / "envs" / "vector_env.py", **BRANCH_IMPORTS)
        (root / "robotwin" / "__init__.py").touch()
        (root / "robotwin" / "envs" / "__init__.py").touch()

    named = {"demo_clean": DEMO_CLEAN, "demo_randomized": DEMO_RANDOMIZED, "_camera_config": CAMERAS,
             "_embodiment_config": EMBODIMENTS, "_eval_step_limit": STEP_LIMITS}  # fmt: skip
    for name, value in named.items():
        _write(settings / f"{name}.yml", yaml.safe_dump(value, sort_keys=False))
    for task, texts in INSTRUCTIONS.items():
        _write(descriptions / "task_instruction" / f"{task}.json", json.dumps(texts))
    for thing, names in OBJECTS.items():
        _write(descriptions / "objects_description" / f"{thing}.json", json.dumps(names))
    for folder in {
        envs,
        envs / "camera",
        envs / "robot",
        envs / "utils",
        *((home, home / "configs", settings, descriptions) if wheel else ()),
    }:
        (folder / "__init__.py").touch()
    if wheel:
        line = "from robotwin.description.instructions import generate_episode_descriptions\n"
        (descriptions / "__init__.py").write_text(line)
    return root


def make_assets(root: Path) -> Path:
    """`root/assets` with the folders that the wheel's `validate_root` asks for, and the robots' settings."""
    for name in ("background_texture", "objects"):
        (root / "assets" / name).mkdir(parents=True, exist_ok=True)
    for name, joints in (("aloha-agilex", 6), ("franka-panda", 7)):
        folder = root / "assets" / "embodiments" / name
        folder.mkdir(parents=True, exist_ok=True)
        names = [[f"{side}_joint{i + 1}" for i in range(joints)] for side in ("fl", "fr")]
        config = {"urdf_path": "./urdf/robot.urdf", "arm_joints_name": names, "gripper_scale": [-0.01, 0.045]}
        (folder / "config.yml").write_text(yaml.safe_dump(config))
        limit = '<limit lower="-10" upper="10" effort="1" velocity="1"/>'
        urdf = "".join(f'<joint name="{name}" type="revolute">{limit}</joint>' for side in names for name in side)
        _write(folder / "urdf" / "robot.urdf", f'<robot name="{name}">{urdf}</robot>')
        for side in ("left", "right"):  # opened whatever plans
            (folder / f"curobo_{side}_tmp.yml").write_text("robot_cfg: {}\n")
    return root


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)

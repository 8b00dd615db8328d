"""Locates RoboTwin and calls it. It is found without importing it, since that loads SAPIEN and CUDA."""

from __future__ import annotations

import importlib
import os
import random
import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from importlib import metadata
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import yaml
from attrs import field, frozen

from vla_rl.core.errors import UserError
from vla_rl.core.paths import read_commit
from vla_rl.plugins.envs.robotwin.assets import ASSET_FOLDERS, DOWNLOAD, asset_root
from vla_rl.plugins.envs.robotwin.config import RobotwinConfig, is_file
from vla_rl.plugins.envs.robotwin.end_effector import BOUNDS
from vla_rl.plugins.envs.robotwin.interpreter import WHERE, available_apis, package_folder
from vla_rl.plugins.envs.robotwin.patches import kept_randomness, prepare_modules
from vla_rl.plugins.envs.robotwin.tasks import task_names
from vla_rl.toolkit.json_files import read_record

NO_LIMIT = 10**9
"""Step limit given to RoboTwin, out of reach: core ends episodes, and a spec may allow more steps than RoboTwin."""
ARM_JOINTS = 6
UNLIMITED = (-10.0, 10.0)
"""Bounds of a joint without limits in its URDF [rad]: those of the aloha-agilex, RoboTwin's own robot."""
OBJECT = re.compile(r"[\"'](\d{3}_[A-Za-z0-9_-]+)[\"']")
"""An object's folder, such as "020_hammer", in the source of a task."""
CALLED = {"vector": ("play_once", "gen_sparse_reward_data"), "classic": ("play_once", "take_action")}
"""Methods of `Base_Task` that an API needs."""
GRIPPER = (0.0, 1.0)
"""Bounds of a gripper: 0 is closed, 1 open."""


@frozen(kw_only=True)
class Installation:
    """A RoboTwin installation with the settings to use it with."""

    api: Literal["vector", "classic"]
    package: str
    """Package with the task modules: "robotwin.envs" (runtime wheel), or "envs" (a checkout)."""
    root: Path | None
    """Root of the checkout; None: the runtime wheel."""
    assets: Path
    config: RobotwinConfig
    settings: Mapping[str, Any] = field(repr=False)
    """Task settings, as `task_config` has them."""

    def make_importable(self) -> None:
        """Make RoboTwin importable in this process, and tell it where its assets are."""
        if self.root is not None and str(self.root) not in sys.path:
            sys.path.insert(0, str(self.root))
        if self.api == "vector":
            os.environ["ROBOTWIN_ASSETS_ROOT"] = os.environ["ASSETS_PATH"] = str(self.assets)

    def vector_env(self) -> Any:
        """Return the class `VectorEnv`."""
        prepare_modules(self.package, self.config)
        return importlib.import_module("robotwin.envs.vector_env").VectorEnv

    def create_task(self, name: str) -> Any:
        """Return a task object, before `setup_demo`."""
        prepare_modules(self.package, self.config)
        return getattr(importlib.import_module(f"{self.package}.{name}"), name)()

    def unstable_error(self) -> type[Exception]:
        """Return the exception that `setup_demo` raises for a seed whose objects do not come to rest."""
        error: type[Exception] = importlib.import_module(f"{self.package}.utils.create_actor").UnStableError
        return error

    def task_settings(self, task: str) -> dict[str, Any]:
        """Return `task_config` with what the plugin decides: only cameras and joints are read, nothing is written."""
        wrists = any(name != "head" for name in self.config.cameras)
        settings = {"save_path": "./data", "clear_cache_freq": 8, **deepcopy(dict(self.settings))}
        settings |= {
            "task_name": task,
            "step_lim": NO_LIMIT,
            "render_freq": 0,
            "eval_video_log": False,
            "collect_data": False,
            "camera": {**(settings.get("camera") or {}), "collect_head_camera": True, "collect_wrist_camera": wrists},
            "data_type": {"rgb": True, "qpos": True},
        }
        if self.api == "vector":
            settings["planner_backend"] = self.motion_planner
        return settings

    def setup_arguments(self, task: str) -> dict[str, Any]:
        """Return `setup_demo`'s arguments besides the seed, as RoboTwin's evaluation derives them from settings."""
        settings = self.task_settings(task)
        embodiment = settings["embodiment"]
        camera = self.robotwin_yaml("_camera_config")[settings["camera"].get("head_camera_type", "D435")]
        settings |= {
            "eval_mode": True,
            "head_camera_h": camera["h"],
            "head_camera_w": camera["w"],
            "dual_arm_embodied": len(embodiment) == 1,
        }
        if len(embodiment) == 3:
            settings["embodiment_dis"] = embodiment[2]
        for side, (folder, config) in self.find_robots().items():
            settings |= {f"{side}_robot_file": str(folder), f"{side}_embodiment_config": config}
        return settings

    def find_robots(self) -> dict[str, tuple[Path, dict[str, Any]]]:
        """Return side -> (folder, `config.yml`) of the robot whose arm is on that side. Raise UserError for robots that
        RoboTwin does not have, and for arms that actions here are not for."""
        embodiment = self.settings.get("embodiment")
        if not isinstance(embodiment, list) or len(embodiment) not in (1, 3):
            raise UserError(f"task_config: embodiment needs one name, or two and a distance; it is {embodiment}")
        files = self.robotwin_yaml("_embodiment_config")
        robots = {}
        for index, side in enumerate(("left", "right")):
            name = embodiment[index] if len(embodiment) == 3 else embodiment[0]
            if name not in files:
                raise UserError(f"task_config: no embodiment {name!r}\n  embodiments: {', '.join(files)}")
            folder = self.assets / files[name]["file_path"]
            try:
                config = yaml.safe_load((folder / "config.yml").read_text(encoding="utf-8"))
            except OSError as exc:
                raise UserError(f"embodiment {name} is not among the assets: {exc}\n  {DOWNLOAD}") from exc
            joints = len(config["arm_joints_name"][index])
            if joints != ARM_JOINTS:
                raise UserError(f"embodiment {name} has {joints} joints an arm; actions here are for {ARM_JOINTS}")
            if self._plans_with_mplib:
                self._check_planner_files(name, folder)
            robots[side] = folder, config
        return robots

    def action_bounds(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the lowest and the highest action."""
        if self.config.control == "end_effector":
            return tuple(low for low, _ in BOUNDS), tuple(high for _, high in BOUNDS)
        return self.joint_bounds()

    def joint_bounds(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the lowest and the highest joint targets: of joints [rad] from the robots' URDF, of grippers 0
        (closed) and 1 (open)."""
        bounds = []
        for index, (folder, config) in enumerate(self.find_robots().values()):
            limits = joint_limits(folder / config["urdf_path"])
            bounds += [limits.get(joint, UNLIMITED) for joint in config["arm_joints_name"][index]]
            bounds.append(GRIPPER)
        return tuple(low for low, _ in bounds), tuple(high for _, high in bounds)

    @property
    def _plans_with_mplib(self) -> bool:
        return self.api == "vector" and self.motion_planner == "mplib"

    @property
    def motion_planner(self) -> str:
        """Motion planner of the vector API's expert."""
        return str(self.config.planner or self.settings.get("planner_backend", "mplib"))

    @property
    def instruction_type(self) -> str:
        """Set of wordings of which RoboTwin takes instructions: "seen" or "unseen"."""
        return str(self.config.instruction_type or self.settings.get("eval_instruction", "seen"))

    def _check_planner_files(self, name: str, folder: Path) -> None:
        """Raise UserError where a robot lacks cuRobo's files, which RoboTwin opens with mplib as well."""
        for side in ("left", "right"):
            file = folder / f"curobo_{side}_tmp.yml"
            if not file.is_file():
                raise UserError(
                    f"embodiment {name} has no {file.name}, which RoboTwin opens whatever plans; without cuRobo a file "
                    f"with `robot_cfg: {{}}` is enough: {file}"
                )

    def robotwin_yaml(self, name: str) -> dict[str, Any]:
        """Return one of RoboTwin's own settings files."""
        return _robotwin_yaml(self.root, name)

    def full_description(self, task: str) -> str:
        """Return the task's description in one sentence, the same for all episodes."""
        if self.root is None:
            description = importlib.import_module("robotwin.description.instructions").load_task_instructions(task)
        else:
            description = read_record(self.root / "description" / "task_instruction" / f"{task}.json").data
        return str(description["full_description"]).replace("<", "").replace(">", "").strip()

    def draw_instruction(self, task: str, things: Mapping[str, str], key: int) -> str:
        """Return one of the task's wordings with an episode's objects filled in; where none fits, the task's
        description.

        Args:
            things: placeholder -> file of an object's names, or an arm.
            key: seed of the choice.
        """
        self.make_importable()
        wheel, checkout = "robotwin.description.instructions", "description.utils.generate_episode_instructions"
        module = importlib.import_module(wheel if self.root is None else checkout)
        generate: Callable[..., Any] = module.generate_episode_descriptions
        seed_argument = {"seed": key} if "seed" in signature(generate).parameters else {}
        with kept_randomness():
            random.seed(key)  # some versions draw from the global generator, which other threads may use as well
            descriptions = generate(task, [dict(things)], max_descriptions=1, **seed_argument)
        texts = descriptions[0][self.instruction_type] if descriptions else []
        return str(texts[0]) if texts else self.full_description(task)


def find_installation(config: RobotwinConfig) -> Installation:
    """Return the RoboTwin installation that the settings mean. Raise UserError when there is none, or another one."""
    available = available_apis(config.checkout)
    if not available:
        where = f"in {config.checkout}" if config.checkout else f"for {sys.executable}"
        raise UserError(f"there is no RoboTwin {where}\n  {WHERE}")
    api = next(iter(available)) if config.api == "auto" else config.api
    if api not in available:
        raise UserError(
            f"api: {api} is not offered by this RoboTwin, which has {', '.join(available)}\n"
            "  vector: the runtime wheel, or a checkout of the branch RLinf_support; classic: a checkout"
        )
    package, root = available[api]
    check_version(api, root)
    assets = _assets_of_classic(config, root) if api == "classic" and root is not None else asset_root(config)
    check_objects(task_names(config.tasks), root, assets)
    settings = _read_settings(config, root)
    return Installation(api=api, package=package, root=root, assets=assets, config=config, settings=settings)


def check_version(api: Literal["vector", "classic"], root: Path | None) -> None:
    """Raise UserError for a RoboTwin of another version, whose base task lacks what the plugin calls; the message names
    the version."""
    package = root if root is not None else package_folder("robotwin")
    file = package / "envs" / "_base_task.py" if package is not None else None
    text = file.read_text(encoding="utf-8") if file is not None and file.is_file() else ""
    missing = [name for name in CALLED[api] if not re.search(rf"^    def {name}\(", text, flags=re.MULTILINE)]
    if missing:
        raise UserError(
            f"this RoboTwin ({describe_version(root)}) is of a version that the plugin does not know: its "
            f"_base_task.py has no "
            f"{', '.join(missing)}\n  known: the runtime wheel 0.1.3; branches RLinf_support (0008ae6), main "
            "(cf47ab5), stable_2.0 (13c3c47)"
        )


def check_objects(tasks: Iterable[str], root: Path | None, assets: Path) -> None:
    """Raise UserError for a task with objects that are not among the assets. RoboTwin only prints their names."""
    package = root if root is not None else package_folder("robotwin")
    for task in tasks:
        file = package / "envs" / f"{task}.py" if package is not None else None
        text = file.read_text(encoding="utf-8") if file is not None and file.is_file() else ""
        needed = sorted(set(OBJECT.findall(text)))
        missing = [name for name in needed if not (assets / "assets" / "objects" / name).is_dir()]
        if missing:
            raise UserError(
                f"task {task} needs objects that are not in {assets / 'assets' / 'objects'}: {', '.join(missing)}\n"
                f"  {DOWNLOAD}"
            )


def describe_version(root: Path | None) -> str:
    """Return a name of the version: of the wheel, or of the checkout's commit."""
    if root is None:
        try:
            return f"rlinf-robotwin-runtime {metadata.version('rlinf-robotwin-runtime')}"
        except metadata.PackageNotFoundError:
            return "runtime wheel of unknown version"
    return f"{root}, commit {read_commit(root) or 'unknown'}"


def joint_limits(urdf: Path) -> dict[str, tuple[float, float]]:
    """Return joint -> its lower and upper limit [rad or m], of the joints of a URDF that have limits. Raise UserError
    for a file that cannot be read."""
    try:
        root = ET.parse(urdf).getroot()  # noqa: S314 - a file of the simulator that is about to run
    except (OSError, ET.ParseError) as exc:
        raise UserError(f"the robot's description {urdf} cannot be read: {exc}\n  {DOWNLOAD}") from exc
    limits = {}
    for joint in root.iter("joint"):
        limit = joint.find("limit")
        if limit is not None and joint.get("type") != "continuous":
            low, high = float(limit.get("lower", 0)), float(limit.get("upper", 0))
            if low < high:
                limits[str(joint.get("name"))] = low, high
    return limits


def _assets_of_classic(config: RobotwinConfig, root: Path) -> Path:
    """Return the asset folder of the classic API, which finds everything below its checkout. Raise UserError for
    `planner` and `assets` keys, which have no effect there, and for missing assets."""
    if config.planner is not None:
        raise UserError(f"planner: {config.planner} has no effect with the classic API; leave it out")
    if config.assets is not None and config.assets.resolve() != root.resolve():
        raise UserError(f"assets: {config.assets} has no effect with the classic API, which reads {root / 'assets'}")
    missing = [folder for folder in ASSET_FOLDERS if not (root / folder).is_dir()]
    if missing:
        raise UserError(f"RoboTwin's assets are not there: {root} lacks {', '.join(missing)}\n  {DOWNLOAD}")
    return root


def _robotwin_yaml(root: Path | None, name: str) -> dict[str, Any]:
    if root is None:
        settings: dict[str, Any] = importlib.import_module("robotwin.config").load_task_config(name)
        return settings
    folders = [root / "env_cfg" / "task_config", root / "task_config"]  # main, and older branches
    for folder in folders:
        if (folder / f"{name}.yml").is_file():
            return dict(yaml.safe_load((folder / f"{name}.yml").read_text(encoding="utf-8")))
    raise ValueError(f"no {name}.yml in {' or '.join(map(str, folders))}")


def _read_settings(config: RobotwinConfig, root: Path | None) -> dict[str, Any]:
    if not isinstance(config.task_config, str):
        return config.task_config
    if not is_file(config.task_config):
        try:
            return _robotwin_yaml(root, config.task_config)
        except ValueError as exc:
            advice = "give demo_clean, demo_randomized, a .yml file, or the settings themselves"
            raise UserError(f"task_config: {exc}\n  {advice}") from exc
    try:
        settings = yaml.safe_load(Path(config.task_config).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as exc:
        raise UserError(f"task_config: {config.task_config} cannot be read: {exc}") from exc
    if not isinstance(settings, dict):
        raise UserError(f"task_config: {config.task_config} holds no mapping")
    return settings

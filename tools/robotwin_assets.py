"""Writes an asset folder that lets RoboTwin 2.0 run without its data set: two robots of boxes and a few textures.

    python tools/robotwin_assets.py FOLDER [--front-camera]

FOLDER/assets then holds what RoboTwin asks for: background textures (generated), `objects` (empty), and two robots
under names that RoboTwin knows, since its list of robots is fixed: `aloha-agilex`, two arms in one URDF with the link
and joint names of RoboTwin's own robot (`embodiment: [aloha-agilex]`), and `piper`, one arm of which RoboTwin loads two
(`embodiment: [piper, piper, 0.6]`). An arm has six joints and a gripper of two fingers.

Tasks that need nothing else: blocks_ranking_rgb, blocks_ranking_size, stack_blocks_two, stack_blocks_three,
handover_block.
"""

from __future__ import annotations

import argparse
import math
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

SIDES = {"left": ("fl", 1.0), "right": ("fr", -1.0)}
"""Side of the robot -> prefix of its names, sign of its y."""
MOUNT = (0.23, 0.3, 0.78)
"""Position at which an arm is mounted in the robot's frame: x forward, distance from the middle, z above the floor
[m]."""
UPPER_ARM, FOREARM = 0.30, 0.30
"""Lengths [m]."""
FOREARM_RISE = 0.06
"""Height of the forearm's end above its start, so that it folds over the upper arm [m]."""
GRASP_POINT = 0.12
"""Distance from the last joint to the point between the fingers; RoboTwin assumes 12 cm [m]."""
X, Y, Z = (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)
GREY, DARK, BASE = (0.85, 0.85, 0.88), (0.25, 0.25, 0.28), (0.4, 0.4, 0.42)
TINTS = {"left": (0.35, 0.45, 0.7), "right": (0.7, 0.45, 0.35)}

Vector = tuple[float, float, float]
Box = tuple[Vector, Vector, float]
"""Centre [m], size [m] and pitch [rad] of a box in its link's frame."""


def add_link(
    robot: ET.Element,
    name: str,
    boxes: Sequence[Box] = (),
    *,
    solid: bool = False,
    colour: Vector = GREY,
    mass: float = 1.0,
) -> None:
    """Add a link of boxes. `solid` boxes collide; the others are only drawn."""
    link = ET.SubElement(robot, "link", name=name)
    inertial = ET.SubElement(link, "inertial")
    ET.SubElement(inertial, "origin", xyz="0 0 0", rpy="0 0 0")
    ET.SubElement(inertial, "mass", value=f"{mass:g}")
    ET.SubElement(inertial, "inertia", ixx="0.01", iyy="0.01", izz="0.01", ixy="0", ixz="0", iyz="0")
    for centre, size, pitch in boxes:
        for kind in ("visual", "collision") if solid else ("visual",):
            shape = ET.SubElement(link, kind)
            ET.SubElement(shape, "origin", xyz=_text(centre), rpy=_text((0.0, pitch, 0.0)))
            ET.SubElement(ET.SubElement(shape, "geometry"), "box", size=_text(size))
            if kind == "visual":
                material = ET.SubElement(shape, "material", name=f"{name}_colour")
                ET.SubElement(material, "color", rgba=_text((*colour, 1.0)))


def add_joint(
    robot: ET.Element,
    name: str,
    parent: str,
    child: str,
    position: Vector,
    *,
    kind: str = "fixed",
    axis: Vector | None = None,
    limits: tuple[float, float] = (0.0, 0.0),
    rotation: Vector = (0.0, 0.0, 0.0),
) -> None:
    """Add a joint at `position` [m] and `rotation` (roll, pitch, yaw) of its parent; `limits` in rad or m."""
    joint = ET.SubElement(robot, "joint", name=name, type=kind)
    ET.SubElement(joint, "origin", xyz=_text(position), rpy=_text(rotation))
    ET.SubElement(joint, "parent", link=parent)
    ET.SubElement(joint, "child", link=child)
    if axis is not None:
        low, high = limits
        ET.SubElement(joint, "axis", xyz=_text(axis))
        ET.SubElement(joint, "limit", lower=f"{low:g}", upper=f"{high:g}", effort="100", velocity="3")


def add_arm(robot: ET.Element, prefix: str, camera: str, y: float, tint: Vector) -> None:
    """Add an arm of six joints (yaw, three pitches, yaw, roll) with a gripper and a camera. At zero the upper arm
    points back, and the forearm forward above it."""
    p = prefix
    slope = -math.atan2(FOREARM_RISE, FOREARM)
    forearm = ((FOREARM / 2, 0, FOREARM_RISE / 2), (math.hypot(FOREARM, FOREARM_RISE), 0.045, 0.045), slope)
    add_link(robot, f"{p}_base_link", [((0, 0, 0.02), (0.1, 0.1, 0.04), 0)], colour=DARK)
    add_link(robot, f"{p}_link1", [((0, 0, 0.02), (0.07, 0.07, 0.06), 0)], colour=tint)
    add_link(robot, f"{p}_link2", [((-UPPER_ARM / 2, 0, 0), (UPPER_ARM, 0.05, 0.05), 0)])
    add_link(robot, f"{p}_link3", [forearm], colour=tint)
    add_link(robot, f"{p}_link4", [((0.035, 0, 0), (0.07, 0.05, 0.05), 0)])
    add_link(robot, f"{p}_link5", [((0.015, 0, 0), (0.03, 0.045, 0.045), 0)], colour=tint)
    add_link(robot, f"{p}_link6", [((0.035, 0, 0), (0.05, 0.11, 0.05), 0)], solid=True, colour=DARK)
    for number, outward in ((7, 1), (8, -1)):
        # 8 mm apart at zero: motion planners take fingers to be there, and fingers that touch make every plan fail.
        finger = ((0.098, outward * 0.010, 0), (0.074, 0.012, 0.022), 0)
        add_link(robot, f"{p}_link{number}", [finger], solid=True, mass=0.1)
    add_link(robot, camera, [((-0.01, 0, 0), (0.02, 0.05, 0.02), 0)], colour=DARK, mass=0.1)

    add_joint(robot, f"{p}_mount", "footprint", f"{p}_base_link", (MOUNT[0], y, MOUNT[2]))
    chain: tuple[tuple[str, Vector, Vector, tuple[float, float]], ...] = (
        ("base_link", (0, 0, 0.06), Z, (-3.1, 3.1)),
        ("link1", (0.02, 0, 0.04), Y, (0.0, 3.6)),
        ("link2", (-UPPER_ARM, 0, 0), (0.0, -1.0, 0.0), (0.0, 3.6)),
        ("link3", (FOREARM, 0, FOREARM_RISE), Y, (-2.0, 2.0)),
        ("link4", (0.07, 0, 0), Z, (-1.6, 1.6)),
        ("link5", (0.03, 0, 0), X, (-3.1, 3.1)),
    )
    for number, (parent, position, axis, limits) in enumerate(chain, 1):
        names = (f"{p}_joint{number}", f"{p}_{parent}", f"{p}_link{number}")
        add_joint(robot, *names, position, kind="revolute", axis=axis, limits=limits)
    for number, outward in ((7, 1.0), (8, -1.0)):
        names = (f"{p}_joint{number}", f"{p}_link6", f"{p}_link{number}")
        add_joint(robot, *names, (0, 0, 0), kind="prismatic", axis=(0.0, outward, 0.0), limits=(-0.02, 0.05))
    add_joint(robot, f"{camera}_mount", f"{p}_link6", camera, (-0.03, 0, 0.075), rotation=(0.0, 0.55, 0.0))


def build_robot(arms: int) -> tuple[ET.Element, dict[str, Any]]:
    """Return the URDF and RoboTwin's settings of a robot of two arms, or of one of which RoboTwin loads two."""
    robot = ET.Element("robot", name="box_arms")
    depth, side, height = MOUNT
    shelf: Box = ((depth - 0.05, 0, height - 0.02), (0.2, 2 * side + 0.12 if arms == 2 else 0.16, 0.03), 0)
    column: Box = ((0.05, 0, 0.38), (0.2, 0.3 if arms == 2 else 0.1, 0.74), 0)
    add_link(robot, "footprint", [shelf, column], colour=BASE)
    if arms == 2:
        prefixes = [prefix for prefix, _ in SIDES.values()]
        for name, (prefix, sign) in SIDES.items():
            add_arm(robot, prefix, f"{name}_camera", sign * side, TINTS[name])
    else:
        prefixes = ["arm", "arm"]
        add_arm(robot, "arm", "camera", 0.0, TINTS["left"])
    half = math.sqrt(0.5)
    return robot, {
        "move_group": [f"{p}_link6" for p in prefixes],
        "ee_joints": [f"{p}_joint6" for p in prefixes],
        "arm_joints_name": [[f"{p}_joint{i}" for i in range(1, 7)] for p in prefixes],
        "gripper_name": [{"base": f"{p}_joint7", "mimic": [[f"{p}_joint8", 1.0, 0.0]]} for p in prefixes],
        "gripper_bias": GRASP_POINT,
        "gripper_scale": [-0.003, 0.045],
        "homestate": [[0.0, 1.2, 0.8, 0.6, 0.0, 0.0]] * 2,
        "delta_matrix": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
        "global_trans_matrix": [[1, 0, 0], [0, -1, 0], [0, 0, -1]],  # SAPIEN's frame of a joint about x
        "robot_pose": [[0.0, -0.65, 0.0, half, 0.0, 0.0, half]],
        "dual_arm": arms == 2,
    }


def write_textures(assets: Path) -> None:
    """Write chequered background textures. RoboTwin numbers them from 0 and counts the files of a folder."""
    tiles = np.indices((128, 128)).sum(0) // 16 % 2 == 1
    for kind, shift in (("seen", 0), ("unseen", 60)):
        folder = assets / "background_texture" / kind
        folder.mkdir(parents=True, exist_ok=True)
        for i in range(4):
            colours = np.array([(120, 100 + shift, 50 * i), (200 - shift, 60 * i, 90)], np.uint8)
            Image.fromarray(colours[tiles.astype(int)]).save(folder / f"{i}.png")


def write_robot(assets: Path, name: str, arms: int, front_camera: bool) -> None:
    """Write one robot's folder."""
    folder = assets / "embodiments" / name
    folder.mkdir(parents=True, exist_ok=True)
    robot, settings = build_robot(arms)
    ET.indent(robot)
    ET.ElementTree(robot).write(folder / "robot.urdf", xml_declaration=True, encoding="utf-8")
    cameras = [_camera("head_camera", (-0.032, -0.45, 1.35), (0, 0.6, -0.8))]
    if front_camera:
        cameras.append(_camera("front_camera", (0.2, -0.45, 0.85), (0, 1, -0.1)))
    settings = {
        "urdf_path": "./robot.urdf",
        "srdf_path": None,
        "joint_stiffness": 1000,
        "joint_damping": 200,
        "gripper_stiffness": 1000,
        "gripper_damping": 200,
        **settings,
        "planner": "mplib_RRT",
        "rotate_lim": [0, 1],
        "grasp_perfect_direction": ["front_right", "front_left"],
        "static_camera_list": cameras,
    }
    (folder / "config.yml").write_text(yaml.safe_dump(settings, sort_keys=False))
    for side in SIDES:  # opened also where mplib plans; only the key `robot_cfg` is looked for
        (folder / f"curobo_{side}_tmp.yml").write_text("robot_cfg: {}\nplanner: {frame_bias: [0, 0, 0]}\n")


def write_assets(folder: Path, front_camera: bool = False) -> None:
    """Write FOLDER/assets. `front_camera`: the robots have one, as RoboTwin's own robot does; it is drawn at every
    observation."""
    assets = folder / "assets"
    (assets / "objects").mkdir(parents=True, exist_ok=True)
    write_textures(assets)
    write_robot(assets, "aloha-agilex", 2, front_camera)
    write_robot(assets, "piper", 1, front_camera)


def _camera(name: str, position: Vector, forward: Vector) -> dict[str, Any]:
    return {"name": name, "type": "D435", "position": list(position), "forward": list(forward), "left": [-1, 0, 0]}


def _text(values: Sequence[float]) -> str:
    return " ".join(f"{value:.6g}" for value in values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--front-camera", action="store_true", help="robots with a front camera")
    arguments = parser.parse_args()
    write_assets(arguments.folder, arguments.front_camera)
    print(arguments.folder / "assets")


if __name__ == "__main__":
    main()

"""Camera poses of LIBERO-Plus's variants, as the authors' `_setup_camera` computes them."""

from __future__ import annotations

from collections.abc import Sequence

import mujoco
import numpy as np
from scipy.spatial.transform import Rotation

from vla_rl.core.types import Array

PIVOT = np.array([0.0, 0.0, 0.8])
"""Point in metres around which the camera moves up and down, and to which its distance is measured."""
XYZW, WXYZ = [1, 2, 3, 0], [3, 0, 1, 2]
"""Indices that reorder quaternions from MuJoCo's order to SciPy's, and back."""


def camera_pose(position: Array, orientation: Array, view: Sequence[int]) -> tuple[Array, Array]:
    """Return position [m] and quaternion (w first) of a moved camera, as MuJoCo's compiler stores them.

    Args:
        position: the camera's own position, float64 [3], in metres.
        orientation: its own quaternion, float64 [4], w first.
        view: horizontal and vertical turn, distance in percent, turn and tilt of the view, as in a variant's name.

    The official code rounds to four digits after every turn, so these roundings are part of the pose; a variant whose
    camera is not moved has a rounded pose, too.
    """
    horizontal, vertical, distance, turn, tilt = view
    place, direction = position, orientation
    if vertical:
        rotation = _about_y(vertical)
        place = _round_values(rotation.apply(place - PIVOT) + PIVOT)
        direction = _turn_orientation(direction, rotation)
    rotation = _about_z(horizontal)
    place, direction = _round_values(rotation.apply(place)), _turn_orientation(direction, rotation)
    if distance != 100:
        place = _round_values(PIVOT + (place - PIVOT) * (distance / 100))
    if turn:
        direction = _turn_orientation(direction, _about_z(turn))
    if tilt:
        direction = _turn_orientation(direction, _about_y(tilt))
    return compiled_pose(place, direction)


def _about_y(degrees: int) -> Rotation:
    return Rotation.from_rotvec(np.radians(-degrees) * np.array([0, 1, 0]))


def _about_z(degrees: int) -> Rotation:
    return Rotation.from_euler("z", degrees, degrees=True)


def _turn_orientation(orientation: Array, rotation: Rotation) -> Array:
    return _round_values((rotation * Rotation.from_quat(orientation[XYZW])).as_quat()[WXYZ])


def _round_values(values: Array) -> Array:
    return np.array([round(value, 4) for value in values.tolist()])


def compiled_pose(position: Array, orientation: Array) -> tuple[Array, Array]:
    """Return a pose as MuJoCo's compiler stores it, which normalises quaternions."""
    place, direction = (" ".join(map(repr, values.tolist())) for values in (position, orientation))
    xml = f'<mujoco><worldbody><camera pos="{place}" quat="{direction}"/></worldbody></mujoco>'
    model = mujoco.MjModel.from_xml_string(xml)
    return model.cam_pos[0].copy(), model.cam_quat[0].copy()

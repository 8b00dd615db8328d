#!/usr/bin/env bash
# The "6D rotation" of two libraries: one stores rows, the other columns, and each reads the other's as the inverse.
#
# An expert would guess: the six numbers are the first two columns of the matrix (Zhou et al. 2019), so an action
#   written with one library and read with another is the same turn; if the order differed, the result would be no
#   rotation.
# Versions: pytorch-kinematics 0.7.6, pytransform3d 3.17.0, SciPy 1.17.1, torch 2.13.0 (CPU), NumPy 2.4.6.
# Behaviour: pytorch-kinematics (its conversions are those of PyTorch3D) writes the first two rows, pytransform3d the
#   first two columns. Both orthonormalise what they read, and two rows are two columns of the transpose, so every
#   input gives a proper rotation: the inverse, exactly. Small turns are off by twice their angle about the right
#   axis.
# What it means: a data set with one convention and a controller with the other run smoothly and turn the gripper the
#   wrong way; at small angles it looks like a gain or a sign of one axis. No norm, determinant or range shows it.
# Output seen:
#   numbers of one turn: rows 0.398, -0.916, 0.056, 0.782, 0.307, -0.542; columns 0.398, 0.782, 0.479, -0.916, 0.307, 0.259
#   each reads its own: error 0.0 and 0.0 degrees; read by the other: a rotation, determinant 1.000, off by 148.5 degrees
#   what the other reads is the inverse: error 0.0 degrees; a turn of 2 degrees is off by 4.0
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
pip=("$work/venv/bin/pip" install -q --no-compile)
{ "${pip[@]}" torch==2.13.0 && "${pip[@]}" pytorch-kinematics==0.7.6 pytransform3d==3.17.0 scipy==1.17.1 numpy==2.4.6; } >"$work/pip.log" 2>&1 ||
  { cat "$work/pip.log"; exit 2; } # torch's CPU build suffices
"$work/venv/bin/python" - <<'PY'
import numpy as np
import torch
from pytorch_kinematics.transforms.rotation_conversions import matrix_to_rotation_6d, rotation_6d_to_matrix
from pytransform3d.rotations import matrix_from_rotation_6d, rotation_6d_from_matrix
from scipy.spatial.transform import Rotation


def degrees(first, second):
    return np.degrees(Rotation.from_matrix(first.T @ second).magnitude())


def rows(matrix):
    return matrix_to_rotation_6d(torch.from_numpy(matrix)).numpy()


def read_rows(numbers):
    return rotation_6d_to_matrix(torch.from_numpy(np.array(numbers))).numpy()


def show(numbers):
    return ", ".join(f"{number:.3f}" for number in numbers)


turn = Rotation.from_euler("xyz", [0.3, -0.5, 1.1]).as_matrix()
print(f"numbers of one turn: rows {show(rows(turn))}; columns {show(rotation_6d_from_matrix(turn))}")
own = degrees(read_rows(rows(turn)), turn), degrees(matrix_from_rotation_6d(rotation_6d_from_matrix(turn)), turn)
crossed = matrix_from_rotation_6d(rows(turn))
determinant, off = np.linalg.det(crossed), degrees(crossed, turn)
print(f"each reads its own: error {own[0]:.1f} and {own[1]:.1f} degrees; read by the other: a rotation, ", end="")
print(f"determinant {determinant:.3f}, off by {off:.1f} degrees")
assert max(own) < 1e-4 and abs(determinant - 1) < 1e-6 and off > 100, "the behaviour changed"
back = read_rows(rotation_6d_from_matrix(turn))
inverse = max(degrees(crossed, turn.T), degrees(back, turn.T))
small = Rotation.from_rotvec(np.radians(2) * np.array([0.6, 0.0, 0.8])).as_matrix()
twice = degrees(matrix_from_rotation_6d(rows(small)), small)
print(f"what the other reads is the inverse: error {inverse:.1f} degrees; a turn of 2 degrees is off by {twice:.1f}")
assert inverse < 1e-4 and abs(twice - 4) < 1e-3, "the behaviour changed"
PY

"""robosuite 1.4's operational space controller (OSC_POSE) for a batch of Panda arms, as one Warp kernel. One world's
formulas are those of `robosuite/controllers/osc.py`, with the settings of LIBERO: gains of 150, critical damping,
position and orientation decoupled, and the redundant joint drawn to the posture after the reset. Khatib 1987."""

# Annotations are not deferred: Warp evaluates them, and they name the types of a precision.

from functools import lru_cache
from typing import Any

import warp as wp

STIFFNESS, POSTURE_STIFFNESS = 150.0, 10.0
"""Gains of the hand's pose and of the posture. Damping is critical: twice the root."""
DAMPING, POSTURE_DAMPING = 2 * STIFFNESS**0.5, 2 * POSTURE_STIFFNESS**0.5
REACH = (0.05, 0.5)
"""Displacement of the hand's goal for an action of 1: metres, radians."""
GRIPPER_SPEED = 0.01
"""Change of the gripper's command in a sub-step."""


@lru_cache
def make_controller(real: Any) -> Any:  # noqa: C901 - kernels call nothing outside
    """Return the kernel that computes a sub-step's controls, one thread a world, in float32 or float64. Arms whose
    matrices are singular get numbers that are not finite; others are unaffected."""
    vec3: Any = wp.types.vector(3, real)
    vec6: Any = wp.types.vector(6, real)
    vec7: Any = wp.types.vector(7, real)
    mat33: Any = wp.types.matrix((3, 3), real)
    mat67: Any = wp.types.matrix((6, 7), real)
    mat77: Any = wp.types.matrix((7, 7), real)

    @wp.func
    def factorize(matrix: mat77, first: int, size: int) -> mat77:
        """Cholesky's lower triangle of a block on the diagonal. Warp inverts at most 4x4."""
        lower = mat77()
        for i in range(first, first + size):
            for j in range(first, i + 1):
                rest = matrix[i, j]
                for k in range(first, j):
                    rest -= lower[i, k] * lower[j, k]
                if i == j:
                    lower[i, j] = wp.sqrt(rest)
                else:
                    lower[i, j] = rest / lower[j, j]
        return lower

    @wp.func
    def solve(lower: mat77, first: int, size: int, values: vec7) -> vec7:
        solution = vec7()
        for i in range(first, first + size):
            rest = values[i]
            for k in range(first, i):
                rest -= lower[i, k] * solution[k]
            solution[i] = rest / lower[i, i]
        for back in range(size):
            i = first + size - 1 - back
            rest = solution[i]
            for k in range(i + 1, first + size):
                rest -= lower[k, i] * solution[k]
            solution[i] = rest / lower[i, i]
        return solution

    @wp.func
    def rotate(turn: vec3) -> mat33:
        """Matrix of a rotation vector (Rodrigues). robosuite rounds its own to 32 bits: they differ by about 1e-7."""
        angle = wp.max(wp.length(turn), real(1.0e-30))
        axis = turn / angle
        cross = wp.skew(axis)
        return wp.identity(3, dtype=real) + wp.sin(angle) * cross + (real(1.0) - wp.cos(angle)) * (cross @ cross)

    @wp.kernel(module="unique", enable_backward=False)
    def control(  # noqa: C901 - one thread of formulas
        first: bool,
        hand_site: int,
        root: int,
        joints: wp.array2d[int],
        masses_at: wp.array2d[int],
        limits: wp.array2d[real],
        fingers: wp.array[int],
        finger_range: wp.array2d[real],
        actions: wp.array2d[real],
        cdof: wp.array2d[vec6],
        subtree_com: wp.array2d[vec3],
        masses: wp.array2d[real],
        bias: wp.array2d[real],
        qpos: wp.array2d[real],
        qvel: wp.array2d[real],
        site_xpos: wp.array2d[vec3],
        site_xmat: wp.array2d[mat33],
        goal_hand: wp.array[vec3],
        goal_rotation: wp.array[mat33],
        posture: wp.array2d[real],
        grip: wp.array[real],
        ctrl: wp.array2d[real],
    ) -> None:
        world = wp.tid()
        hand = site_xpos[world, hand_site]
        rotation = site_xmat[world, hand_site]
        if first:  # an action without rotation leaves the goal of the orientation
            step = vec3()
            turn = vec3()
            for i in range(3):
                step[i] = real(wp.static(REACH[0])) * wp.clamp(actions[world, i], real(-1.0), real(1.0))
                turn[i] = real(wp.static(REACH[1])) * wp.clamp(actions[world, 3 + i], real(-1.0), real(1.0))
            goal_hand[world] = hand + step
            if wp.length_sq(turn) > real(0.0):
                goal_rotation[world] = rotate(turn) @ rotation
        if actions[world, 6] != real(0.0):
            speed = real(wp.static(GRIPPER_SPEED)) * wp.sign(actions[world, 6])
            grip[world] = wp.clamp(grip[world] + speed, real(-1.0), real(1.0))

        inertia = mat77()
        jacobian = mat67()
        velocities = vec7()
        relax = vec7()
        for i in range(7):
            joint = joints[1, i]
            for j in range(7):
                inertia[i, j] = masses[world, masses_at[i, j]]
            axis = cdof[world, joint]  # rotation before translation, about the tree's centre of mass
            turning = vec3(axis[0], axis[1], axis[2])
            moving = vec3(axis[3], axis[4], axis[5]) + wp.cross(turning, hand - subtree_com[world, root])
            for k in range(3):
                jacobian[k, i] = moving[k]
                jacobian[3 + k, i] = turning[k]
            velocities[i] = qvel[world, joint]
            away = posture[world, i] - qpos[world, joints[0, i]]
            relax[i] = real(wp.static(POSTURE_STIFFNESS)) * away - real(wp.static(POSTURE_DAMPING)) * velocities[i]
        drawn = inertia @ relax
        lower = factorize(inertia, 0, 7)
        spread = mat67()  # J M^-1
        for i in range(6):
            spread[i] = solve(lower, 0, 7, jacobian[i])

        offset = goal_hand[world] - hand
        turned = vec3()
        desired = wp.transpose(goal_rotation[world])
        current = wp.transpose(rotation)
        for i in range(3):  # half the sum of the cross products of the axes
            turned += real(0.5) * wp.cross(current[i], desired[i])
        velocity = jacobian @ velocities
        null = spread @ drawn
        coupling = mat77()
        force = vec7()
        coupled = vec7()
        for i in range(6):
            for j in range(6):
                coupling[i, j] = wp.dot(jacobian[i], spread[j])
            force[i] = -real(wp.static(DAMPING)) * velocity[i]
            coupled[i] = null[i]
        for i in range(3):
            force[i] += real(wp.static(STIFFNESS)) * offset[i]
            force[3 + i] += real(wp.static(STIFFNESS)) * turned[i]
        wrench = solve(factorize(coupling, 0, 3), 0, 3, force) + solve(factorize(coupling, 3, 3), 3, 3, force)
        wrench -= solve(factorize(coupling, 0, 6), 0, 6, coupled)  # the transposed projection into the null space
        for i in range(7):
            torque = drawn[i] + bias[world, joints[1, i]]
            for k in range(6):
                torque += jacobian[k, i] * wrench[k]
            if not wp.isnan(torque):  # which `clamp` would hide
                torque = wp.clamp(torque, limits[0, i], limits[1, i])
            ctrl[world, joints[2, i]] = torque
        for i in range(2):
            ctrl[world, fingers[i]] = finger_range[0, i] + finger_range[1, i] * grip[world]

    return control

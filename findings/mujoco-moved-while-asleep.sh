#!/usr/bin/env bash
# MuJoCo with sleeping: an object that is placed elsewhere while it sleeps stays there in the air.
#
# An expert would guess: <flag sleep="enable"/> leaves out bodies that rest; whatever changes them or what they rest
#   on wakes them, so setting qpos, restoring a saved state or taking the support away gives the same motion as
#   without the flag, later by a step.
# Versions: MuJoCo 4.0.0 (mujoco and mujoco-core), NumPy 2.4.6.
# Behaviour: velocities and forces that are set wake a body, and so does a support that pushes. Positions do not: qpos
#   of a sleeping body may be set, mj_forward is called, the picture shows the box at its new place, and there it
#   stays, at rest, for as long as one likes. The same with mj_setState: it sets the numbers of a state that was taken
#   awake and in the air, and the body sleeps on in mid-air. A support that is lowered, or jumps aside, leaves the box
#   behind hanging. mj_resetData before it wakes all.
# What it means: a reset that only places the objects (to save time), a group of episodes started from one state, and
#   a lift that goes down depend on whether the object was asleep before, so the same seed gives different episodes. A
#   box that hovers at the height at which it was put counts as "lifted". Add a velocity, or reset the data first.
# Output seen (height of the box's centre before, and 2 s after the change):
#   place higher:                without sleeping 0.77, 0.27; with it 0.77, 0.77
#   restore a state in the air:  without sleeping 0.77, 0.27; with it 0.77, 0.77
#   move the table aside:        without sleeping 0.27, 0.05; with it 0.27, 0.27
#   place higher with velocity:  without sleeping 0.77, 0.27; with it 0.77, 0.27
#   reset and place higher:      without sleeping 0.77, 0.27; with it 0.77, 0.27
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export TMPDIR=$work
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile --no-deps mujoco==4.0.0 mujoco-core==4.0.0 numpy==2.4.6 >"$work/pip.log" 2>&1 ||
  { cat "$work/pip.log"; exit 2; }
"$work/venv/bin/python" - <<'PY'
import mujoco
import numpy as np

XML = """<mujoco><option><flag sleep="{sleep}"/></option><worldbody>
<geom type="plane" size="2 2 .1"/>
<body name="table" mocap="true" pos="0 0 .2"><geom type="box" size=".3 .3 .02"/></body>
<body pos="0 0 .27"><freejoint/><geom type="box" size=".05 .05 .05" mass="1"/></body>
</worldbody></mujoco>"""
STATE = mujoco.mjtState.mjSTATE_INTEGRATION


def place_higher(model, data):
    data.qpos[2] += 0.5
    mujoco.mj_forward(model, data)


def place_higher_with_velocity(model, data):
    data.qvel[0] = 1e-3
    place_higher(model, data)


def restore_a_state_in_the_air(model, data):
    other, state = mujoco.MjData(model), np.empty(mujoco.mj_stateSize(model, STATE))
    other.qpos[2] = 0.77
    mujoco.mj_forward(model, other)
    mujoco.mj_getState(model, other, state, STATE)
    mujoco.mj_setState(model, data, state, STATE)


def reset_and_place_higher(model, data):
    mujoco.mj_resetData(model, data)
    data.qpos[2] = 0.77


def move_the_table_aside(model, data):
    data.mocap_pos[0, 0] = 1


def simulate(change, sleep):
    model = mujoco.MjModel.from_xml_string(XML.format(sleep=sleep))
    data = mujoco.MjData(model)
    mujoco.mj_step(model, data, nstep=3000)
    change(model, data)
    before = data.qpos[2]
    mujoco.mj_step(model, data, nstep=1000)
    return round(float(before), 2), round(float(data.qpos[2]), 2)


expected = {
    place_higher: 0.77,
    restore_a_state_in_the_air: 0.77,
    move_the_table_aside: 0.27,
    place_higher_with_velocity: None,
    reset_and_place_higher: None,
}
for change, hovering in expected.items():
    awake, asleep = simulate(change, "disable"), simulate(change, "enable")
    name = change.__name__.replace("_", " ") + ":"
    print(f"{name:28s} without sleeping {awake[0]:.2f}, {awake[1]:.2f}; with it {asleep[0]:.2f}, {asleep[1]:.2f}")
    assert asleep[1] == (awake[1] if hovering is None else hovering), "the behaviour changed"
    assert hovering is None or awake[1] < hovering - 0.1, "the behaviour changed"
PY

#!/usr/bin/env bash
# MuJoCo: a geom that is made larger in the model at run time has no contacts until the floor is deep inside it.
#
# An expert would guess: model.geom_size is what the collision functions read, so domain randomisation may scale an
#   object there (visibly right in every rendered frame); mj_setConst is needed for derived quantities of mass only.
# Versions: MuJoCo 3.3.0, NumPy 2.4.6.
# Behaviour: whether a pair is looked at is decided by geom_rbound, the radius of the bounding sphere, which the
#   compiler computed from the old size; neither mj_setConst nor mj_forward renews it. A cube of half-width 0.05 that
#   is scaled by 1.5 still lies well, because a sphere around the old cube is large enough (1.73 half-widths); scaled
#   by 2 it sinks into the floor until the old sphere touches, and is pushed and let go in turn: most steps have no
#   contact. Setting geom_rbound (and geom_aabb) too, or changing the size in an MjSpec and compiling, gives the right
#   height.
# What it means: randomised sizes work in small ranges and fail in larger ones without an error: objects stand in the
#   table, grippers close through them, and the policy learns from it.
# Output seen (height of the cube's centre over its half-width after 4 s on a plane; steps of the last second with contact):
#   scale 1.0: size only 0.998 (500 of 500), mj_setConst too 0.998 (500), bounding sphere too 0.998 (500)
#   scale 1.5: size only 0.999 (500 of 500), mj_setConst too 0.999 (500), bounding sphere too 0.999 (500)
#   scale 2.0: size only 0.868 (103 of 500), mj_setConst too 0.868 (103), bounding sphere too 0.999 (500)
#   scale 5.0: size only 0.568 (11 of 500), mj_setConst too 0.568 (11), bounding sphere too 1.000 (500)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile mujoco==3.3.0 numpy==2.4.6 >"$work/pip.log" 2>&1 ||
  { cat "$work/pip.log"; exit 2; }
"$work/venv/bin/python" - <<'PY'
import mujoco

XML = """<mujoco><worldbody><geom type="plane" size="2 2 .1"/>
<body pos="0 0 .6"><freejoint/><geom type="box" size=".05 .05 .05" mass=".2"/></body></worldbody></mujoco>"""


def drop(scale, constants=False, sphere=False):
    model = mujoco.MjModel.from_xml_string(XML)
    data = mujoco.MjData(model)
    model.geom_size[1] *= scale
    if sphere:
        model.geom_rbound[1] *= scale
        model.geom_aabb[1] *= scale
    if constants:
        mujoco.mj_setConst(model, data)
    heights, touched = [], 0
    for number in range(2000):
        mujoco.mj_step(model, data)
        if number >= 1500:
            heights.append(data.qpos[2])
            touched += data.ncon > 0
    return sum(heights) / len(heights) / (0.05 * scale), touched


for scale in (1.0, 1.5, 2.0, 5.0):
    (plain, steps), (constant, constant_steps), (right, right_steps) = (
        drop(scale), drop(scale, constants=True), drop(scale, sphere=True)
    )
    print(
        f"scale {scale}: size only {plain:.3f} ({steps} of 500), mj_setConst too {constant:.3f} ({constant_steps}), "
        f"bounding sphere too {right:.3f} ({right_steps})"
    )
    assert abs(right - 1) < 0.01 and right_steps == 500, "the behaviour changed"
    assert abs(plain - constant) < 1e-9, "the behaviour changed"
    assert (plain < 0.95 and steps < 250) if scale >= 2 else (abs(plain - 1) < 0.01 and steps == 500), "the behaviour changed"
PY

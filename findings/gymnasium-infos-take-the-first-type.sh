#!/usr/bin/env bash
# gymnasium: numbers in the infos of a vector environment are cut to the type that the first environment gave.
#
# An expert would guess: `infos["lifted"]` of a vector environment holds what each environment put into its info, as
#   floats if any of them is one (as np.array or np.stack would), whatever the order of the environments.
# Versions: gymnasium 1.4.0, NumPy 2.4.6.
# Behaviour: the array for a key is made anew in each step, with the Python type of the first environment that has the
#   key; values of the others are then assigned into it, and NumPy casts them silently. A metric like
#   max(0, height - table) is the integer 0 where it is clipped and a float elsewhere. While environment 0 is clipped,
#   every other environment's 0.71 arrives as 0; where an environment that is not clipped comes first, all are right.
#   With False first, 0.71 is True; an integer array first cuts float arrays. Asynchronous environments and
#   DictInfoToList, which gives the infos back one by one, do the same, and the type changes from step to step.
# What it means: averages of reward terms and progress over environments are too small by an amount that depends on
#   one environment's episodes. Observations and rewards are right, so training works and its curves do not. Write
#   max(0.0, x), or float(...) around every number in an info.
# Output seen:
#   the environments say                lifted 0, 0.71, 0.64, 0.83: mean 0.545
#   SyncVectorEnv, clipped one first    lifted 0, 0, 0, 0: mean 0.000 (int64)
#   AsyncVectorEnv, clipped one first   lifted 0, 0, 0, 0: mean 0.000 (int64)
#   DictInfoToList, clipped one first   lifted 0, 0, 0, 0: mean 0.000
#   SyncVectorEnv, clipped one last     lifted 0.71, 0.64, 0.83, 0.0: mean 0.545 (float64)
#   first False, then 0.71: True; first [0 0], then [0.71 0.64]: [0, 0]
#   2,000 steps of 4 random walks: mean 0.113, reported 0.067; reported by steps where the first is clipped 0.000
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile gymnasium==1.4.0 numpy==2.4.6 >"$work/pip.log" 2>&1 ||
  { cat "$work/pip.log"; exit 2; }
"$work/venv/bin/python" - <<'PY'
import functools

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from gymnasium.wrappers.vector import DictInfoToList

TABLE = 0.1


class Lift(gymnasium.Env):
    """An object at a height that is given, or that moves at random; the info says how far above the table it is."""

    observation_space = gymnasium.spaces.Box(-10, 10, (1,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, height, moves=False, info=None):
        self.height, self.moves, self.info = height, moves, info

    def observe(self):
        info = {"lifted": max(0, round(self.height - TABLE, 6))} if self.info is None else self.info
        return np.array([self.height]), info

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observe()

    def step(self, action):
        if self.moves:
            self.height = float(np.clip(self.height + self.np_random.normal(0, 0.05), -0.4, 0.6))
        observation, info = self.observe()
        return observation, 0.0, False, False, info


def build(heights, kind=SyncVectorEnv, **arguments):
    return kind([functools.partial(Lift, height) for height in heights], **arguments)


def step(vector):
    vector.reset(seed=0)
    observations, *_, infos = vector.step(np.zeros(vector.num_envs, int))
    vector.close()
    return observations, infos


def show(name, values, kind=""):
    print(f"{name:35s} lifted {', '.join(str(value) for value in values)}: mean {np.mean(values):.3f}{kind}")


first, last = [0.05, 0.81, 0.74, 0.93], [0.81, 0.74, 0.93, 0.05]
true = [Lift(height).reset()[1]["lifted"] for height in first]
show("the environments say", true)
assert true == [0, 0.71, 0.64, 0.83]
for name, vector, expected in (
    ("SyncVectorEnv, clipped one first", build(first), [0, 0, 0, 0]),
    ("AsyncVectorEnv, clipped one first", build(first, AsyncVectorEnv, context="fork"), [0, 0, 0, 0]),
    ("DictInfoToList, clipped one first", DictInfoToList(build(first)), [0, 0, 0, 0]),
    ("SyncVectorEnv, clipped one last", build(last), [0.71, 0.64, 0.83, 0]),
):
    observations, infos = step(vector)
    if isinstance(infos, dict):
        lifted = infos["lifted"].tolist()
        show(name, lifted, f" ({infos['lifted'].dtype})")
    else:
        lifted = [info["lifted"] for info in infos]
        show(name, lifted)
    assert lifted == expected, "the behaviour changed"
    assert observations[:, 0].tolist() == (last if "last" in name else first)

pairs = {}
for name, values in (("flag", (False, 0.71)), ("array", (np.array([0, 0]), np.array([0.71, 0.64])))):
    _, infos = step(SyncVectorEnv([functools.partial(Lift, 0.0, info={"value": value}) for value in values]))
    pairs[name] = infos["value"][1].tolist()
print(f"first False, then 0.71: {pairs['flag']}; first [0 0], then [0.71 0.64]: {pairs['array']}")
assert pairs == {"flag": True, "array": [0, 0]} and pairs["flag"] is True, "the behaviour changed"

vector = SyncVectorEnv([functools.partial(Lift, TABLE, moves=True)] * 4)
vector.reset(seed=0)
true, reported, clipped = [], [], []
for _ in range(2000):
    observations, *_, infos = vector.step(np.zeros(4, int))
    true.append(np.maximum(0, observations[:, 0] - TABLE).mean())
    reported.append(infos["lifted"].mean())
    clipped.append(observations[0, 0] <= TABLE)
hidden = np.mean(np.array(reported)[clipped])
print(f"2,000 steps of 4 random walks: mean {np.mean(true):.3f}, reported {np.mean(reported):.3f}; ", end="")
print(f"reported by steps where the first is clipped {hidden:.3f}")
assert hidden == 0 and np.mean(reported) < 0.8 * np.mean(true), "the behaviour changed"
PY

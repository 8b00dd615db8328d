#!/usr/bin/env bash
# gymnasium, SAME_STEP: final_obs is the first observation of the next episode if an environment reuses its array.
#
# An expert would guess: vector environments copy observations (copy=True), so it does not matter that an environment
#   fills one array again and again; and final_obs is the last observation of the episode that ended.
# Versions: gymnasium 1.4.0, NumPy 2.4.6.
# Behaviour: the copy is made of the batch. In SAME_STEP mode the last observation is put into the infos as the object
#   that the environment returned, and then the environment is reset, which writes into the same object. It does not
#   help that AsyncVectorEnv has a process between. NEXT_STEP, where the last observation is in the batch, is right,
#   as are a single environment and one that returns a new array each time.
# What it means: values at a time limit are bootstrapped from the start of the next episode, in the one mode whose
#   purpose is to hand the last observation over. Episodes, rewards and batches are right; the value function is flat
#   near the end. return obs.copy() in step and reset cures it.
# Output seen (observation = number of steps; the episode ends after 3):
#   SAME_STEP, SyncVectorEnv:  last observation 0 reused, 3 new array
#   SAME_STEP, AsyncVectorEnv: last observation 0 reused, 3 new array
#   NEXT_STEP, SyncVectorEnv:  last observation 3 reused, 3 new array
#   NEXT_STEP, AsyncVectorEnv: last observation 3 reused, 3 new array
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export TMPDIR=$work
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile gymnasium==1.4.0 numpy==2.4.6 >"$work/pip.log" 2>&1 ||
  { cat "$work/pip.log"; exit 2; }
cat >"$work/finding.py" <<'PY'
import functools

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv


class Counter(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 100, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, reuses):
        self.reuses, self.array, self.count = reuses, np.zeros(2, np.float32), 0

    def observe(self):
        self.array[:] = self.count
        return self.array if self.reuses else self.array.copy()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self.observe(), {}

    def step(self, action):
        self.count += 1
        return self.observe(), 1.0, False, self.count == 3, {}


if __name__ == "__main__":
    for mode in (AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP):
        for kind in (SyncVectorEnv, AsyncVectorEnv):
            seen = []
            for reuses in (True, False):
                envs = kind([functools.partial(Counter, reuses)] * 2, autoreset_mode=mode)
                envs.reset(seed=0)
                for _ in range(3):
                    batch, _, _, ended, infos = envs.step(np.zeros(2, int))
                assert ended.all()
                last = infos["final_obs"] if mode is AutoresetMode.SAME_STEP else batch
                seen.append(float(last[0][0]))
                envs.close()
            print(f"{mode.name}, {kind.__name__ + ':':15s} last observation {seen[0]:g} reused, {seen[1]:g} new array")
            assert seen == [0.0 if mode is AutoresetMode.SAME_STEP else 3.0, 3.0], "the behaviour changed"
PY
"$work/venv/bin/python" "$work/finding.py"

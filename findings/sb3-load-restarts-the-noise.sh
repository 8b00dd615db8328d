#!/usr/bin/env bash
# stable-baselines3: loading any saved policy restarts the random numbers of the training that is running.
#
# An expert would guess: PPO.load reads a zip file into a new object. Loading an opponent or an earlier policy from a
#   callback, to play against it or to compare, leaves the run that loads alone; a resumed run explores with new noise.
# Versions: stable-baselines3 2.9.2, gymnasium 1.4.0, torch 2.13.0 (CPU), NumPy 2.4.6.
# Behaviour: the file holds the seed that the saved model was made with, and load() builds the model by the same code
#   as the constructor, which seeds the global generators of Python, NumPy and torch. All exploration noise comes from
#   torch's, so after each load the running policy draws the same noise again; a run with another seed draws that of
#   the file's. load(path, seed=None) does not. A run that is resumed by load(path, env=env) also seeds the
#   environment anew: it meets the same initial states with the same noise as the run did from its first step on.
#   Models that were made without a seed are not concerned.
# What it means: self-play that loads an opponent at each reset explores alike in every episode, runs with different
#   seeds that load the same file are not independent, and a run that is resumed ten times sees the same few starts
#   ten times. Nothing is printed, and rewards look ordinary.
# Output seen (noise of the actions, in standard deviations; a load after every 50th of 150 steps):
#   run with seed 0, no load:             +0.456 -1.304 | +0.904 +0.351 | -0.562 +0.459  blocks of 50 equal: 0 of 2
#   run with seed 0, load:                +0.456 -1.304 | +0.456 -1.304 | +0.456 -1.304  blocks of 50 equal: 2 of 2
#   run with seed 1, load (file: seed 0): -1.206 +0.729 | +0.456 -1.304 | +0.456 -1.304  blocks of 50 equal: 1 of 2
#   run with seed 0, load with seed=None: +0.456 -1.304 | +1.323 +0.426 | +0.903 -0.006  blocks of 50 equal: 0 of 2
#   resumed after 400 steps: noise of the next 400 equals that of the first 400: True; initial states too: True
#   run through instead:     noise of the next 400 equals that of the first 400: False; initial states too: False
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export TMPDIR=$work
python3 -m venv "$work/venv"
pip=("$work/venv/bin/pip" install -q --no-compile)
{ "${pip[@]}" torch==2.13.0 && "${pip[@]}" stable-baselines3==2.9.2 gymnasium==1.4.0 numpy==2.4.6; } >"$work/pip.log" 2>&1 ||
  { cat "$work/pip.log"; exit 2; } # torch's CPU build suffices
WORK=$work "$work/venv/bin/python" - <<'PY'
import os

import gymnasium
import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback

torch.set_num_threads(1)
OPPONENT, RUN = os.path.join(os.environ["WORK"], "opponent"), os.path.join(os.environ["WORK"], "run")


class Watch(BaseCallback):
    """Record the noise of each action and the state that it was drawn in; load a policy now and then."""

    def __init__(self, load=None):
        super().__init__()
        self.load, self.noise, self.states = load, [], []

    def _on_step(self):
        policy = self.model.policy
        normal = policy.get_distribution(policy.obs_to_tensor(self.model._last_obs)[0]).distribution
        action = torch.as_tensor(self.locals["actions"])
        self.noise.append(((action - normal.mean) / normal.stddev).item())
        self.states.append(self.model._last_obs[0])
        if self.load is not None and self.n_calls % 50 == 0:
            PPO.load(OPPONENT, **self.load)
        return True


def start(seed):
    return PPO("MlpPolicy", "Pendulum-v1", n_steps=200, batch_size=50, seed=seed, device="cpu")


start(0).save(OPPONENT)
for name, seed, load, expected in (
    ("seed 0, no load:", 0, None, 0),
    ("seed 0, load:", 0, {}, 2),
    ("seed 1, load (file: seed 0):", 1, {}, 1),
    ("seed 0, load with seed=None:", 0, {"seed": None}, 0),
):
    watch = Watch(load)
    start(seed).learn(150, callback=watch)
    blocks = np.reshape(watch.noise[:150], (3, 50))
    equal = sum(np.allclose(blocks[i], blocks[i + 1], atol=1e-5) for i in range(2))
    shown = " | ".join(" ".join(f"{value:+.3f}" for value in block[:2]) for block in blocks)
    print(f"run with {name:28s} {shown}  blocks of 50 equal: {equal} of 2")
    assert equal == expected, "the behaviour changed"

for resume in (True, False):
    model, first, second = start(0), Watch(), Watch()
    model.learn(400, callback=first)
    if resume:
        model.save(RUN)
        model = PPO.load(RUN, env=gymnasium.make("Pendulum-v1"), device="cpu")
    model.learn(400, callback=second, reset_num_timesteps=False)
    noise = len(first.noise) == len(second.noise) and np.allclose(first.noise, second.noise, atol=1e-5)
    starts = np.allclose([first.states[i] for i in (0, 200)], [second.states[i] for i in (0, 200)])
    name = "resumed after 400 steps:" if resume else "run through instead:"
    print(f"{name:24s} noise of the next 400 equals that of the first 400: {noise}; initial states too: {starts}")
    assert noise == starts == resume, "the behaviour changed"
PY

#!/usr/bin/env bash
# diffusers' DDIM: one denoising step more makes actions much worse: 50 of 100 steps begin at t = 98, 51 at t = 50.
#
# An expert would guess: set_timesteps(n) spreads n steps over the whole schedule for any n, so more steps come closer
#   to the distribution that was learned, and each step() leads to the level at which the next one begins.
# Versions: diffusers 0.42.1, torch 2.13.0 (CPU), NumPy 2.4.6.
# Behaviour: the stride is the integer T // n. With the default spacing "leading", 51 steps of 100 get a stride of 1
#   and cover t = 50 ... 0: pure noise is handed over as if it were already a half-denoised action. 34 steps begin at
#   66, 15 at 84. With spacing "trailing" the list does begin at the top and strides by T / n, but step() still goes
#   down by T // n: at 51 steps each removes the noise of one level, and the next takes it for two. The network is
#   exact here (the best denoiser of a normal distribution in closed form), so all errors are the sampler's. Where n
#   divides T, what is left is the coarseness of few steps. DDPMScheduler has the same "leading" list and hides most of
#   it, since it adds noise.
# What it means: a sweep over the number of steps has cliffs (33 to 34, 50 to 51) that look like properties of the
#   policy; the first try "more steps, to be safe" shifts actions towards 0 and widens them. Use divisors of T.
# Output seen (20,000 samples of an action that is 0.6 with a standard deviation of 0.1; "far": beyond 0.3 from 0.6,
# which should be 0.003; T = 100):
#   steps   leading: first t, mean, deviation, far    trailing: first t, mean, deviation, far
#      10    90  0.594  0.064  0.000                   99  0.599  0.049  0.000
#      25    96  0.597  0.082  0.001                   99  0.599  0.075  0.000
#      33    96  0.597  0.085  0.001                   99  0.598  0.082  0.001
#      34    66  0.569  0.102  0.004                   99  0.550  0.197  0.143
#      50    98  0.598  0.089  0.001                   99  0.599  0.087  0.001
#      51    50  0.545  0.128  0.030                   99  0.487  0.295  0.351
#      60    59  0.559  0.115  0.013                   99  0.524  0.241  0.242
#     100    99  0.599  0.093  0.001                   99  0.599  0.093  0.001
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export TMPDIR=$work
python3 -m venv "$work/venv"
pip=("$work/venv/bin/pip" install -q --no-compile)
{ "${pip[@]}" torch==2.13.0 && "${pip[@]}" diffusers==0.42.1 numpy==2.4.6; } >"$work/pip.log" 2>&1 ||
  { cat "$work/pip.log"; exit 2; } # torch's CPU build suffices
"$work/venv/bin/python" - <<'PY'
import torch
from diffusers import DDIMScheduler

MEAN, DEVIATION, LEVELS = 0.6, 0.1, 100
noise = torch.randn(20_000, 1, generator=torch.Generator().manual_seed(0))


def predict_noise(sample, signal):
    """Return the expected noise in a sample of which the part `signal` (alpha bar) of the variance is action."""
    variance = signal * DEVIATION**2 + 1 - signal
    return (1 - signal).sqrt() * (sample - signal.sqrt() * MEAN) / variance


def draw(steps, spacing):
    scheduler = DDIMScheduler(LEVELS, beta_schedule="squaredcos_cap_v2", timestep_spacing=spacing)
    scheduler.set_timesteps(steps)
    assert len(scheduler.timesteps) == steps
    sample = noise
    for timestep in scheduler.timesteps:
        predicted = predict_noise(sample, scheduler.alphas_cumprod[timestep])
        sample = scheduler.step(predicted, timestep, sample).prev_sample
    far = ((sample - MEAN).abs() > 3 * DEVIATION).float().mean().item()
    return scheduler.timesteps[0].item(), sample.mean().item(), sample.std().item(), far


print("steps   leading: first t, mean, deviation, far    trailing: first t, mean, deviation, far")
seen = {}
for steps in (10, 25, 33, 34, 50, 51, 60, 100):
    rows = [draw(steps, spacing) for spacing in ("leading", "trailing")]
    seen[steps] = rows
    shown = [f"{first:3d}  {mean:.3f}  {deviation:.3f}  {far:.3f}" for first, mean, deviation, far in rows]
    print(f"{steps:5d}   {shown[0]:38s}    {shown[1]}")
for steps in (25, 50, 100):
    for _, mean, deviation, far in seen[steps]:
        assert abs(mean - MEAN) < 0.006 and deviation < 0.1 and far < 0.005, "the behaviour changed"
assert [seen[steps][0][0] for steps in (33, 34, 50, 51)] == [96, 66, 98, 50], "the behaviour changed"
assert all(rows[1][0] == LEVELS - 1 for rows in seen.values()), "the behaviour changed"
assert seen[51][0][1] < 0.56 and seen[51][0][3] > 0.01, "the behaviour changed"
assert seen[51][1][1] < 0.52 and seen[51][1][2] > 0.2 and seen[34][1][2] > 0.15, "the behaviour changed"
PY

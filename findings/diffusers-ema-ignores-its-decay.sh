#!/usr/bin/env bash
# diffusers: EMAModel with a decay of 0.999 and with one of 0.9999 gives the same weights for the first 9,000 steps.
#
# An expert would guess: EMAModel(decay=0.9999) is the plain moving average; use_ema_warmup is False by default, so
#   there is no warm-up, and after 5,000 steps the average still holds 61 % of the initial weights.
# Versions: diffusers 0.42.1, torch 2.13.0 (CPU), NumPy 2.4.6.
# Behaviour: the decay of step n is the smaller of `decay` and (1 + n) / (10 + n), also without use_ema_warmup, which
#   only exchanges this ramp for another. `decay` begins to count at step 8,990 for 0.999, 89,990 for 0.9999 and
#   900,000 for 0.99999. Until then the average looks back over the last tenth of the run, whatever it was set to.
#   min_decay is a floor of the ramp, so min_decay=decay gives the plain average.
# What it means: a sweep over the decay of a diffusion policy that is trained for 8,000 steps compares one setting
#   with itself, and a decay that was copied from a run of 10^6 steps works by accident. A reimplementation with the
#   stated formula gives other weights: mostly the initial ones.
# Output seen (a weight that goes from 0 to 1 at a constant rate; the average at the end of n steps):
#   1,000 steps: 0.99 gives 0.904 (formula 0.901), 0.999 gives 0.900 (formula 0.368), 0.9999 gives 0.900 (formula 0.048)
#   5,000 steps: 0.99 gives 0.980 (formula 0.980), 0.999 gives 0.900 (formula 0.802), 0.9999 gives 0.900 (formula 0.213)
#   1,000 steps, 0.9999 with min_decay=0.9999: 0.049; with use_ema_warmup: 0.907
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
from diffusers.training_utils import EMAModel

torch.set_num_threads(1)


def average(decay, steps, **options):
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    ema = EMAModel([weight], decay=decay, **options)
    for step in range(steps):
        weight.data.fill_((step + 1) / steps)
        ema.step([weight])
    return ema.shadow_params[0].item()


def formula(decay, steps):
    value = 0.0
    for step in range(steps):
        value = decay * value + (1 - decay) * (step + 1) / steps
    return value


decays = (0.99, 0.999, 0.9999)
seen = {}
for steps in (1000, 5000):
    seen[steps] = [average(decay, steps) for decay in decays], [formula(decay, steps) for decay in decays]
    print(
        f"{steps:,d} steps: "
        + ", ".join(f"{d} gives {a:.3f} (formula {f:.3f})" for d, a, f in zip(decays, *seen[steps], strict=True))
    )
plain = average(0.9999, 1000, min_decay=0.9999)
warm = average(0.9999, 1000, use_ema_warmup=True)
print(f"1,000 steps, 0.9999 with min_decay=0.9999: {plain:.3f}; with use_ema_warmup: {warm:.3f}")
for values, formulas in seen.values():
    assert values[1] == values[2], "the behaviour changed"
    assert abs(values[1] - 0.9) < 0.01 and formulas[2] < 0.3, "the behaviour changed"
assert abs(plain - seen[1000][1][2]) < 0.001, "the behaviour changed"
PY

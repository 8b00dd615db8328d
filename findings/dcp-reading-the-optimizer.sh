#!/usr/bin/env bash
# torch.distributed.checkpoint: reading a fresh optimizer's state makes its first real step smaller by a quarter.
#
# An expert would guess: get_optimizer_state_dict only reads. Saving a checkpoint before the first update, or reading
#   the state to learn its layout before loading, leaves training as it is, to the bit.
# Versions: torch 2.13.0 (CPU), NumPy 2.4.6.
# Behaviour: of an optimizer without state it first makes one, by a step with gradients of zero at a learning rate of
#   0. The weights stay, but Adam's counter is then 1 and the first real step counts as the second: the averages hold
#   one gradient and are corrected as if they held two, so the step is 0.744 of the learning rate where Adam's first
#   step is 1.000 of it, and the next ones are smaller too. The counter stays one ahead for the rest of the run.
# What it means: two runs that differ in whether a step-0 checkpoint was written are different runs. A comparison of
#   "with" and "without checkpoints" to the bit fails at the first update, and nothing points to the reading.
# Output seen:
#   state not read: counter 0, weights move by 1.000, 1.000, 1.000 learning rates
#   state read:     counter 1, weights move by 0.744, 0.858, 0.910 learning rates
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export TMPDIR=$work
python3 -m venv "$work/venv"
pip=("$work/venv/bin/pip" install -q --no-compile)
{ "${pip[@]}" torch==2.13.0 && "${pip[@]}" numpy==2.4.6; } >"$work/pip.log" 2>&1 ||
  { cat "$work/pip.log"; exit 2; } # torch's CPU build suffices
"$work/venv/bin/python" - <<'PY'
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

RATE = 0.01


def first_steps(read):
    """Return the counter before training and how far a weight moves in three steps of a constant gradient."""
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    if read:
        before = model.weight.item()
        get_optimizer_state_dict(model, optimizer)
        assert model.weight.item() == before
    counter = int(optimizer.state[model.weight].get("step", 0)) if optimizer.state else 0
    moves = []
    for _ in range(3):
        before = model.weight.item()
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        moves.append(round((before - model.weight.item()) / RATE, 3))
    return counter, moves


for name, read in (("state not read:", False), ("state read:", True)):
    counter, moves = first_steps(read)
    print(f"{name:15s} counter {counter}, weights move by {', '.join(f'{m:.3f}' for m in moves)} learning rates")
    assert counter == int(read), "the behaviour changed"
    assert (abs(moves[0] - 0.744) if read else abs(moves[0] - 1.0)) < 0.002, "the behaviour changed"
PY

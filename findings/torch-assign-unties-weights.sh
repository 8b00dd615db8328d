#!/usr/bin/env bash
# torch: load_state_dict(assign=True) makes a tied weight two parameters on one memory: each step counts twice.
#
# An expert would guess: a state dict that came out of torch.save still has both names on one memory, and loading it,
#   copied or assigned, gives a tied model; assign=True only saves the copy.
# Versions: torch 2.13.0 (CPU), NumPy 2.4.6.
# Behaviour: assign sets each name to a Parameter of its own around the loaded tensor. Both have the same memory, so
#   the outputs are right, and stay equal for ever; but `is` no longer holds, parameters() lists both, each gets only
#   the gradient of its own use, and an optimizer updates the memory twice. Where the two gradients agree in sign,
#   AdamW's first step is twice the learning rate, where they differ it is 0; weight decay counts twice. (A file of
#   safetensors has one of the names; with strict=False the other one stays what it was.) to_empty of a tied model on
#   the meta device unties as well, into two memories.
# What it means: "build on meta, then assign", the way to load a large policy, trains the embedding and head of a
#   language model at another rate than the same code without assign, with other optimizer files and a count of
#   parameters that is larger. Tie again after loading.
# Output seen:
#   assign=False: parameters 1, one memory True, loss 16.6350; steps of 0, 1, 2 learning rates: 0%, 100%, 0%
#   assign=True : parameters 2, one memory True, loss 16.6350; steps of 0, 1, 2 learning rates: 37%, 0%, 63%
#   to_empty: one memory False
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export TMPDIR=$work
python3 -m venv "$work/venv"
pip=("$work/venv/bin/pip" install -q --no-compile)
{ "${pip[@]}" torch==2.13.0 && "${pip[@]}" numpy==2.4.6; } >"$work/pip.log" 2>&1 ||
  { cat "$work/pip.log"; exit 2; } # torch's CPU build suffices
"$work/venv/bin/python" - <<'PY'
import io

import torch
from torch import nn


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


torch.manual_seed(0)
file = io.BytesIO()
torch.save(Tied().state_dict(), file)
tokens, targets = torch.arange(50), torch.arange(50).roll(1)
seen = {}
for assign in (False, True):
    with torch.device("meta" if assign else "cpu"):
        model = Tied()
    file.seek(0)
    model.load_state_dict(torch.load(file), assign=assign)
    one = model.embedding.weight is model.head.weight
    memory = model.embedding.weight.data_ptr() == model.head.weight.data_ptr()
    before = model.embedding.weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)
    loss = nn.functional.cross_entropy(model(tokens), targets)
    loss.backward()
    optimizer.step()
    step = ((model.embedding.weight - before).abs() / 1e-3).detach().round(decimals=1)
    shares = {size: (step == size).float().mean().item() for size in (0, 1, 2)}
    seen[assign] = one, memory, len(list(model.parameters())), round(loss.item(), 5), shares
    print(
        f"assign={assign!s:5s}: parameters {seen[assign][2]}, one memory {memory}, loss {loss.item():.4f}; "
        + "steps of 0, 1, 2 learning rates: " + ", ".join(f"{share:.0%}" for share in shares.values())
    )
with torch.device("meta"):
    model = Tied()
model.to_empty(device="cpu")
same = model.embedding.weight.data_ptr() == model.head.weight.data_ptr()
print(f"to_empty: one memory {same}")
assert seen[False][:3] == (True, True, 1) and seen[True][:3] == (False, True, 2), "the behaviour changed"
assert seen[False][3] == seen[True][3] and not same, "the behaviour changed"
assert seen[False][4][1] > 0.95 and seen[True][4][0] > 0.2 and seen[True][4][2] > 0.2, "the behaviour changed"
PY

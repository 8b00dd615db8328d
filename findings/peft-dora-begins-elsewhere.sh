#!/usr/bin/env bash
# peft: DoRA on a bfloat16 base changes the model at the moment it is inserted.
#
# An expert would guess: B is zero and the magnitudes are the norms of the weights, so a fresh DoRA adapter is the
#   identity, like a fresh LoRA one: the output equals the base's to the bit.
# Versions: peft 0.21.2, transformers 5.23.0, accelerate 1.15.0, torch 2.13.0 (CPU), NumPy 2.4.6.
# Behaviour: the magnitude of a row is its norm in the type of the base, rounded to bfloat16; then adapters are cast
#   to float32 (autocast_adapter_dtype, on by default), and each forward pass divides by a norm that is computed in
#   float32. The factor of a row is not 1 but off by up to 0.3 %, the layer's output by 1 % of its deviation at the
#   largest, and merging changes a fifth of the weights. With autocast_adapter_dtype=False, or a float32 base, both
#   norms are rounded alike and it is the identity. LoRA always is.
# What it means: the KL divergence from the reference policy (disable_adapter) is not zero before the first step and
#   never pulls back to it, importance ratios between a server on the base and the trainer start away from 1, and
#   "DoRA at step 0 equals the checkpoint" fails in exactly the set-up that is used.
# Output seen (largest change of the output against the base, in standard deviations of the output; weights changed by
# the merge):
#   bfloat16 base, DoRA, autocast True : output 0.0135, merge changes 20.8% of the weights
#   bfloat16 base, DoRA, autocast False: output 0.0000, merge changes 0.0% of the weights
#   bfloat16 base, LoRA, autocast True : output 0.0000, merge changes 0.0% of the weights
#   float32  base, DoRA, autocast True : output 0.0000, merge changes 0.0% of the weights
#   float32  base, DoRA, autocast False: output 0.0000, merge changes 0.0% of the weights
#   float32  base, LoRA, autocast True : output 0.0000, merge changes 0.0% of the weights
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export TMPDIR=$work
python3 -m venv "$work/venv"
pip=("$work/venv/bin/pip" install -q --no-compile)
{ "${pip[@]}" torch==2.13.0 &&
  "${pip[@]}" peft==0.21.2 transformers==5.23.0 accelerate==1.15.0 numpy==2.4.6; } >"$work/pip.log" 2>&1 ||
  { cat "$work/pip.log"; exit 2; } # torch's CPU build suffices
"$work/venv/bin/python" - <<'PY'
import copy

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
base, x = nn.Sequential(nn.Linear(256, 256, bias=False)), torch.randn(256, 256)
seen = {}
for dtype in (torch.bfloat16, torch.float32):
    for name, options, autocast in (
        ("DoRA", {"use_dora": True}, True),
        ("DoRA", {"use_dora": True}, False),
        ("LoRA", {}, True),
    ):
        plain = copy.deepcopy(base).to(dtype)
        config = LoraConfig(r=4, target_modules=["0"], **options)
        model = get_peft_model(copy.deepcopy(plain), config, autocast_adapter_dtype=autocast)
        before = plain(x.to(dtype)).float()
        change = ((model(x.to(dtype)).float() - before).abs().max() / before.std()).item()
        merged = model.merge_and_unload()[0].weight
        seen[dtype, name, autocast] = change, (merged != plain[0].weight).float().mean().item()
        print(
            f"{str(dtype)[6:]:8s} base, {name}, autocast {autocast!s:5s}: "
            "output {:.4f}, merge changes {:.1%} of the weights".format(*seen[dtype, name, autocast])
        )
for case, (change, weights) in seen.items():
    if case == (torch.bfloat16, "DoRA", True):
        assert change > 0.003 and weights > 0.02, "the behaviour changed"
    else:
        assert change == weights == 0, "the behaviour changed"
PY

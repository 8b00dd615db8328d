#!/usr/bin/env bash
# peft: adapters on the linear layers of nn.TransformerEncoderLayer act in train mode and do nothing in eval mode.
#
# An expert would guess: get_peft_model replaces linear1 and linear2 by layers that add the update, so each forward
#   pass has it, in train and in eval mode, like in any other network.
# Versions: peft 0.21.2, transformers 5.23.0, accelerate 1.15.0, torch 2.13.0 (CPU), NumPy 2.4.6.
# Behaviour: in eval mode the layer has a fused path that never calls linear1 and linear2 but reads their `.weight`,
#   and for an adapted layer this is the base's. torch refuses the fused path while a gradient is needed of the
#   weights that it reads; these are frozen. It also refuses layers with hooks, but adapters are none. With dropout 0
#   train and eval mode then differ by the whole adapter. After merge_and_unload the adapters act in both.
# What it means: the policy that acts and is evaluated is the base, whatever was learned; the losses, computed in
#   train mode, fall. Importance ratios of a PPO step start away from 1, and the merged checkpoint suddenly behaves
#   otherwise than all evaluations before it. torch.backends.mha.set_fastpath_enabled(False) cures it.
# Output seen (largest change of the output by the adapters, as a share of the output's standard deviation):
#   train, gradients: 1.759
#   train, no_grad: 1.759
#   eval,  gradients: 0.000
#   eval,  no_grad: 0.000
#   eval,  no_grad, set_fastpath_enabled(False): 1.759
#   eval,  no_grad, after merge_and_unload: changes by 1.759
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
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
model = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
x = torch.randn(2, 5, 32)
config = LoraConfig(r=4, target_modules=["linear1", "linear2"], init_lora_weights=False)  # as if trained: B is not 0
model = get_peft_model(model, config)


def effect(mode, grad, fused=True):
    model.train(mode == "train")
    torch.backends.mha.set_fastpath_enabled(fused)
    with torch.set_grad_enabled(grad):
        adapted = model(x)
        with model.disable_adapter():
            base = model(x)
    torch.backends.mha.set_fastpath_enabled(True)
    return ((adapted - base).abs().max() / base.std()).item()


seen = {}
for mode in ("train", "eval"):
    for grad in (True, False):
        seen[mode, grad] = effect(mode, grad)
        print(f"{mode + ',':6s} {'gradients' if grad else 'no_grad'}: {seen[mode, grad]:.3f}")
slow = effect("eval", False, fused=False)
print(f"eval,  no_grad, set_fastpath_enabled(False): {slow:.3f}")
model.eval()
with torch.no_grad():
    before = model(x)
    after = model.merge_and_unload()(x)
change = ((after - before).abs().max() / before.std()).item()
print(f"eval,  no_grad, after merge_and_unload: changes by {change:.3f}")
assert min(seen["train", True], seen["train", False], slow, change) > 0.1, "the behaviour changed"
assert seen["eval", True] == seen["eval", False] == 0, "the behaviour changed"
PY

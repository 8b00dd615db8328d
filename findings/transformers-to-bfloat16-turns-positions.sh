#!/usr/bin/env bash
# transformers: model.to(bfloat16) rounds the rotary frequencies, from_pretrained(dtype=bfloat16) does not.
#
# An expert would guess: the two are the same model. Rotary tables are computed in float32 anyway (the code says
#   `.float()` and switches autocast off), and after .to(float32) everything is as exact as the weights are.
# Versions: transformers 5.23.0, torch 2.13.0 (CPU), NumPy 2.4.6.
# Behaviour: inv_freq is a buffer, so .to(bfloat16) rounds it to 8 bits; from_pretrained and a model that is built
#   with this dtype keep float32. The forward pass makes float32 of the rounded numbers and multiplies by the
#   position, so at position 1,000 an angle is off by up to 0.44 rad. The buffer is not in the checkpoint, so saving
#   and loading heals it; .to(float32) does not.
# What it means: a policy that is cast for rollouts acts differently from the same one loaded in bfloat16, more so the
#   longer the prompt is (three cameras with 256 tokens each), and differently from its own checkpoint. Short tests
#   agree. A float32 copy of a cast model is not the reference it looks like. Cast weights only, or recompute
#   inv_freq.
# Output seen (Gemma, 2 layers; type of inv_freq; angles at 1, 100, 300, 1,000; logits in standard deviations):
#   from_pretrained(dtype=bfloat16): float32  angles off by 0.0000, 0.0000, 0.0000, 0.0000
#   .to(bfloat16):                   bfloat16 angles off by 0.0004, 0.0437, 0.1311, 0.4369
#   .to(bfloat16).to(float32):       float32  angles off by 0.0004, 0.0437, 0.1311, 0.4369
#   logits at position 10, same weights, all computed in float32: 0.001
#   logits at position 100, same weights, all computed in float32: 0.027
#   logits at position 1,000, same weights, all computed in float32: 0.252
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export TMPDIR=$work
python3 -m venv "$work/venv"
pip=("$work/venv/bin/pip" install -q --no-compile)
{ "${pip[@]}" torch==2.13.0 && "${pip[@]}" transformers==5.23.0 numpy==2.4.6; } >"$work/pip.log" 2>&1 ||
  { cat "$work/pip.log"; exit 2; } # torch's CPU build suffices
cd "$work"
"$work/venv/bin/python" - <<'PY'
import torch
from transformers import GemmaConfig, GemmaForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()
torch.manual_seed(0)
torch.set_num_threads(1)
heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64}
config = GemmaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, **heads)
config.initializer_range = 0.3  # so that attention is not the same everywhere
GemmaForCausalLM(config).save_pretrained("policy")
exact = GemmaForCausalLM.from_pretrained("policy", dtype=torch.float32)
models = {
    "from_pretrained(dtype=bfloat16)": GemmaForCausalLM.from_pretrained("policy", dtype=torch.bfloat16),
    ".to(bfloat16)": GemmaForCausalLM.from_pretrained("policy", dtype=torch.float32).to(torch.bfloat16),
}
cast = GemmaForCausalLM.from_pretrained("policy", dtype=torch.float32).to(torch.bfloat16)
models[".to(bfloat16).to(float32)"] = cast.to(torch.float32)
positions = torch.tensor([[1, 100, 300, 1000]])
true = exact.model.rotary_emb.inv_freq
seen = {}
for name, model in models.items():
    frequency = model.model.rotary_emb.inv_freq
    off = [float((position * (frequency.double() - true.double())).abs().max()) for position in positions[0]]
    seen[name] = frequency.dtype, off
    print(f"{name + ':':32s} {str(frequency.dtype)[6:]:8s} angles off by {', '.join(f'{a:.4f}' for a in off)}")
weights = models["from_pretrained(dtype=bfloat16)"].float()  # the same rounded weights in all, computed in float32
tokens = torch.randint(0, 64, (4, 1001))
with torch.no_grad():
    good, turned = weights(tokens).logits, models[".to(bfloat16).to(float32)"](tokens).logits
for position in (10, 100, 1000):
    change = ((good - turned)[:, position].square().mean().sqrt() / good.std()).item()
    seen[position] = change
    print(f"logits at position {position:,d}, same weights, all computed in float32: {change:.3f}")
assert seen["from_pretrained(dtype=bfloat16)"] == (torch.float32, [0.0] * 4), "the behaviour changed"
for name in (".to(bfloat16)", ".to(bfloat16).to(float32)"):
    assert seen[name][1][3] > 0.3 and seen[name][1][0] < 0.01, "the behaviour changed"
assert seen[10] < seen[100] < seen[1000] and seen[1000] > 0.05, "the behaviour changed"
PY

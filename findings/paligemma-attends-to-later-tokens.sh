#!/usr/bin/env bash
# transformers' PaliGemma lets every token see every later token unless the caller passes token_type_ids.
#
# An expert would guess: images and instruction attend in both directions, what follows is causal. To score sampled
#   actions for a policy gradient, one pass over prompt + actions gives each action's log-probability given those
#   before it; with `labels` the model surely masks as in training.
# Versions: transformers 5.23.0, torch 2.13.0 (CPU), NumPy 2.4.6.
# Behaviour: the model cannot tell the prefix from the answer. Without token_type_ids all positions count as prefix,
#   in eval and in train mode, with an attention mask, and with labels too: the logits of every position depend on the
#   last token, so each token's loss is computed with the answer in sight. generate() never shows it, because there
#   the answer is fed token by token. With token_type_ids (0 for prefix, 1 for answer) earlier positions do not move.
# What it means: the log-probabilities of a training pass are not those with which actions were drawn: ratios start
#   away from 1, and cloning with labels alone learns to copy a token that it will not have at inference. Nothing
#   warns.
# Output seen (largest change of the logits, scaled by the logits' standard deviation, when only the last of 4 action
# tokens is exchanged; "earlier" are all positions before it):
#   eval,  nothing passed:           earlier 2.4500
#   train, nothing passed:           earlier 2.4500
#   train, attention_mask + labels:  earlier 2.4500
#   train, token_type_ids + labels:  earlier 0.0000
#   eval,  token_type_ids:           earlier 0.0000
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export TMPDIR=$work
python3 -m venv "$work/venv"
pip=("$work/venv/bin/pip" install -q --no-compile)
{ "${pip[@]}" torch==2.13.0 && "${pip[@]}" transformers==5.23.0 numpy==2.4.6; } >"$work/pip.log" 2>&1 ||
  { cat "$work/pip.log"; exit 2; } # torch's CPU build suffices
"$work/venv/bin/python" - <<'PY'
import torch
from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration

IMAGE = 299
vision = dict(model_type="siglip_vision_model", hidden_size=16, intermediate_size=32, num_hidden_layers=1)
vision |= dict(num_attention_heads=2, image_size=28, patch_size=14, projection_dim=32)
text = dict(model_type="gemma", hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
text |= dict(num_key_value_heads=1, head_dim=16, vocab_size=300, initializer_range=0.3)
config = PaliGemmaConfig(
    vision_config=vision, text_config=text, image_token_index=IMAGE, vocab_size=300, projection_dim=32, hidden_size=32
)
torch.manual_seed(0)
model = PaliGemmaForConditionalGeneration(config)
image = torch.randn(1, 3, 28, 28)
tokens = torch.tensor([[IMAGE] * 4 + [2, 5, 6, 7, 108] + [200, 201, 202, 203]])  # image, instruction, actions
other = tokens.clone()
other[0, -1] = 250
types = torch.zeros_like(tokens)
types[0, 9:] = 1
ones = torch.ones_like(tokens)


def change_earlier(**arguments):
    with torch.no_grad():
        first, second = (model(input_ids=ids, pixel_values=image, **arguments).logits for ids in (tokens, other))
    return ((first - second)[0, :-1].abs().max() / first.std()).item()


cases = [
    ("eval,  nothing passed:", False, {}, True),
    ("train, nothing passed:", True, {}, True),
    ("train, attention_mask + labels:", True, dict(attention_mask=ones, labels=tokens), True),
    ("train, token_type_ids + labels:", True, dict(attention_mask=ones, labels=tokens, token_type_ids=types), False),
    ("eval,  token_type_ids:", False, dict(token_type_ids=types), False),
]
for name, training, arguments, leaks in cases:
    model.train(training)
    seen = change_earlier(**arguments)
    print(f"{name:32s} earlier {seen:.4f}")
    assert (seen > 0.05) if leaks else (seen < 1e-6), "the behaviour changed"
PY

#!/usr/bin/env bash
# transformers' Qwen2.5-VL remembers the positions of the last prompt in the model, not in the cache.
#
# An expert would guess: all that a decoding loop carries from one call to the next is in past_key_values, so one
#   model can serve two batches in turn (prompt A, prompt B, next token of A, next token of B), each with its own
#   cache.
# Versions: transformers 5.23.0, torch 2.13.0 (CPU), NumPy 2.4.6.
# Behaviour: an image of n patches takes far fewer than n positions in the rotary embedding. How many positions the
#   prompt saved (`rope_deltas`) is kept as an attribute of the model at each prompt pass, and a later pass with a
#   cache and one new token adds whatever is there. After another prompt has been through the model, a token of A is
#   placed as if A's image had the size of B's: its logits are others. No error, and nothing in the cache shows it.
# What it means: lanes that take turns on one model (simulators stepping while the other half is computed), a server
#   with two clients, or a reference pass within a rollout change which actions are drawn, only with images of
#   different sizes or number, and not reproducibly. Passing position_ids explicitly cures it.
# Output seen (one further token after prompt A, against a single pass over A and that token):
#   only A in between:                same logits (difference below 0.0001), rope_deltas -12
#   prompt B (smaller image) between: probabilities differ by up to 0.4317, rope_deltas -2
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
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

PATCH = 290
text = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
text |= dict(vocab_size=300, max_position_embeddings=512, initializer_range=0.4, bos_token_id=0, eos_token_id=1)
text |= dict(rope_parameters=dict(rope_type="default", mrope_section=[2, 3, 3], rope_theta=100.0))
vision = dict(hidden_size=32, out_hidden_size=32, depth=1, num_heads=2, intermediate_size=64, patch_size=14)
vision |= dict(fullatt_block_indexes=[0])
config = Qwen2_5_VLConfig(
    text_config=text, vision_config=vision, image_token_id=PATCH, video_token_id=291, vision_start_token_id=292,
    vision_end_token_id=293,
)
torch.manual_seed(0)
model = Qwen2_5_VLForConditionalGeneration(config).eval()


def make_prompt(side, words):
    """Return the inputs of a prompt with an image of side x side patches, of which four make a token."""
    ids = [292] + [PATCH] * (side * side // 4) + [293] + words
    return dict(
        input_ids=torch.tensor([ids]),
        pixel_values=torch.randn(side * side, 3 * 2 * 14 * 14, generator=torch.Generator().manual_seed(side)),
        image_grid_thw=torch.tensor([[1, side, side]]),
        mm_token_type_ids=torch.tensor([[int(token == PATCH) for token in ids]]),
    )


def next_probabilities(other):
    """Return the probabilities after one further token of A: with the cache, and of one pass over everything."""
    first, token = make_prompt(8, [5, 6, 7]), torch.tensor([[9]])
    with torch.no_grad():
        cache = model(**first, use_cache=True).past_key_values
        if other:
            model(**make_prompt(4, [5, 6, 7, 8]), use_cache=True)
        deltas = int(model.model.rope_deltas)
        step = model(input_ids=token, past_key_values=cache, use_cache=True).logits[0, -1]
        first["input_ids"] = torch.cat([first["input_ids"], token], 1)
        first["mm_token_type_ids"] = torch.cat([first["mm_token_type_ids"], torch.zeros_like(token)], 1)
        whole = model(**first).logits[0, -1]
    return (step.softmax(-1) - whole.softmax(-1)).abs().max().item(), deltas


difference, deltas = next_probabilities(other=False)
assert difference < 1e-4, "the behaviour changed"
print(f"only A in between:                same logits (difference below 0.0001), rope_deltas {deltas}")
difference, deltas = next_probabilities(other=True)
print(f"prompt B (smaller image) between: probabilities differ by up to {difference:.4f}, rope_deltas {deltas}")
assert difference > 1e-3, "the behaviour changed"
PY

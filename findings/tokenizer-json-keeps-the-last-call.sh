#!/usr/bin/env bash
# transformers: a tokenizer that is saved after use writes the last call's truncation and padding into tokenizer.json.
#
# An expert would guess: padding and max_length are arguments of one call; save_pretrained writes the vocabulary and
#   the rules, so the folder is the same whether the tokenizer was used before or not.
# Versions: transformers 5.23.0, tokenizers 0.23.3, NumPy 2.4.6.
# Behaviour: a call sets truncation and padding on the fast tokenizer below and leaves them there, and save_pretrained
#   writes that object as it is. tokenizer.json then says "cut to 6, pad to 6". transformers itself does not mind, as
#   each of its calls sets both again. tokenizers, and what is built on it (servers, other languages), follows the
#   file: the instruction is cut after 6 tokens, or padded, although that call did not ask for it.
# What it means: a policy that is trained with padding="max_length" and saved at the end is served with instructions
#   cut to the training length, while every check in transformers passes; two checkpoints of one run have different
#   tokenizer files, depending on what was tokenized last before saving.
# Output seen:
#   saved when new:    tokenizer.json has truncation null, padding null; tokenizers reads 11 tokens
#   saved after a call with max_length=6: truncation to 6, padding to 6; tokenizers reads 6 tokens
#   the same folder in transformers: 11 tokens
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile transformers==5.23.0 tokenizers==0.23.3 numpy==2.4.6 >"$work/pip.log" 2>&1 ||
  { cat "$work/pip.log"; exit 2; }
cd "$work"
"$work/venv/bin/python" - <<'PY'
import json
import tempfile

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = "[PAD] [UNK] pick up the red cup and put it in drawer"
SENTENCE = "pick up the red cup and put it in the drawer"


def make_tokenizer():
    rules = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS.split())}, unk_token="[UNK]"))
    rules.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=rules, pad_token="[PAD]", unk_token="[UNK]")


def save_and_read(tokenizer):
    folder = tempfile.mkdtemp(dir=".")
    tokenizer.save_pretrained(folder)
    with open(f"{folder}/tokenizer.json") as file:
        content = json.load(file)
    tokens = len(Tokenizer.from_file(f"{folder}/tokenizer.json").encode(SENTENCE).ids)
    return folder, content["truncation"], content["padding"], tokens


tokenizer = make_tokenizer()
_, truncation, padding, tokens = save_and_read(tokenizer)
print(f"saved when new:    tokenizer.json has truncation {json.dumps(truncation)}, padding {json.dumps(padding)}; ", end="")
print(f"tokenizers reads {tokens} tokens")
assert truncation is padding is None and tokens == 11, "the behaviour changed"
tokenizer(SENTENCE, truncation=True, padding="max_length", max_length=6)
folder, truncation, padding, tokens = save_and_read(tokenizer)
print(f"saved after a call with max_length=6: truncation to {truncation['max_length']}, padding to ", end="")
print(f"{padding['strategy']['Fixed']}; tokenizers reads {tokens} tokens")
assert truncation["max_length"] == padding["strategy"]["Fixed"] == tokens == 6, "the behaviour changed"
again = len(PreTrainedTokenizerFast.from_pretrained(folder)(SENTENCE)["input_ids"])
print(f"the same folder in transformers: {again} tokens")
assert again == 11, "the behaviour changed"
PY

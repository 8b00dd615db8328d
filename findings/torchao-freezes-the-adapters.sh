#!/usr/bin/env bash
# torchao: quantizing a model that has LoRA adapters quantizes and freezes the adapters as well.
#
# An expert would guess: quantize_(model, Int8WeightOnlyConfig()) after get_peft_model shrinks the frozen base
#   weights, as in QLoRA; adapters are what is trained and stay float.
# Versions: torchao 0.18.0, peft 0.21.2, transformers 5.23.0, torch 2.13.0 (CPU), NumPy 2.4.6.
# Behaviour: every nn.Linear is replaced, and lora_A and lora_B are nn.Linear. Their weights become int8 and
#   requires_grad goes from True to False. With nothing else to train, backward fails and one notices. With a value
#   head (or a full-rank module) as well the run goes through: losses, gradients and steps exist, and the adapters
#   never change. Quantizing first and adding adapters afterwards, or a filter_fn that leaves out names with lora_,
#   keeps them trainable.
# What it means: PPO on a quantized policy trains its critic only: the value loss falls, the policy stays what it was,
#   and its KL divergence from the reference is zero, which reads as a cautious learning rate.
# Output seen:
#   adapters first, then quantize_: trainable head.weight, head.bias; the step moved head.weight, head.bias
#   with a filter for lora_:        trainable lora_A, lora_B, head.weight, head.bias; the step moved lora_A, lora_B, head.weight, head.bias
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export TMPDIR=$work
python3 -m venv "$work/venv"
pip=("$work/venv/bin/pip" install -q --no-compile)
{ "${pip[@]}" torch==2.13.0 && "${pip[@]}" torchao==0.18.0 peft==0.21.2 transformers==5.23.0 accelerate==1.15.0 numpy==2.4.6; } >"$work/pip.log" 2>&1 ||
  { cat "$work/pip.log"; exit 2; } # torch's CPU build suffices
"$work/venv/bin/python" - <<'PY'
import logging
import warnings

logging.disable(logging.WARNING)
warnings.simplefilter("ignore")
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(32, 32)
        self.head = nn.Linear(32, 1)

    def forward(self, x):
        return self.head(self.body(x))


def train_once(select):
    torch.manual_seed(0)
    model = get_peft_model(Policy(), LoraConfig(r=4, target_modules=["body"], modules_to_save=["head"]))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.1)
    quantize_(model, Int8WeightOnlyConfig(), filter_fn=select)
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    before = {name: weight.detach().clone() for name, weight in trained.items()}
    optimizer = torch.optim.SGD(trained.values(), lr=0.1)
    (model(torch.ones(4, 32)) ** 2).sum().backward()
    optimizer.step()
    moved = [name for name in trained if not torch.equal(before[name], trained[name])]
    return shorten(trained), shorten(moved)


def shorten(names):
    short = [name.removesuffix(".default.weight") if "lora" in name else name.replace("modules_to_save.default.", "") for name in names]
    return [name.rpartition("body.")[2] if "body" in name else "head" + name.rpartition("head")[2] for name in short]


def is_linear(module, name):
    return isinstance(module, nn.Linear) and "head" not in name


for title, select, adapters in (
    ("adapters first, then quantize_:", is_linear, False),
    ("with a filter for lora_:", lambda module, name: is_linear(module, name) and "lora_" not in name, True),
):
    trained, moved = train_once(select)
    print(f"{title:31s} trainable {', '.join(trained)}; the step moved {', '.join(moved)}")
    assert ("lora_B" in moved) == ("lora_A" in trained) == adapters and "head.weight" in moved, "the behaviour changed"
PY

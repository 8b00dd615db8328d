#!/usr/bin/env bash
# torchao: weight-only layers keep every dequantised weight until the backward pass, and other layers save nothing.
#
# An expert would guess: a frozen base quantised with quantize_(model, Int8WeightOnlyConfig()) takes half the memory of
#   bfloat16 in training too, as bitsandbytes' layers do: a weight is dequantised again in the backward pass.
# Versions: torchao 0.18.0, torch 2.13.0 (CPU).
# Behaviour: the product is an ordinary torch.mm with a dequantised weight, which autograd keeps for the gradient of the
#   input. All layers of a network keep theirs at once, in addition to the stored ones. Int8 and FP8 *training* layers
#   compute the gradient of the weight, frozen or not: twice the operations of the backward pass; and FP8 ones store
#   bfloat16. NF4 keeps nothing, and refuses sizes whose number of weights is not a multiple of 64 * 256, such as
#   SigLIP's 1,152 x 4,304.
# What it means: QLoRA with torchao's int8 or FP8 needs more memory than LoRA on bfloat16. For frozen weights the product
#   needs an autograd function that saves what is stored.
# Output seen (four layers of 512 x 512; bytes kept for the backward pass besides the weights, operations of it):
#   bf16                          0 bytes   16.8 MFLOP
#   int8 weight-only      2,101,248 bytes   16.8 MFLOP
#   float8 weight-only    2,097,152 bytes   16.8 MFLOP
#   int8 training                 0 bytes   33.6 MFLOP
#   float8 training               0 bytes   33.6 MFLOP
#   nf4 of 1152 x 4304: Number of scalers must be divisible by scaler block size
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export TMPDIR=$work
python3 -m venv "$work/venv"
pip=("$work/venv/bin/pip" install -q --no-compile)
{ "${pip[@]}" torch==2.13.0 && "${pip[@]}" torchao==0.18.0 numpy==2.4.6; } >"$work/pip.log" 2>&1 ||
  { cat "$work/pip.log"; exit 2; } # torch's CPU build suffices
"$work/venv/bin/python" - <<'PY'
import dataclasses
import logging
import warnings

logging.disable(logging.WARNING)
warnings.simplefilter("ignore")
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.prototype.quantized_training.int8 import Int8QuantizedTrainingLinearWeight
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_, to_nf4

WEIGHT = 512 * 512 * 2


def store_int8(network):
    for layer in network:
        stored = Int8QuantizedTrainingLinearWeight.from_float(layer.weight)
        layer.weight = nn.Parameter(stored, requires_grad=False)


def compute_in_fp8(network):
    config = Float8LinearConfig.from_recipe_name("rowwise")
    convert_to_float8_training(network, config=dataclasses.replace(config, emulate=True))


def measure(change):
    torch.manual_seed(0)
    network = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(4)]).bfloat16().requires_grad_(False)
    change(network)
    x = torch.randn(8, 512, dtype=torch.bfloat16, requires_grad=True)
    weights = {p.untyped_storage()._cdata for p in network.parameters() if type(p.data) is torch.Tensor}
    kept = {}

    def keep(tensor):
        if type(tensor) is torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in weights and storage.nbytes() >= 512 * 2:
                kept[storage._cdata] = storage.nbytes(), tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = network(x).float().sum()
    kept_bytes = sum(size for size, tensor in kept.values() if tensor.shape != x.shape)
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    assert x.grad is not None
    return kept_bytes, counter.get_total_flops()


CASES = {
    "bf16": lambda network: None,
    "int8 weight-only": lambda network: quantize_(network, Int8WeightOnlyConfig()),
    "float8 weight-only": lambda network: quantize_(network, Float8WeightOnlyConfig()),
    "int8 training": store_int8,
    "float8 training": compute_in_fp8,
}
figures = {name: measure(change) for name, change in CASES.items()}
for name, (size, flops) in figures.items():
    print(f"{name:20s} {size:12,d} bytes {flops / 1e6:6.1f} MFLOP")
assert all((figures[name][0] >= 4 * WEIGHT) == name.endswith("weight-only") for name in figures)
assert all((figures[name][1] == 2 * figures["bf16"][1]) == name.endswith("training") for name in figures)
try:
    to_nf4(torch.randn(1152, 4304, dtype=torch.bfloat16))
except AssertionError as error:
    print(f"nf4 of 1152 x 4304: {str(error).partition(',')[0]}")
else:
    raise AssertionError("the behaviour changed")
PY

#!/usr/bin/env bash
# FSDP2: mixed precision rounds every float that the forward pass is given, also inside dictionaries: times become equal.
#
# An expert would guess: MixedPrecisionPolicy(param_dtype=bfloat16) gathers weights in bfloat16 and computes with
#   them; a float32 time or time step that the network embeds (in float32, as diffusion code does) arrives as it was.
# Versions: torch 2.13.0 (CPU, gloo, one rank), NumPy 2.4.6.
# Behaviour: by cast_forward_inputs all floating-point tensors among the arguments of the sharded module are cast
#   before its forward, at any depth of nested containers; integers are left. bfloat16 has 8 bits: of 1,000 time steps
#   507 remain different, the last steps before 1,000 are all 1,000 or 996, and a flow time of 0.999 is 1.0. Code that
#   embeds the time within the module computes sines of the rounded number, however often it says .float(). Without
#   FSDP, or under autocast, the same module gets float32.
# What it means: a denoiser that was trained on one GPU is fine-tuned with a coarse clock on eight; the loss is a
#   little higher and nothing fails. Proprioception and action targets that go through forward are rounded too. Pass
#   integers, or set cast_forward_inputs=False and cast where it is meant.
# Output seen:
#   plain module:  flow time 0.999 is 0.999000 (float32), nested step 997 is 997, 1,000 steps: 1000 different
#   FSDP2, bf16:   flow time 0.999 is 1.000000 (bfloat16), nested step 997 is 996, 1,000 steps: 507 different
#   cast_forward_inputs=False: flow time 0.999 is 0.999000 (float32), nested step 997 is 997, 1,000 steps: 1000 different
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export TMPDIR=$work
python3 -m venv "$work/venv"
pip=("$work/venv/bin/pip" install -q --no-compile)
{ "${pip[@]}" torch==2.13.0 && "${pip[@]}" numpy==2.4.6; } >"$work/pip.log" 2>&1 ||
  { cat "$work/pip.log"; exit 2; } # torch's CPU build suffices
"$work/venv/bin/python" - <<'PY'
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, time, extras):
        self.seen = time.dtype, time.item(), extras["steps"].float()
        frequency = time.float() * 1000  # embeds in float32
        return self.layer(torch.sin(frequency)[None].to(self.layer.weight.dtype))


def look(shard, **policy):
    module = Denoiser()
    if shard:
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, **policy))
    module(torch.tensor([0.999]), {"steps": torch.arange(1000.0)})
    return module.seen


os.environ["GLOO_SOCKET_IFNAME"] = "lo"
meeting = tempfile.mkdtemp()
dist.init_process_group("gloo", init_method=f"file://{meeting}/meet", rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
cases = {
    "plain module: ": (look(False), True),
    "FSDP2, bf16:  ": (look(True), False),
    "cast_forward_inputs=False:": (look(True, cast_forward_inputs=False), True),
}
for name, ((kind, time, steps), whole) in cases.items():
    different = len(steps.unique())
    kind = str(kind).removeprefix("torch.")
    print(f"{name} flow time 0.999 is {time:.6f} ({kind}), nested step 997 is {steps[997]:.0f}, 1,000 steps: {different} different")
    assert (different == 1000 and time < 0.9995) if whole else (different < 600 and time == 1), "the behaviour changed"
dist.destroy_process_group()
PY

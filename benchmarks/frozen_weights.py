"""How far log-probs are from those of full precision where frozen weights are stored in fewer bits.

    python benchmarks/frozen_weights.py [--only openvla_oft ...] [--json FILE]
    python benchmarks/frozen_weights.py --run SPEC [PATH=VALUE ...]      # `vla-rl run`, with FP8 on a CPU

Each model acts with its weights in full precision, and the same chunks are scored with each `model.frozen_weights`. All
models have adapters of rank 8 that do something, and float32 activations, so that differences are those of storage.
`openvla_oft` has trained weights (the checkpoint that ships with the package) and images of its simulator; the others
have random weights. `small` is OpenVLA-OFT with 109 million random weights, with the public model's image size.

`merged` is the KL divergence, in nats a token, from acting with merged adapters (`lora.merge_for_acting: copy`) to
learning without; `merged and stored` is the same where the merged weights would be stored in fewer bits again.

A CPU multiplies FP8 with torch's own kernel, slowly; a run refuses it there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
from measuring import command_line, write_json
from torch import Tensor

from vla_rl.cli.main import app
from vla_rl.core.catalogue import load
from vla_rl.core.contexts import EnvContext, ModelContext
from vla_rl.core.randomness import Noise
from vla_rl.core.spec.spec import make_component
from vla_rl.testing import synthetic
from vla_rl.toolkit.models import frozen_weights
from vla_rl.toolkit.models.adapters import MARK, MergedAdapters
from vla_rl.toolkit.models.frozen_weights import FrozenLinear

KINDS = ("int8", "nf4", "fp8")
ROWS = 16
MODELS: dict[str, dict[str, Any]] = {
    "openvla_oft": {"checkpoint": "builtin:tabletop"},
    "small": {"preset": "small"},
    "openvla": {"preset": "tiny"},
    "pi0": {"preset": "tiny"},
    "pi05": {"preset": "tiny"},
    "smolvla": {"preset": "tiny"},
    "gr00t": {"preset": "tiny"},
}
CHUNKS = {"openvla_oft": 4, "openvla": 1}


def make_case(name: str) -> tuple[Any, Any, int]:
    """Return the simulator's description, observations, and the actions of a chunk."""
    chunk = CHUNKS.get(name, 2)
    if name != "openvla_oft":
        info = synthetic.env_info()
        return info, synthetic.observation(info, 2 if name == "small" else ROWS), chunk
    config = make_component("env", "tabletop").config
    env = load("env", "tabletop").build(config, EnvContext(chunk=chunk, num_envs=ROWS))
    return env.info, env.reset(range(ROWS), [state.id for state in env.reset_states("eval")[:ROWS]], [0] * ROWS), chunk


def make_model(name: str, kind: str, info: Any, chunk: int) -> Any:
    """Return the model with adapters that do something."""
    plugin = "openvla_oft" if name == "small" else name
    config = make_component("model", plugin, **MODELS[name], lora={"rank": 8}, frozen_weights=kind).config
    model = load("model", plugin).build(config, ModelContext(env=info, chunk=chunk))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter_name, parameter in model.module.named_parameters():
            if f"{MARK}B" in parameter_name:
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model


def sample_chunk(model: Any, obs: Any) -> Any:
    rows = len(obs.instructions)
    return model.sample_chunk(obs, Noise(0, "frozen", range(rows), [0] * rows, [0] * rows), False)


def measure_kl(model: Any, obs: Any, change: Callable[[FrozenLinear], None]) -> float:
    """Return k3 of the KL divergence from acting with merged adapters to learning without.

    Args:
        change: changes the merged weight of a layer.
    """
    adapters = MergedAdapters(model.module, "copy")
    adapters.merge_weights()
    for part in model.module.modules():
        if isinstance(part, FrozenLinear) and part.merged is not None:
            change(part)
    chunk = sample_chunk(model, obs)
    adapters.restore_weights()
    log_ratio = model.chunk_log_probs(obs, chunk).log_probs.double() - torch.as_tensor(chunk.log_probs).double()
    return float((torch.expm1(log_ratio) - log_ratio).mean())


def keep_merged(layer: FrozenLinear) -> None:
    """Leave a merged weight in full precision, as runs do."""


def store_merged(layer: FrozenLinear) -> None:
    """Round a merged weight as if it were stored in fewer bits again."""
    assert layer.merged is not None
    plain = torch.nn.Linear(layer.in_features, layer.out_features, bias=False).requires_grad_(False)
    plain.weight.copy_(layer.merged)
    layer.merged.copy_(FrozenLinear(plain, layer.kind).read_weight())


@torch.no_grad()
def measure_model(name: str) -> dict[str, dict[str, float]]:
    """Return the figures of each kind of storage."""
    info, obs, length = make_case(name)
    full = make_model(name, "bf16", info, length)
    chunk = sample_chunk(full, obs)
    expected: Tensor = full.chunk_log_probs(obs, chunk).log_probs
    figures: dict[str, dict[str, float]] = {}
    for kind in KINDS:
        model = make_model(name, kind, info, length)
        difference = model.chunk_log_probs(obs, chunk).log_probs - expected
        figures[kind] = {"log_prob_difference": float(difference.abs().mean())}
        if kind != "fp8":
            changes = {"merged_kl": keep_merged, "merged_and_stored_kl": store_merged}
            figures[kind] |= {key: measure_kl(model, obs, change) for key, change in changes.items()}
    return figures


def main() -> int:
    frozen_weights.find_fp8_problem = lambda device: None  # type: ignore[assignment]
    parser = command_line(__doc__, list(MODELS), "MODEL")
    parser.add_argument("--run", nargs=argparse.REMAINDER, help="arguments of `vla-rl run`")
    options = parser.parse_args()
    if options.run is not None:
        app(["run", *options.run])
    figures: dict[str, dict[str, dict[str, float]]] = {}
    print(f"{'model':12s} {'storage':8s} {'|log-prob|':>10s} {'merged':>10s} {'merged and stored':>18s}")
    for name in options.only:
        figures[name] = measure_model(name)
        for kind, row in figures[name].items():
            kl = [f"{row[key]:.1e}" if key in row else "-" for key in ("merged_kl", "merged_and_stored_kl")]
            print(f"{name:12s} {kind:8s} {row['log_prob_difference']:10.4f} {kl[0]:>10s} {kl[1]:>18s}", flush=True)
    write_json(figures, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

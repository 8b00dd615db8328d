"""What bounds a learner's pass and a decision on a GPU: operators of the public sizes by class, with their arithmetic
and their memory traffic.

    python benchmarks/roofline.py [--only oft pi0_kept ...] [--gpu h200] [--rows 32] [--top 12] [--json FILE]

Nothing is computed: a pass forward and backward, and a decision, run on the meta device with full sizes, one camera of
224 px (pi0 and pi0.5: two). `ms` is the longer of an operator's arithmetic at the card's rate for bfloat16 products and
its traffic at the card's rate for copies, so the sum is what no eager implementation of these operators is faster than.
Classes: products of matrices that arithmetic bounds, products that traffic bounds (adapters, heads), attention, casts,
and all other operators, which compilation fuses in large part. FP8 products count with twice the rate.

`_kept` keeps vision features (OpenVLA-OFT) or the backbone's keys and values (flow models) of acting.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from measuring import command_line, write_json
from rich.console import Console
from rich.table import Table

from vla_rl.core.spec.spec import parse_spec
from vla_rl.runtime.gpu_memory.model_memory import measure_costs
from vla_rl.runtime.planning.device_time import FP8_SPEEDUP
from vla_rl.runtime.planning.hardware import GpuRates, gpu_rates
from vla_rl.testing import synthetic
from vla_rl.toolkit.models.operation_counter import Operation

OFT: dict[str, Any] = {"type": "openvla_oft", "lora": {"rank": 32}, "autocast": True}
KEPT: dict[str, Any] = {"freeze_vision": True, "reuse_vision_features": True}
PREFIX: dict[str, Any] = {"reuse_prefix": True}
CASES: dict[str, dict[str, Any]] = {
    "oft": OFT,
    "oft_kept": OFT | KEPT,
    "oft_fp8": OFT | {"frozen_weights": "fp8"},
    "oft_fp8_kept": OFT | KEPT | {"frozen_weights": "fp8"},
    "oft_nf4": OFT | {"frozen_weights": "nf4"},
    "pi0": {"type": "pi0"},
    "pi0_kept": {"type": "pi0"} | PREFIX,
    "pi05": {"type": "pi05", "state_in_prompt": "none"},
    "pi05_kept": {"type": "pi05", "state_in_prompt": "none"} | PREFIX,
}
"""Case -> keys of the model."""
CASTS = frozenset({"_to_copy", "copy_"})
CLASSES = ("products, by arithmetic", "products, by traffic", "attention", "casts", "other")


def count_operations(case: str, rows: int) -> dict[str, Mapping[Operation, int]]:
    """Return the operators of a learner's pass and of a decision of `rows` samples."""
    model = {"preset": "full", "dtype": "bfloat16", **CASES[case]}
    flow = model["type"] != "openvla_oft"
    spec = parse_spec(
        {
            "name": "roofline",
            "model": model,
            "env": {"type": "tabletop", "num_envs": rows, "image_size": 224},
            "rollout": {"chunk": 10 if flow else 8, "episodes": rows},
            "algorithm": {"type": "ppo"},
            "train": {"steps": 1, "lr": 1e-5, "micro_batch": rows},
        }
    )
    info = synthetic.env_info(cameras=2 if flow else 1, pixels=224, state_dim=8 if flow else 0, action_dim=7)
    costs = measure_costs(spec, info, rows=(1, rows))
    assert costs.learning is not None
    return {"learner's pass": costs.learning.operations, "decision": costs.acting[rows].operations}


def bound_operation(operation: Operation, gpu: GpuRates) -> tuple[str, float]:
    """Return an operator's class, and the seconds that it takes at least."""
    rate = gpu.product_flops_per_s * (FP8_SPEEDUP if operation.kind == "fp8_product" else 1)
    arithmetic, traffic = operation.flops / rate, operation.traffic / gpu.traffic_bytes_per_s
    if operation.kind == "attention":
        kind = "attention"
    elif operation.kind == "other":
        kind = "casts" if operation.name in CASTS else "other"
    else:
        kind = "products, by arithmetic" if arithmetic > traffic else "products, by traffic"
    return kind, max(arithmetic, traffic)


def show_case(case: str, gpu: GpuRates, rows: int, top: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    for call, operations in count_operations(case, rows).items():
        sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0] * 4)
        by_name: defaultdict[str, float] = defaultdict(float)
        for operation, count in operations.items():
            kind, seconds = bound_operation(operation, gpu)
            row = (count, count * operation.flops / 1e12, count * operation.traffic / 1e9, count * seconds * 1e3)
            sums[kind] = [a + b for a, b in zip(sums[kind], row, strict=True)]
            by_name[operation.name] += count * seconds * 1e3
        sums["all"] = [sum(row[i] for row in sums.values()) for i in range(4)]
        table = Table(f"{case}, {call} of {rows}", "operators", "TFLOP", "GB", "ms", box=None, pad_edge=False)
        for column in range(1, 5):
            table.columns[column].justify = "right"
        for kind in (*CLASSES, "all"):
            count, flops, traffic, ms = sums[kind]
            table.add_row(kind, f"{count:,.0f}", f"{flops:,.1f}", f"{traffic:,.0f}", f"{ms:,.0f}")
            figures[f"{case}, {call}, {kind}"] = ms
        Console(width=100).print(table)
        largest = [f"{name} {ms:.0f}" for name, ms in sorted(by_name.items(), key=lambda item: -item[1])[:top]]
        print("ms by operator: " + ", ".join(largest) + "\n", flush=True)
    return figures


def main() -> None:
    parser = command_line(__doc__, list(CASES), "CASE")
    parser.add_argument("--gpu", default="h200", help="h100, h200, a100, 4090, or a file of a card's rates")
    parser.add_argument("--rows", type=int, default=32, help="samples of a pass, and observations of a decision")
    parser.add_argument("--top", type=int, default=12, help="operators that are listed by their time")
    options = parser.parse_args()
    gpu = gpu_rates(options.gpu)
    figures: dict[str, float] = {}
    for case in options.only:
        figures |= show_case(case, gpu, options.rows, options.top)
    write_json(figures, options.json)


if __name__ == "__main__":
    main()

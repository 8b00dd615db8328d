"""OpenVLA at full size (7.5B, random weights) on one GPU: training samples/s, decisions/s, memory, use of the device.

    python benchmarks/gpu_openvla.py [--rank 32] [--recompute selective] [--json FILE]
    python benchmarks/gpu_openvla.py --size tiny      # the same code on a CPU, in a minute

Weights are bfloat16, adapters and optimiser float32, computed in bfloat16. A sample is a chunk of 8 x 7 tokens seen by
one 224-px camera: scoring with gradient, values, clipped PPO loss, backward, and its share of an optimiser step, which
follows every micro-batch here. The ceiling is what a large bfloat16 product of matrices reaches; the share counts the
floating-point operations that are executed. AcceRL publishes 14.13 training samples/s on one H200 for OpenVLA-OFT; its
samples, losses and batch are its own, so that number is a landmark and not the same measurement.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from learner import ACTION_DIM, PIXELS, TEMPERATURE, Learner, noise
from torch.utils.flop_counter import FlopCounterMode

from vla_rl.core.types import Context
from vla_rl.plugins.models.openvla import LoRAConfig, OpenVLAARConfig, openvla
from vla_rl.testing import synthetic
from vla_rl.toolkit.models.recompute import RECOMPUTE

PUBLISHED = 14.13
NEEDED_GIB = 40
"""Free, at full size: 14 of weights, 2 of adapters and their optimiser, and a small micro-batch's activations."""
MICRO_BATCHES = {"full": (4, 8, 16, 32), "tiny": (4, 8)}
DECISION_ROWS = (8, 32, 64)
MATRIX = {"full": 8192, "tiny": 1024}


class Bench:
    def __init__(self, size: str, rank: int, recompute: str, repeats: int) -> None:
        self.size, self.repeats = size, repeats
        self.device = "cuda" if size == "full" else "cpu"
        lora = LoRAConfig(rank=rank)
        self.adapters: dict[str, Any] = {"lora": lora, "autocast": True, "recompute": recompute}
        self.figures: dict[str, float] = {}

    def seconds(self, work: Callable[[], Any]) -> float:
        """Median of the repeats after a first call; the device has finished in each."""
        times = []
        for _ in range(self.repeats + 1):
            self.wait()
            start = perf_counter()
            work()
            self.wait()
            times.append(perf_counter() - start)
        return statistics.median(times[1:])

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def peak_gib(self) -> float:
        """Since the last call; 0 on a CPU, where PyTorch does not count."""
        if self.device != "cuda":
            return 0.0
        peak = torch.cuda.max_memory_allocated() / 2**30
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return peak

    def report(self, name: str, value: float, unit: str, note: str = "") -> None:
        self.figures[name] = value
        print(f"{name:32} {value:10.2f} {unit:16} {note}", flush=True)

    def run(self) -> None:
        self.ceiling()
        start = perf_counter()
        learner = Learner(self.size, 1, self.device, dtype="bfloat16", **self.adapters)
        count = sum(p.numel() for p in learner.policy.module.parameters())
        trained = sum(p.numel() for p in learner.policy.module.parameters() if p.requires_grad)
        self.report("build_s", perf_counter() - start, "s", f"{count:,} parameters, {trained:,} of them trained")
        self.peak_gib()
        self.training(learner)
        self.deciding("oft", learner.policy, learner.env)
        del learner
        self.peak_gib()
        env = synthetic.env_info(cameras=1, pixels=PIXELS.get(self.size, 64), state_dim=0, action_dim=ACTION_DIM)
        place = Context(env=env, chunk=1, temperature=TEMPERATURE, device=self.device)
        policy = openvla.build(OpenVLAARConfig(preset=self.size, dtype="bfloat16"), place)
        self.deciding("autoregressive", policy, env)

    def ceiling(self) -> None:
        side = MATRIX[self.size]
        a, b = (torch.randn(side, side, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        rate = 2 * side**3 / self.seconds(lambda: a @ b)
        self.report("ceiling_tflops", rate / 1e12, "TFLOP/s", f"bfloat16 product of {side} x {side}")

    def training(self, learner: Learner) -> None:
        best = 0.0
        for rows in MICRO_BATCHES[self.size]:
            try:
                learner.record(rows)
                with FlopCounterMode(display=False) as counter:
                    learner.step()
                rate = rows / self.seconds(learner.step)
            except torch.OutOfMemoryError:
                print(f"micro-batch {rows}: out of memory; --recompute selective needs less", flush=True)
                break
            finally:
                learner.optimiser.zero_grad(set_to_none=True)
            work = counter.get_total_flops() / rows
            share = rate * work / 1e12 / self.figures["ceiling_tflops"]
            note = f"{self.peak_gib():.1f} GiB, {work / 1e12:.2f} TFLOP a sample, {share:.0%} of the ceiling"
            self.report(f"train_samples_per_s_{rows}", rate, "samples/s", note)
            if rate > best:
                best, self.figures["ceiling_share"] = rate, share
        beside = f"{best / PUBLISHED:.2f} x" if self.size == "full" else "not comparable with"
        self.report("train_samples_per_s", best, "samples/s", f"{beside} the {PUBLISHED} of AcceRL on one H200")

    def deciding(self, name: str, policy: Any, env: Any) -> None:
        for rows in DECISION_ROWS:
            obs, keys = synthetic.observation(env, rows), noise(rows)
            seconds = self.seconds(lambda o=obs, k=keys: policy.sample_chunk(o, k, False))
            self.report(f"{name}_decisions_per_s_{rows}", rows / seconds, "decisions/s", f"{self.peak_gib():.1f} GiB")


def refuse(size: str) -> str | None:
    """What this machine lacks."""
    if size != "full":
        return None
    if not torch.cuda.is_available():
        return f"the full size needs a CUDA device with {NEEDED_GIB} GiB free, and PyTorch sees none; try --size tiny"
    name, free = torch.cuda.get_device_name(), torch.cuda.mem_get_info()[0] / 2**30
    if free < NEEDED_GIB:
        return f"the full size needs {NEEDED_GIB} GiB free on the device, {name} has {free:.1f}; try --size tiny"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(MICRO_BATCHES), default="full")
    parser.add_argument("--rank", type=int, default=32, help="of the adapters")
    parser.add_argument("--recompute", default="off", choices=RECOMPUTE, help="less memory, more work")
    parser.add_argument("--repeats", type=int, default=5, help="timed calls of each measurement")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if (lack := refuse(options.size)) is not None:
        sys.exit(lack)
    bench = Bench(options.size, options.rank, options.recompute, options.repeats)
    where = torch.cuda.get_device_name() if bench.device == "cuda" else "CPU, which checks the code and no more"
    print(f"{where}; PyTorch {torch.__version__}")
    bench.run()
    if options.json:
        options.json.write_text(json.dumps(bench.figures, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""What an algorithm costs: advantages, and the loss forward and backward to the log-probs, per learner step.

    python benchmarks/algorithms.py [--steps 3] [--json FILE]

On the built-in simulator with the tiny model (0.57 million parameters) in this process: a real model only makes the
learner step longer, and the algorithm's part stays. Medians of the steps. The last column is the time that advantages
and a loss alone would take for one LIBERO rollout of RLinf-VLA's table 3 (512 episodes of 64 chunks of 8 x 7 tokens).
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from time import perf_counter
from typing import Any

import attrs
import torch

from vla_rl.core.hookspecs import Algorithm
from vla_rl.core.run.loop import collect_rollout, finish_step, flow_of
from vla_rl.core.run.selection import take_columns
from vla_rl.core.run.state import State
from vla_rl.core.spec.spec import parse_spec
from vla_rl.core.types import Batch, Scores
from vla_rl.runtime.start import start
from vla_rl.testing import synthetic

ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"type": "grpo"},
    "ppo": {"type": "ppo", "advantage": "action"},
    "gipo": {"type": "gipo"},
}


def seconds_of_loss(algorithm: Algorithm, scores: Scores, batch: Batch) -> float:
    """Return the seconds of the loss on detached scores, forward and backward."""
    leaf = scores.log_probs.detach().requires_grad_()
    values = None if scores.values is None else scores.values.detach().requires_grad_()
    detached = attrs.evolve(scores, log_probs=leaf, entropy=scores.entropy.detach(), values=values)
    before = perf_counter()
    algorithm.loss(detached, batch).total.backward()
    return perf_counter() - before


def share_of_a_step(algorithm: dict[str, Any], steps: int) -> tuple[float, float]:
    """-> (seconds of a learner step, share of it that the algorithm takes)."""
    critic = {} if algorithm["type"] == "grpo" else {"value_head": {"hidden": [128], "detach": True}}
    spec = parse_spec(
        {
            "name": "algorithms",
            "model": {"type": "openvla_oft", "checkpoint": "builtin:tabletop", **critic},
            "env": {"type": "tabletop", "num_envs": 64},
            "rollout": {"chunk": 4, "episodes": 64, "group_size": 1 if critic else 8},
            "algorithm": algorithm,
            "runtime": {"backend": "local"},
            "train": {"steps": steps + 1, "lr": 1e-4, "micro_batch": 64, "global_batch": 64},
            "hooks": [],
        }
    )
    runtime = start(spec)
    try:
        learner = runtime.backend.worker.roles["learner"]
        judge = runtime.algorithm
        losses: list[float] = []

        class Timed:
            """The learner's algorithm, whose losses are computed once more by themselves."""

            needs = judge.needs

            def loss(self, scores: Scores, batch: Batch) -> Any:
                losses.append(seconds_of_loss(judge, scores, batch))
                return judge.loss(scores, batch)

        learner.trainers.collected._component._algorithm = Timed()  # noqa: SLF001
        shares, times, flow = [], [], flow_of(spec, State())
        for step in range(steps + 1):
            rollout, kept_columns, _ = collect_rollout(runtime, flow, step + 1)
            keep = kept_columns.nonzero().flatten().numpy()
            kept = runtime.samples.prepare(take_columns(rollout, keep), keep)
            before = perf_counter()
            advantages = judge.advantages(kept)
            own = perf_counter() - before
            losses.clear()
            total = runtime.learners.train(kept, advantages)["time/learner"] - sum(losses)
            finish_step(runtime, runtime.fleet.version + 1, True)
            flow.finish_step()
            if step:  # the first warms up
                shares.append((own + sum(losses)) / (own + total))
                times.append(total)
        return statistics.median(times), statistics.median(shares)
    finally:
        runtime.workers.close()


def milliseconds_of_a_large_rollout(algorithm: dict[str, Any], repeats: int) -> tuple[float, float]:
    """-> (advantages of 512 trajectories of 64 chunks of 8 actions, loss of a micro-batch of 32 chunks of 8 x 7)."""
    from vla_rl.runtime.placement.components import build_algorithm, values_for

    spec = parse_spec(
        {
            "name": "algorithms",
            "plugins": ["vla_rl.testing.scripted"],
            "model": {"type": "linear"},
            "env": {"type": "scripted", "num_envs": 8},
            "rollout": {"chunk": 8, "episodes": 8, "group_size": 8},
            "algorithm": algorithm,
            "train": {"steps": 1, "lr": 1e-3, "micro_batch": 32},
        }
    )
    made = build_algorithm(spec)
    values = values_for(made)
    rollout = synthetic.rollout(chunk_steps=64, groups=64, group_size=8, chunk=8, tokens=7, values=values)
    part = synthetic.rollout(chunk_steps=1, groups=4, group_size=8, chunk=8, tokens=7, values=values)
    batch = synthetic.batch(part, made.advantages(part))
    critic = None if batch.values is None else batch.values + 0.1
    scores = Scores(log_probs=batch.log_probs + 0.1, entropy=torch.ones(batch.log_probs.shape), values=critic)
    advantages, loss = [], []
    for _ in range(repeats + 1):
        before = perf_counter()
        made.advantages(rollout)
        advantages.append(1000 * (perf_counter() - before))
        loss.append(1000 * seconds_of_loss(made, scores, batch))
    return statistics.median(advantages[1:]), statistics.median(loss[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3, help="learner steps, after one that warms up")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    print(f"{'':>6} {'learner step':>13} {'algorithm':>10} {'advantages, large':>18} {'loss, 32 chunks':>16}")
    for name, algorithm in ALGORITHMS.items():
        seconds, share = share_of_a_step(algorithm, options.steps)
        advantages, loss = milliseconds_of_a_large_rollout(algorithm, 9)
        figures |= {
            f"{name}_learner_step_s": seconds,
            f"{name}_algorithm_share": share,
            f"{name}_advantages_large_ms": advantages,
            f"{name}_loss_32_chunks_ms": loss,
        }
        print(f"{name:>6} {seconds:>11.2f} s {share:>9.2%} {advantages:>15.1f} ms {loss:>13.2f} ms")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()

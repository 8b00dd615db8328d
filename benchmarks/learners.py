"""Learner ranks and the weights that they publish, on CPU.

    python benchmarks/learners.py [--parts publication ranks] [--repeats 15] [--json FILE]

publication: 100 MB of trainable weights in 64 tensors from a learner to a policy in another process, by
`RunLearners.publish`, against one array of that size that an actor gives out and another copies into its own memory:
the least that a copy through Ray's object store costs. Both alternate; medians, and the median ratio of neighbours.

ranks: samples/s of OpenVLA-OFT `tiny` learners, each a process with one thread: 1, 2 and 4 of them, as replicas and
with full sharding; the same samples, optimiser steps and (checked) losses for all. In addition, the share of an update
that micro-batches take to be put together, which is what reading ahead could hide.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from attrs import frozen

from vla_rl.core.catalogue import build
from vla_rl.core.contexts import AlgorithmContext, ModelContext
from vla_rl.core.declarations import ModelPlugin
from vla_rl.core.hookspecs import Algorithm
from vla_rl.core.randomness import Noise
from vla_rl.core.spec.sections import TrainSpec
from vla_rl.core.spec.spec import make_component, parse_spec
from vla_rl.core.trainers import ModelInputs, OptimizerStep
from vla_rl.runtime.messages.learning import SampleBatch
from vla_rl.runtime.start import start
from vla_rl.runtime.workers.learner.learner import Learner
from vla_rl.runtime.workers.learner.trainers import Trainers
from vla_rl.testing import synthetic
from vla_rl.testing.linear import LinearModel
from vla_rl.toolkit.trainers.context import TrainerContext
from vla_rl.toolkit.trainers.trained_model import TrainedModel

MEGABYTES, TENSORS = 100, 64
CHUNK, SAMPLES, MICRO_BATCH, UPDATES = 8, 64, 8, 3
BAR = 1.5


# --------------------------------------------------------------------------------------------------- publication


@frozen(kw_only=True)
class BulkyConfig:
    dtype: str = "float32"
    """Data type of the further weights."""


class Bulky(LinearModel):
    """A linear policy with further weights, which nothing uses."""

    def __init__(self, config: BulkyConfig, context: ModelContext) -> None:
        assert context.env is not None
        super().__init__(context.env, context.chunk)
        dtype = getattr(torch, config.dtype)
        size = MEGABYTES * 10**6 // TENSORS // dtype.itemsize
        self.module.bulk = torch.nn.ParameterList(torch.randn(size).to(dtype) for _ in range(TENSORS))


vla_rl_plugins = {"model": {"bulky": ModelPlugin(config=BulkyConfig, build=Bulky, summary="100 MB of weights")}}


class Copier:
    """Has an array, and memory for another's."""

    def __init__(self) -> None:
        self.array = np.random.default_rng(0).integers(0, 256, MEGABYTES * 10**6, dtype=np.uint8)

    def give(self) -> Any:
        return self.array

    def take(self, array: Any) -> None:
        np.copyto(self.array, array)


def publication(dtype: str, repeats: int, check: bool = False) -> tuple[float, float, float]:
    """-> (seconds of a publication, of the copy, ratio)."""
    import ray

    spec = parse_spec(
        {
            "name": "publication",
            "plugins": ["vla_rl.testing.scripted", "vla_rl.testing.slot_placement", str(Path(__file__).resolve())],
            "model": {"type": "bulky", "dtype": dtype},
            "env": {"type": "scripted", "num_envs": 4},
            "rollout": {"chunk": 1, "episodes": 4},
            "algorithm": {"type": "ppo"},
            "placement": {"type": "slots"},
            "runtime": {"check_weights": check},
            "train": {"steps": 1, "lr": 1e-3, "micro_batch": 4},
            "hooks": [],
        }
    )
    runtime = start(spec)
    try:
        actor = ray.remote(num_cpus=0)(Copier)
        giver, taker = actor.remote(), actor.remote()
        ours, plain = [], []
        for _ in range(repeats + 2):
            before = perf_counter()
            runtime.learners.publish(0)
            between = perf_counter()
            ray.get(taker.take.remote(giver.give.remote()))
            ours.append(between - before)
            plain.append(perf_counter() - between)
        ours, plain = ours[2:], plain[2:]  # the store's memory is touched for the first time
        ratio = statistics.median(a / b for a, b in zip(ours, plain, strict=True))
        return statistics.median(ours), statistics.median(plain), ratio
    finally:
        runtime.workers.close()


# --------------------------------------------------------------------------------------------------------- ranks


def trainers_of(algorithm: Algorithm) -> Callable[[TrainedModel], Trainers]:
    """The trainers of a run by this algorithm."""

    def make(trained: TrainedModel) -> Trainers:
        training = TrainerContext(chunk=CHUNK, trained=trained, algorithm=algorithm, heartbeat=lambda: None)
        built = [
            build("trainer", name, make_component("trainer", name).config, training, ())
            for name in ("policy_gradient", "behaviour_cloning")
        ]
        return Trainers(*built)

    return make


def rank_of(world: int, sharding: str, rank: int, address: str) -> dict[str, Any]:
    """One learner's updates. -> seconds of the fastest, loss of each, share of collating."""
    torch.set_num_threads(1)
    info = synthetic.env_info(cameras=1, pixels=64, state_dim=0, action_dim=7)
    place = ModelContext(env=info, chunk=CHUNK, values="chunk")
    model = build("model", "openvla_oft", make_component("model", "openvla_oft", preset="tiny").config, place, ())
    algorithm = build("algorithm", "ppo", make_component("algorithm", "ppo").config, AlgorithmContext(chunk=CHUNK), ())
    rows = SAMPLES // world
    obs = synthetic.observation(info, SAMPLES).take(np.arange(rank * rows, (rank + 1) * rows))
    zeros = [0] * rows
    chunk = model.sample_chunk(obs, Noise(0, "benchmark", range(rank * rows, (rank + 1) * rows), zeros, zeros), False)
    heavy = ModelInputs(obs=obs, actions=chunk.actions, extras=chunk.extras)
    drawn = np.random.default_rng(0).standard_normal((2, SAMPLES)).astype(np.float32)
    advantages, returns = drawn[:, rank * rows : (rank + 1) * rows]
    light = {
        "valid": np.ones((rows, CHUNK), bool),
        "log_probs": chunk.log_probs.numpy(),
        "values": chunk.values.numpy(),
        "versions": np.zeros(rows, np.int64),
        "advantages": advantages,
        "weights": np.ones(rows, np.float32),
        "returns": returns,
        "value_weights": np.ones(rows, np.float32),
    }
    train = TrainSpec(steps=9, lr=1e-4, micro_batch=MICRO_BATCH, sharding=sharding)
    role = Learner(
        model,
        trainers_of(algorithm),
        train,
        name="openvla_oft",
        device="cpu",
        world=world,
        info=info,
        acting=False,
        heartbeat=lambda: None,
    )
    role.join_group(address, rank)
    parts = tuple(np.arange(i, i + MICRO_BATCH) for i in range(0, rows, MICRO_BATCH))
    step = OptimizerStep(micro_batches=parts, passes=len(parts), divisor=SAMPLES, value_divisor=SAMPLES)
    ids, none = np.arange(rows), np.zeros(0, np.int64)
    role.buffer.add(0, [SampleBatch(sample_ids=ids, inputs=heavy, final_ids=none, finals=None)])
    refs = np.zeros(rows, np.int64), ids
    seconds, losses = [], []
    for update in range(1, UPDATES + 1):
        before = perf_counter()
        losses.append(role.update(update, refs, light, [step]).sums["loss/total"])
        seconds.append(perf_counter() - before)
    before = perf_counter()
    for _ in role.trainers.collected.batches.iterate_batches(heavy, light, parts, step, 0):
        pass
    collating = perf_counter() - before
    if world > 1:
        torch.distributed.destroy_process_group()
    return {"seconds": min(seconds), "losses": losses, "collating": collating / min(seconds)}


def ranks() -> dict[str, float]:
    figures: dict[str, float] = {}
    wanted: Any = None
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(4, mp_context=multiprocessing.get_context("spawn")) as pool,
    ):
        for world, sharding in ((1, "replicated"), (2, "replicated"), (4, "replicated"), (2, "full"), (4, "full")):
            address = f"file://{folder}/{sharding}{world}"
            results = [r.result() for r in [pool.submit(rank_of, world, sharding, i, address) for i in range(world)]]
            losses = np.sum([result["losses"] for result in results], 0)
            wanted = losses if wanted is None else wanted
            np.testing.assert_allclose(losses, wanted, rtol=0, atol=1e-5)
            rate = SAMPLES / max(result["seconds"] for result in results)
            figures[f"learner_samples_per_s_{sharding}_{world}"] = rate
            share = max(result["collating"] for result in results)
            figures[f"learner_collating_share_{sharding}_{world}"] = share
            print(f"{world} {sharding:11} {rate:8.1f} samples/s   collating {100 * share:5.2f} % of an update")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=["publication", "ranks"], default=["publication", "ranks"])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    if "publication" in options.parts:
        print(f"{MEGABYTES} MB of weights in {TENSORS} tensors between processes (bar: {BAR} copies)")
        for name, dtype, check in (
            ("float32", "float32", False),
            ("bf16", "bfloat16", False),
            ("checked", "float32", True),
        ):
            ours, plain, ratio = publication(dtype, options.repeats, check)
            figures |= {f"publication_ms_{name}": 1e3 * ours, f"publication_ratio_{name}": ratio}
            print(f"{name:8} {1e3 * ours:7.1f} ms   one copy {1e3 * plain:7.1f} ms   ratio {ratio:5.2f}")
    if "ranks" in options.parts:
        print(f"OpenVLA-OFT tiny, {SAMPLES} samples an optimiser step in micro-batches of {MICRO_BATCH}")
        figures |= ranks()
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()

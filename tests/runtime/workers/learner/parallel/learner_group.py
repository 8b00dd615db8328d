"""Learner ranks in separate processes, on recorded data: what `test_parallel_strategies.py` runs there."""

from __future__ import annotations

from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from pathlib import Path

import numpy as np
import torch
from attrs import frozen
from torch import nn
from transfer_ends import stored

from sharding import skip_where_torch_cannot_shard
from updates import Update, policy_gradient, update_of
from vla_rl.core.capabilities import Compilable
from vla_rl.core.catalogue import build
from vla_rl.core.contexts import AlgorithmContext
from vla_rl.core.hookspecs import Algorithm
from vla_rl.core.manager import wrap
from vla_rl.core.randomness import Noise, generator
from vla_rl.core.spec.sections import TrainSpec
from vla_rl.core.spec.spec import make_component
from vla_rl.core.trainers import ImitationStep, ModelInputs
from vla_rl.runtime.messages.learning import SampleBatch, ScoreRequest
from vla_rl.runtime.workers.learner.learner import Learner
from vla_rl.runtime.workers.models import Autocast
from vla_rl.testing import synthetic
from vla_rl.testing.linear import LinearModel
from vla_rl.toolkit.algorithms.statistics import read_all
from vla_rl.toolkit.models.acting.compilation import CompiledBlocks

CHUNK, MICRO_BATCH = 3, 4
INFO = synthetic.env_info(cameras=1, pixels=8, state_dim=6, action_dim=2)


class Residual(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, width), nn.Tanh())
        self.shift: nn.Parameter | None = None

    def forward(self, x):
        shift = 0 if self.shift is None else self.shift.to(x.dtype)
        return x + super().forward(x) + shift


class DeepModel(LinearModel, Compilable):
    """A `LinearModel` behind three residual blocks and a layer that no sample ever uses. A narrow one has a frozen
    float32 number in each block."""

    blocks = (Residual,)

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(INFO, CHUNK, values="chunk")
        self.dtype = dtype
        width = INFO.state_dim
        self.module.blocks = nn.ModuleList(Residual(width) for _ in range(3))
        self.module.unused = nn.Linear(width, 5)
        for name, parameter in self.module.named_parameters():
            draws = generator(1, f"deep/{name}").standard_normal(tuple(parameter.shape), dtype=np.float32)
            parameter.data.copy_(torch.from_numpy(0.3 * draws))
        if dtype != torch.float32:
            self.module.to(dtype)
            for block in self.module.blocks:
                block.shift = nn.Parameter(torch.tensor(1e-3), requires_grad=False)

    def _compute_features(self, obs):
        x = super()._compute_features(obs).to(self.dtype)
        for block in self.module.blocks:
            x = block(x)
        return x

    def _log_softmax(self, features):
        logits = self.module.policy(features).view(-1, CHUNK, self.tokens_per_action, self._bins)
        return torch.log_softmax(logits.float(), -1)

    def _compute_values(self, features):
        return self.module.value_head(features).squeeze(-1).float()


@frozen(kw_only=True)
class Work:
    """What a group does: optimiser steps of `steps` updates from 1, or from where `load` ended."""

    world: int = 1
    sharding: str = "replicated"
    precision: str = "float32"
    dtype: str = "float32"
    """Type of the model's weights."""
    lr: float = 1e-2
    steps: int = 4
    lopsided: bool = False
    """Rank 0 has all samples."""
    global_batch: int | None = 17
    parts: int = 0
    """Number of parts that samples come in; an optimiser step has all of them."""
    acting: bool = False
    """Policies act with the learners' models."""
    imitation: int = 0
    """Optimiser steps of imitation, instead of updates."""
    scoring: bool = False
    """Samples are scored too; rank 0 has most of them."""
    load: Path | None = None
    save: Path | None = None
    compiled: bool = False
    """Blocks are compiled, with aot_eager."""


def update_at(algorithm: Algorithm, work: Work, step: int) -> Update:
    rollout = synthetic.rollout(chunk=CHUNK, values="chunk", groups=4, seed=step).evolve(step=step)
    return update_of(
        algorithm,
        rollout,
        INFO,
        world=work.world,
        micro_batch=MICRO_BATCH,
        global_batch=work.global_batch,
        lopsided=work.lopsided,
    )


def learn(work: Work, rank: int, address: str) -> dict:
    """One rank. -> its part of the loss at each step, gradient norms, whole weights, what it would publish, and how
    many numbers it holds of weights and optimiser."""
    torch.set_num_threads(1)
    algorithm = build("algorithm", "ppo", make_component("algorithm", "ppo").config, AlgorithmContext(chunk=CHUNK))
    narrow = [("precision", Autocast("cpu"))] if work.precision == "bf16" else []
    model = wrap("model", DeepModel(getattr(torch, work.dtype)), "deep", narrow)
    blocks = CompiledBlocks(model.module, model.blocks, backend="aot_eager") if work.compiled else None
    train = TrainSpec(steps=9, lr=work.lr, micro_batch=MICRO_BATCH, max_grad_norm=0.3, sharding=work.sharding)
    role = Learner(
        model,
        policy_gradient(algorithm),
        train,
        name="deep",
        device="cpu",
        world=work.world,
        info=INFO,
        acting=work.acting,
        heartbeat=lambda: None,
    )
    role.join_group(address, rank)
    done = role.load(work.load) if work.load else 0
    losses, norms = [], []
    changed = []
    for step in range(done + 1, work.steps + 1):
        update = update_at(algorithm, work, step)
        result = update.train_in_parts(role, rank, step, work.parts) if work.parts else update.train(role, rank, step)
        losses.append(result.sums.get("loss/total", 0.0))
        norms.append(result.maxima["policy/grad_norm"])
        changed.append(result.statistics["update/weights_changed"])
    if work.imitation:
        heavy = update_at(algorithm, work, 1).heavy
        whole = [np.arange(i % 3, 6 + i) for i in range(work.imitation)]
        shares = [np.array_split(indices, work.world) for indices in whole]
        role.set_demonstrations((heavy.obs, heavy.actions))
        cloned = role.behaviour_cloning_update(
            [
                ImitationStep(
                    number=1, first=0, indices=parts[rank], total=len(all_), most=max(map(len, parts)), lr=1e-2
                )
                for parts, all_ in zip(shares, whole, strict=True)
            ]
        )
        losses.append(cloned.sums["loss/imitation"])
    scored = score(role, update_at(algorithm, work, 1).heavy, rank, work.world) if work.scoring else None
    moments = [
        value for state in role.trained.optimizer.state.values() for value in (state["exp_avg"], state["exp_avg_sq"])
    ]
    held = sum(_local(t).numel() for t in (*role.trained.parameters.values(), *moments))
    acting = None
    if work.acting:
        gathered = {name: p.dtype for name, p in model.module.named_parameters()}
        assert gathered == {name: p.dtype for name, p in DeepModel(model.dtype).module.named_parameters()}
        for _ in range(rank + 1):  # each rank by itself, and not as often as the others
            acting = model.sample_chunk(synthetic.observation(INFO, 2), Noise(0, "test", [0, 1], [0, 0], [0, 0]), False)
    if work.save:
        role.save(work.save / "model", work.save / "learner.pt", work.steps)
    layout = role.weight_layout()
    if rank == 0:
        role.connect_policies(stored(layout))
    memory, _ = role.send_weights(False)
    weights = None
    if memory is not None:
        weights = [(t.name, t.view(torch.from_numpy(memory)).float().numpy()) for t in layout.tensors]
    if work.world > 1:
        torch.distributed.destroy_process_group()
    kinds = {p.dtype for p in (*role.trained.parameters.values(), *moments)}
    return {
        "loss": losses,
        "norm": norms,
        "weights": weights,
        "published": {t.dtype for t in layout.tensors},
        "changed": changed,
        "held": held,
        "acting": acting,
        "kinds": kinds,
        "graphs": None if blocks is None or blocks.failure else blocks.graphs,
        **(scored or {}),
    }


def score(role: Learner, heavy: ModelInputs, rank: int, world: int) -> dict:
    """-> what this rank finds of its share of 10 samples, by place, of which the odd ones have final observations."""
    own = np.array_split(np.arange(10), world) if world == 1 else [np.arange(7), np.arange(7, 10)]
    passes = tuple(-(-max(map(len, parts)) // 2) for parts in (own, [part[part % 2 == 1] for part in own], own))
    places, ended = own[rank], own[rank][own[rank] % 2 == 1]
    part = SampleBatch(sample_ids=places, inputs=heavy.take(places), final_ids=ended, finals=heavy.obs.take(ended + 10))
    role.receive(3, part, True)

    def batches(places):
        return [(np.full(len(part), 3), part) for part in np.split(places, range(2, len(places), 2))]

    recorded = np.zeros((2, CHUNK, role.model.tokens_per_action), np.float32)
    found = role.score_samples(
        ScoreRequest(
            values=batches(places),
            finals=batches(ended),
            log_probs=[(batch, recorded[: len(batch[1])]) for batch in batches(places)],
            passes=passes,
        )
    )
    assert role.release_samples({3: places, 4: places}) == 0
    scored = {"values": found.values, "next_values": found.next_values, "log_probs": found.log_probs}
    return {name: np.concatenate(parts) for name, parts in scored.items()}


def _local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class Groups:
    """Processes that stand ready for the ranks of any group."""

    def __init__(self, pool: ProcessPoolExecutor, folder: Path) -> None:
        self.pool, self.folder, self.done = pool, folder, {}

    def run(self, **work) -> dict:
        """-> losses summed over ranks, and the rest of rank 0; done once for equal work."""
        wanted = Work(**work)
        if wanted.sharding == "full" and wanted.world > 1:
            skip_where_torch_cannot_shard()
        if wanted not in self.done:
            address = f"file://{self.folder}/meet_{len(self.done)}"
            ranks = [self.pool.submit(learn, wanted, rank, address) for rank in range(wanted.world)]
            wait(ranks, timeout=60, return_when=FIRST_EXCEPTION)
            results = [rank.result(timeout=0) for rank in sorted(ranks, key=lambda rank: not rank.done())]
            self.done[wanted] = {
                **results[0],
                "loss": np.sum([result["loss"] for result in results], 0),
                "held": [result["held"] for result in results],
                "changed": [
                    read_all([{"share": of_rank} for of_rank in of_ranks])["share"]
                    for of_ranks in zip(*(result["changed"] for result in results), strict=True)
                ],
                "acting": [result["acting"] for result in results],
                "scored": {
                    name: np.concatenate([result[name] for result in results])
                    for name in ("values", "next_values", "log_probs")
                    if name in results[0]
                },
            }
        return self.done[wanted]

"""The learner role: model, algorithm and optimiser, with exact gradients over all micro-batches and ranks."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from attrs import asdict

from vla_rl.core.errors import UserError
from vla_rl.core.fields import arranged
from vla_rl.core.hookspecs import Algorithm, Demonstrations, VLAModel
from vla_rl.core.spec.sections import TrainSpec
from vla_rl.core.types import Array, Batch, Chunk, EnvInfo, Loss, Observation, Scores
from vla_rl.runtime.comm.interfaces import LearnerInterface
from vla_rl.runtime.comm.process_group import address_of, enter_group, open_door
from vla_rl.runtime.comm.weight_sync import PublishedWeights, WeightPublisher
from vla_rl.runtime.messages.learning import UNNORMALISED, ImitationStep, OptimizerStep, SampleScores, ScoreRequest
from vla_rl.runtime.messages.model_inputs import ModelInputs, SampleBatch, dummy_sample
from vla_rl.runtime.run_folder.env_info import write_env_info
from vla_rl.runtime.workers.learner import optimizer
from vla_rl.runtime.workers.learner.gradient_accumulator import GradientAccumulator, Light, MetricAccumulator
from vla_rl.runtime.workers.learner.parallel.data_parallel import DataParallel, ParallelStrategy
from vla_rl.runtime.workers.learner.sample_buffer import SampleBuffer, ScatteredRows
from vla_rl.runtime.workers.learner.scoring import Scoring
from vla_rl.toolkit.data.samples import InMemoryDataset
from vla_rl.toolkit.models.checkpoints import read_pickled

HeavyRows = ModelInputs | ScatteredRows[ModelInputs]


class Learner(LearnerInterface):
    """One rank of the learners (role "learner")."""

    def __init__(
        self,
        model: VLAModel,
        algorithm: Algorithm,
        train: TrainSpec,
        *,
        name: str,
        device: str,
        world: int,
        info: EnvInfo,
        acting: bool,
        beat: Callable[[], None],
        data: Demonstrations | None = None,
    ):
        """Create the optimiser for a model.

        Args:
            world: number of learners; if there are several, each has to `join`.
            info: description of the env that the model was built for.
            acting: a policy acts with this model between calls.
        """
        self.beat, self.data = beat, data
        self.model, self.algorithm, self.train, self.name = model, algorithm, train, name
        self.device, self.world, self.info, self.acting = device, world, info, acting
        self.rank, self.version = 0, 0
        self.door: socket.socket | None = None
        """Listening socket of rank 0 for the other ranks."""
        self.group: ParallelStrategy = DataParallel(world)
        self.publisher = WeightPublisher()
        self.buffer = SampleBuffer()
        self._start_optimizer()

    def _start_optimizer(self) -> None:
        named = [(n, p) for n, p in self.model.module.named_parameters() if p.requires_grad]
        if not named:
            raise UserError(f"model {self.name!r} has no trainable parameters")
        self.parameters = dict(named)
        parts = [] if self.model.critic is None else [id(p) for p in self.model.critic.parameters()]
        self.of_critic = frozenset(n for n, p in named if id(p) in parts)
        critic = [p for n, p in named if n in self.of_critic]
        actor = [p for n, p in named if n not in self.of_critic]
        self.optimizer = optimizer.built(actor, critic, self.train)
        self.fed = self._begin()

    def open_door(self, host: str) -> str:
        """Open the listening socket of rank 0 at this address of the machine. Return the address for `join`."""
        self.door = open_door(host)
        return address_of(self.door)

    def join(self, address: str, rank: int) -> None:
        if self.world == 1:
            return
        backend = "nccl" if self.device.startswith("cuda") else "gloo"
        enter_group(backend, address, rank, self.world, self.door)
        self.rank = rank
        if self.train.sharding == "full":
            from vla_rl.runtime.workers.learner.parallel.fsdp import shard

            self.group, self.filler = shard(self.model, self.info, self.device, self.world)
            self._start_optimizer()
            self._let_act()

    def _let_act(self) -> None:
        if self.acting:
            self.group.gather()

    # ------------------------------------------------------------------------------------------------- learning

    def update(
        self, step: int, heavy: HeavyRows | None, light: Light, steps: Sequence[OptimizerStep]
    ) -> dict[str, Any]:
        """Make all optimiser steps of one iteration.

        Args:
            heavy, light: this rank's samples in one order: model inputs, and arrays [B, ...] of `Batch`'s fields.
        Returns: "sums", "maxima" and "statistics" of the algorithm's metrics (sums are means over the optimiser steps
        once they are added over ranks) and "seconds".
        """
        before = perf_counter()
        self.group.release()
        optimizer.set_rates(self.optimizer, self.train, self.train.factor(step))
        tally, norms = MetricAccumulator({"loss/total": torch.zeros((), device=self.device)}), list[float]()
        if any(optimizer_step.accumulated for optimizer_step in steps):
            before -= self.fed.seconds
            heavy, light, steps = self.fed.again(steps)
        for optimizer_step in steps:
            if optimizer_step.accumulated:
                total = self.fed.divide(optimizer_step, tally, len(steps))
            else:
                total = self._passes(heavy, light, optimizer_step, tally, len(steps))
            norms.append(self._optimizer_step(f"step {step}", total, step <= self.train.critic_warmup_steps))
        self.fed = self._begin()  # frees the parts that it kept
        self._let_act()
        self.version += 1
        return {
            "sums": {name: float(value) for name, value in tally.sums.items()},
            "maxima": {**{n: float(v) for n, v in tally.maxima.items()}, "policy/grad_norm": max(norms, default=0.0)},
            "statistics": {name: statistic.cpu() for name, statistic in tally.statistics.items()},
            "seconds": perf_counter() - before,
        }

    def forward_backward(
        self, heavy: ModelInputs | None, light: Light, micro_batches: Sequence[Array], passes: int, first: bool
    ) -> None:
        """Run the passes of a part of a training step's samples, before the rest is there. `update` makes the optimiser
        step.

        Args:
            heavy, light: as in `update`.
            micro_batches, passes: as in `OptimizerStep`.
            first: this is the training step's first part.
        """
        self.group.release()
        if first:
            self.optimizer.zero_grad(set_to_none=True)
            self.fed = self._begin()
        with self.fed.part(heavy, light, micro_batches, passes):
            for indices in micro_batches:
                assert heavy is not None
                self.beat()
                batch = self.collate(heavy, light, indices, UNNORMALISED)
                self.fed.add(self._scores(batch), batch)
            for _ in range(self._idle(passes, len(micro_batches))):
                self.beat()
                batch = self._blank_batch(light, UNNORMALISED)
                self.fed.add(self._scores(batch), batch, counts=False)

    def _begin(self) -> GradientAccumulator:
        return GradientAccumulator(self.parameters, self.algorithm.loss, keep=self.train.epochs > 1)

    def _passes(
        self, heavy: HeavyRows | None, light: Light, optimizer_step: OptimizerStep, tally: MetricAccumulator, steps: int
    ) -> torch.Tensor:
        """Run forward and backward passes of all micro-batches of one of `steps` optimiser steps. Return the loss."""
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.device)
        for indices in optimizer_step.micro_batches:
            assert heavy is not None
            self.beat()
            batch = self.collate(heavy, light, indices, optimizer_step)
            loss = self._loss(batch)
            loss.total.backward()
            total = total + loss.total.detach()
            tally.add_sums(loss.metrics, steps)
            tally.add(loss.maxima, loss.statistics)
        tally.add_sums({"loss/total": total}, steps)
        for _ in range(self._idle(optimizer_step.passes, len(optimizer_step.micro_batches))):
            self.beat()
            self._loss(self._blank_batch(light, optimizer_step)).total.backward()
        return total

    def score(self, request: ScoreRequest) -> SampleScores:
        self.group.release()
        filler = self.filler if self.group.lockstep else None
        found = Scoring(self.model, self.group, self.buffer, filler, self.beat).answer(request)
        self._let_act()
        return found

    def receive(self, policy: int, part: SampleBatch, copied: bool) -> None:
        self.buffer.add(policy, [deepcopy(part) if copied else part])

    def release(self, places: Mapping[int, Array]) -> int:
        self.buffer.release(places)
        return self.buffer.bytes

    def sample_bytes(self) -> int:
        if self.group.lockstep:
            return self.filler.nbytes
        obs, chunk = dummy_sample(self.model, self.info)
        return ModelInputs(obs=obs, actions=chunk.actions, extras=chunk.extras).nbytes

    def skip_version(self) -> None:
        self.version += 1

    def set_demonstrations(self, *demonstrations: tuple[Observation, Array] | None) -> None:
        there = [d for d in demonstrations if d is not None]
        self.data = InMemoryDataset(there) if there else None

    def behaviour_cloning_update(self, steps: Sequence[ImitationStep]) -> float:
        self.group.release()
        size = self.train.micro_batch
        parts = [[s.indices[i : i + size] for i in range(0, len(s.indices), size)] for s in steps]
        losses = [torch.zeros((), device=self.device)]
        coming = self._read_ahead([part for of_step in parts for part in of_step])
        for step, of_step in zip(steps, parts, strict=True):
            optimizer.set_rate(self.optimizer, step.lr)
            self.optimizer.zero_grad(set_to_none=True)
            total = torch.zeros((), device=self.device)
            for part in of_step:
                self.beat()
                loss = self._imitation_loss(*next(coming)) * len(part)
                (loss / step.total).backward()
                total = total + loss.detach()
            for _ in range(self._idle(-(-step.most // size), len(of_step))):
                (0 * self._imitation_loss(self.filler.obs, self.filler.actions)).backward()
            self._optimizer_step("imitation", total)
            losses.append(total)
        self._let_act()
        return float(torch.stack(losses).sum())

    def _read_ahead(self, parts: Sequence[Array]) -> Iterator[tuple[Observation, Any]]:
        """Yield the demonstrations with these indices; the next ones are read while the last ones are trained on."""
        if self.data is None or not parts:
            return
        with ThreadPoolExecutor(1) as reader:
            following = reader.submit(self.data.read_samples, parts[0])
            for part in parts[1:]:
                ready, following = following, reader.submit(self.data.read_samples, part)
                yield ready.result()
            yield following.result()

    def forget_demonstrations(self) -> None:
        self.data = None
        self.optimizer.state.clear()

    def _optimizer_step(self, where: str, loss: torch.Tensor, critic_only: bool = False) -> float:
        for name, parameter in self.parameters.items():
            if critic_only and name not in self.of_critic:
                parameter.grad = None
        chosen = [p for n, p in self.parameters.items() if n in self.of_critic or not critic_only]
        return optimizer.step(self.optimizer, chosen, self.group, self.train.max_grad_norm, loss, self.name, where)

    def _idle(self, passes: int, own: int) -> int:
        """Return the number of dummy batches that the rank runs, with weight 0, while others have samples left."""
        return passes - own if self.group.lockstep else 0

    def _loss(self, batch: Batch) -> Loss:
        return self.algorithm.loss(self._scores(batch), batch)

    def _scores(self, batch: Batch) -> Scores:
        scores = self.group.run(lambda: asdict(self.model.chunk_log_probs(batch.obs, batch.chunk), recurse=False))
        return Scores(**scores)

    def _imitation_loss(self, obs: Observation, actions: Any) -> torch.Tensor:
        return self.group.run(lambda: self.model.imitation_loss(obs, actions))

    def _blank_batch(self, light: Light, optimizer_step: OptimizerStep) -> Batch:
        zeros = {n: None if a is None else np.zeros((1, *a.shape[1:]), a.dtype) for n, a in light.items()}
        return self.collate(self.filler, zeros, np.zeros(1, np.int64), optimizer_step)

    def collate(self, rows: HeavyRows, light: Light, indices: Array, optimizer_step: OptimizerStep) -> Batch:
        """Build one micro-batch of the rank's samples."""
        heavy = rows.take(indices)

        fields: dict[str, Any] = {
            name: None if array is None else torch.tensor(array[indices], device=self.device)
            for name, array in light.items()
            if name not in ("counts", "value_counts")
        }
        fields["lag"] = self.version - fields.pop("versions")
        fields["weights"] = fields["weights"] / optimizer_step.divisor
        if fields["value_weights"] is not None:
            fields["value_weights"] = fields["value_weights"] / optimizer_step.value_divisor
        chunk = Chunk(
            actions=heavy.actions, log_probs=fields["log_probs"], values=fields["values"], extras=heavy.extras
        )
        reference = None
        if self.algorithm.needs.reference:
            with torch.no_grad():
                reference = self.group.run(lambda: self.model.reference_log_probs(heavy.obs, chunk))
        return Batch(obs=heavy.obs, chunk=chunk, reference_log_probs=reference, **arranged(Batch, fields))

    # -------------------------------------------------------------------------------------- weights and state

    def weights(self, check: bool) -> PublishedWeights | None:
        with self._whole() as mine:
            return self.publisher.publish(self.model, self.version, check) if mine else None

    def save(self, model_folder: Path | None, state_file: Path | None) -> None:
        with self._whole() as mine:
            if mine and model_folder is not None:
                self.model.save(model_folder)
                write_env_info(model_folder.parent, self.info)
        if state_file is not None and (self.rank == 0 or self.group.lockstep):
            weights = {name: self.group.whole(tensor) for name, tensor in self.parameters.items()}
            moments = self.optimizer.state_dict()
            moments["state"] = _each(lambda value, _: self.group.whole(value), moments["state"])
            if self.rank == 0:
                torch.save({"weights": weights, "optimizer": moments, "version": self.version}, state_file)

    def load(self, state_file: Path) -> int:
        state = read_pickled(state_file, ("weights", "optimizer", "version"))
        have, want = set(state["weights"]), set(self.parameters)
        if have != want:
            raise UserError(
                f"{state_file} holds the weights of another model: missing {sorted(want - have)[:5]}, "
                f"unexpected {sorted(have - want)[:5]}"
            )
        self.group.release()
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                if parameter.shape != state["weights"][name].shape:
                    raise UserError(
                        f"{state_file}: {name} has shape {tuple(state['weights'][name].shape)}, "
                        f"the model has {tuple(parameter.shape)}"
                    )
                parameter.copy_(self.group.share(state["weights"][name], parameter))
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        moments = state["optimizer"]
        moments["state"] = _each(lambda value, i: self.group.share(value, parameters[i]), moments["state"])
        self.optimizer.load_state_dict(moments)
        for group in self.optimizer.param_groups:
            group["weight_decay"] = self.train.weight_decay
        self.version = int(state["version"])
        self._let_act()
        return self.version

    @contextmanager
    def _whole(self) -> Iterator[bool]:
        """Context in which the module holds full weights, to be saved or sent. Yields whether this rank does it: the
        first.
        """
        self.group.release()
        with self.group.whole_weights():
            yield self.rank == 0
        self._let_act()


def _each(change: Callable[[Any, int], Any], state: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return an optimiser's state with `change` applied to every value and the index of its parameter."""
    return {i: {name: change(value, i) for name, value in of_one.items()} for i, of_one in state.items()}

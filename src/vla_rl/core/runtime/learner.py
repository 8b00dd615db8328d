"""The learner role: model, algorithm and optimiser; sums exact gradients over micro-batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from attrs import frozen

from vla_rl.core.demonstrations import Held
from vla_rl.core.errors import UserError
from vla_rl.core.hookspecs import Algorithm, Demonstrations, VLAModel
from vla_rl.core.runtime.heavy import Heavy
from vla_rl.core.runtime.imitation import ImitationStep
from vla_rl.core.sections import Schedule, TrainSpec
from vla_rl.core.statistics import Statistic
from vla_rl.core.types import Batch, Chunk, Observation, to_numpy

Array = np.ndarray[Any, Any]
CRITIC = "value_head."


@frozen(kw_only=True)
class OptimizerStep:
    """One rank's share of one optimiser step; the divisors count all ranks, so summed gradients are exact means."""

    micro_batches: tuple[Array, ...]
    """int64 [B] each: indices into the rank's samples; none: the rank only joins the reduction."""
    divisor: float
    """Sum of the policy loss's counts over the whole optimiser step."""
    value_divisor: float


class LearnerRole:
    def __init__(
        self,
        model: VLAModel,
        algorithm: Algorithm,
        train: TrainSpec,
        *,
        name: str,
        device: str,
        world: int,
        beat: Callable[[], None],
        data: Demonstrations | None = None,
    ):
        self.beat, self.data = beat, data
        self.model, self.algorithm, self.train, self.name = model, algorithm, train, name
        self.device, self.world, self.version = device, world, 0
        named = [(n, p) for n, p in model.module.named_parameters() if p.requires_grad]
        if not named:
            raise UserError(f"model {name!r} has no trainable parameters")
        self.parameters = dict(named)
        critic = [p for n, p in named if n.startswith(CRITIC)]
        actor = [p for n, p in named if not n.startswith(CRITIC)]
        groups = [{"params": actor}, *([{"params": critic}] if critic else [])]  # rates are set by each update
        self.optimizer = torch.optim.AdamW(groups, lr=train.lr, weight_decay=train.weight_decay)

    # ------------------------------------------------------------------------------------------------- learning

    def update(
        self, step: int, heavy: Heavy | None, light: Mapping[str, Array | None], steps: Sequence[OptimizerStep]
    ) -> dict[str, Any]:
        """All optimiser steps of one iteration.

        Args:
            heavy, light: this rank's samples in one order; light holds arrays [B, ...] of `Batch`'s fields.
        Returns: "sums", "maxima" and "statistics" of the algorithm's metrics (sums are means over the optimiser steps
            once added over ranks) and "seconds".
        """
        before = perf_counter()
        self._set_rates(schedule(self.train, step))
        sums: dict[str, torch.Tensor] = {}
        maxima: dict[str, torch.Tensor] = {}
        statistics: dict[str, Statistic] = {}
        norms: list[float] = []
        for optimizer_step in steps:
            self.optimizer.zero_grad(set_to_none=True)
            for indices in optimizer_step.micro_batches:
                assert heavy is not None
                self.beat()
                batch = self._batch(heavy.take(indices), light, indices, optimizer_step)
                loss = self.algorithm.loss(self.model.chunk_log_probs(batch.obs, batch.chunk), batch)
                loss.total.backward()
                for name, value in {"loss/total": loss.total.detach(), **loss.metrics}.items():
                    sums[name] = sums.get(name, torch.zeros((), device=value.device)) + value / len(steps)
                for name, value in loss.maxima.items():
                    maxima[name] = torch.maximum(maxima[name], value) if name in maxima else value
                for name, statistic in loss.statistics.items():
                    statistics[name] = statistics[name] + statistic if name in statistics else statistic
            norms.append(self._optimizer_step(f"step {step}", step <= self.train.critic_warmup_steps))
        self.version += 1
        return {
            "sums": {name: float(value) for name, value in sums.items()},
            "maxima": {**{name: float(v) for name, v in maxima.items()}, "policy/grad_norm": max(norms, default=0.0)},
            "statistics": {name: statistic.cpu() for name, statistic in statistics.items()},
            "seconds": perf_counter() - before,
        }

    def hold(self, *demonstrations: tuple[Observation, Array] | None) -> None:
        """Keep this rank's demonstrations for `imitate`."""
        there = [d for d in demonstrations if d is not None]
        self.data = Held(there) if there else None

    def imitate(self, steps: Sequence[ImitationStep]) -> float:
        """Optimiser steps of behaviour cloning, in micro-batches; -> sum of the losses of this rank's samples."""
        size = self.train.micro_batch
        parts = [[s.indices[i : i + size] for i in range(0, len(s.indices), size)] for s in steps]
        losses = [torch.zeros((), device=self.device)]
        coming = self._read_ahead([part for of_step in parts for part in of_step])
        for step, of_step in zip(steps, parts, strict=True):
            self._set_learning_rate(step.lr)
            self.optimizer.zero_grad(set_to_none=True)
            for part in of_step:
                self.beat()
                loss = self.model.imitation_loss(*next(coming)) * len(part)
                (loss / step.total).backward()
                losses.append(loss.detach())
            self._optimizer_step("imitation")
        return float(torch.stack(losses).sum())

    def _read_ahead(self, parts: Sequence[Array]) -> Iterator[tuple[Observation, Any]]:
        """These samples of the demonstrations, the next being read while the last are trained on."""
        if self.data is None or not parts:
            return
        with ThreadPoolExecutor(1) as reader:
            following = reader.submit(self.data.read_samples, parts[0])
            for part in parts[1:]:
                ready, following = following, reader.submit(self.data.read_samples, part)
                yield ready.result()
            yield following.result()

    def forget_imitation(self) -> None:
        """Free the demonstrations and forget the optimiser's moments."""
        self.data = None
        self.optimizer.state.clear()

    def _set_learning_rate(self, lr: float) -> None:
        """One rate for all parameters."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def _set_rates(self, factor: float) -> None:
        rates = (self.train.lr, self.train.lr if self.train.value_lr is None else self.train.value_lr)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=False):
            group["lr"] = rate * factor

    def _optimizer_step(self, where: str, critic_only: bool = False) -> float:
        for name, parameter in self.parameters.items():
            if critic_only and not name.startswith(CRITIC):
                parameter.grad = None
        parameters = [p for n, p in self.parameters.items() if n.startswith(CRITIC) or not critic_only]
        if self.world > 1:
            _sum_gradients(parameters)
        limit = self.train.max_grad_norm
        norm = torch.nn.utils.clip_grad_norm_(parameters, limit if limit is not None else float("inf"))
        if not bool(torch.isfinite(norm)):
            raise UserError(
                f"the gradient of model {self.name!r} is not finite in {where}; the weights are unchanged. "
                f"Lower train.lr or train.max_grad_norm, and look for extreme rewards or advantages"
            )
        self.optimizer.step()
        return float(norm)

    def _batch(
        self, heavy: Heavy, light: Mapping[str, Array | None], indices: Array, optimizer_step: OptimizerStep
    ) -> Batch:
        def tensor(name: str) -> Any:
            array = light[name]
            return None if array is None else torch.tensor(array[indices], device=self.device)

        log_probs, values, value_weights = tensor("log_probs"), tensor("values"), tensor("value_weights")
        chunk = Chunk(actions=heavy.actions, log_probs=log_probs, values=values, trace=heavy.trace)
        reference = None
        if "reference" in self.algorithm.needs:
            with torch.no_grad():
                reference = self.model.reference_log_probs(heavy.obs, chunk)
        return Batch(
            obs=heavy.obs,
            chunk=chunk,
            valid=tensor("valid"),
            log_probs=log_probs,
            values=values,
            advantages=tensor("advantages"),
            weights=tensor("weights") / optimizer_step.divisor,
            returns=tensor("returns"),
            value_weights=None if value_weights is None else value_weights / optimizer_step.value_divisor,
            lag=self.version - tensor("versions"),
            reference_log_probs=reference,
        )

    # -------------------------------------------------------------------------------------- weights and state

    def weights(self) -> list[tuple[str, Array]]:
        """Trainable weights as NumPy arrays, for policies in other processes."""
        return [(name, to_numpy(tensor.float())) for name, tensor in self.model.weights()]

    def save(self, model_folder: Path | None, state_file: Path | None) -> None:
        """Write the model in its public format, and exact weights with optimiser state and version."""
        if model_folder is not None:
            self.model.save(model_folder)
        if state_file is not None:
            weights = {name: tensor.detach().cpu() for name, tensor in self.parameters.items()}
            state = {"weights": weights, "optimizer": self.optimizer.state_dict(), "version": self.version}
            torch.save(state, state_file)

    def load(self, state_file: Path) -> int:
        """Restore what `save` wrote; -> version of the weights. Raises UserError for weights of another model."""
        state = torch.load(state_file, map_location=self.device, weights_only=True)
        have, want = set(state["weights"]), set(self.parameters)
        if have != want:
            raise UserError(
                f"{state_file} holds the weights of another model: missing {sorted(want - have)[:5]}, "
                f"unexpected {sorted(have - want)[:5]}"
            )
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                if parameter.shape != state["weights"][name].shape:
                    raise UserError(
                        f"{state_file}: {name} has shape {tuple(state['weights'][name].shape)}, "
                        f"the model has {tuple(parameter.shape)}"
                    )
                parameter.copy_(state["weights"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.version = int(state["version"])
        return self.version

    def join(self, address: str, rank: int) -> None:
        """Enter the torch.distributed group of all learners."""
        if self.world > 1:
            backend = "nccl" if self.device.startswith("cuda") else "gloo"
            torch.distributed.init_process_group(backend, init_method=address, rank=rank, world_size=self.world)


def schedule(train: Schedule, step: int) -> float:
    """Factor on the learning rates at `step` (from 1): linear warm-up, then constant or a decay to a twentieth."""
    if step <= train.lr_warmup_steps:
        return step / (train.lr_warmup_steps + 1)
    share = (step - train.lr_warmup_steps) / max(train.steps - train.lr_warmup_steps, 1)
    left = {"constant": 1.0, "linear": 1 - share, "cosine": (1 + math.cos(math.pi * share)) / 2}
    return 0.05 + 0.95 * left[train.lr_schedule]


def _sum_gradients(parameters: Sequence[torch.nn.Parameter]) -> None:
    """All-reduce the gradients of all ranks in one flat buffer; a rank without samples adds zeros."""
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = torch.cat([g.reshape(-1) for g in grads])
    torch.distributed.all_reduce(flat)
    start = 0
    for parameter, grad in zip(parameters, grads, strict=True):
        grad.copy_(flat[start : start + grad.numel()].view_as(grad))
        parameter.grad = grad
        start += grad.numel()

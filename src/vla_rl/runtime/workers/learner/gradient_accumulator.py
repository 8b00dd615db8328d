"""Gradient accumulation for an optimiser step whose samples arrive in parts, and whose divisors are known only at its
end.

A loss is linear in its weights. So the contributions of the policy's weights to gradients and metrics are sums that can
be divided after they were added up, and so are those of the critic's weights. Each has its own divisor. With a critic
there are therefore two sums, and two backward passes for one forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter

import numpy as np
import torch
from attrs import define, evolve, field
from torch import nn

from vla_rl.core.errors import PluginError
from vla_rl.core.types import Array, Batch, Loss, Scores, Statistic
from vla_rl.runtime.messages.learning import OptimizerStep
from vla_rl.runtime.messages.model_inputs import ModelInputs

Light = Mapping[str, "Array | None"]
LINEAR = 1e-3
"""Tolerance of the linearity check, relative to the size of the terms: rounding of sums."""


@define(eq=False)
class MetricAccumulator:
    """Metrics of losses: sums, maxima and statistics over micro-batches."""

    sums: dict[str, torch.Tensor] = field(factory=dict)
    maxima: dict[str, torch.Tensor] = field(factory=dict)
    statistics: dict[str, Statistic] = field(factory=dict)

    def add_sums(self, metrics: Mapping[str, torch.Tensor], divisor: float = 1.0) -> None:
        for name, value in metrics.items():
            self.sums[name] = self.sums.get(name, torch.zeros((), device=value.device)) + value / divisor

    def add(self, maxima: Mapping[str, torch.Tensor], statistics: Mapping[str, Statistic]) -> None:
        for name, value in maxima.items():
            self.maxima[name] = torch.maximum(self.maxima[name], value) if name in self.maxima else value
        for name, statistic in statistics.items():
            found = self.statistics.get(name)
            self.statistics[name] = statistic if found is None else found + statistic


@define(eq=False)
class GradientAccumulator:
    """Gradients and metrics of one optimiser step, divided at its end."""

    parameters: Mapping[str, nn.Parameter]
    """Trainable parameters. Their `grad` holds the policy's sum, and the gradient after `divide`."""
    loss: Callable[[Scores, Batch], Loss]
    keep: bool
    """True where there are further epochs, which need the parts again."""
    seconds: float = field(default=0.0, init=False)
    """Seconds that the parts took."""
    _sums: MetricAccumulator = field(factory=MetricAccumulator, init=False)
    """Sums of the policy's terms, and all metrics that are not sums."""
    _value_sums: MetricAccumulator = field(factory=MetricAccumulator, init=False)
    _value_gradients: dict[str, torch.Tensor | None] = field(factory=dict, init=False)
    _parts: list[tuple[ModelInputs | None, Light, Sequence[Array], int]] = field(factory=list, init=False)
    _checked: bool = field(default=False, init=False)
    _broken: bool = field(default=False, init=False)

    @contextmanager
    def part(
        self, heavy: ModelInputs | None, light: Light, micro_batches: Sequence[Array], passes: int
    ) -> Iterator[None]:
        """Context in which the micro-batches of one part are added. If it fails, the accumulator refuses further
        use.
        """
        before = perf_counter()
        self._check_whole()
        self._broken = True
        yield
        self._broken = False
        if self.keep:
            self._parts.append((heavy, light, micro_batches, passes))
        self.seconds += perf_counter() - before

    def _check_whole(self) -> None:
        if self._broken:
            raise RuntimeError("an earlier part of this training step failed")

    def add(self, scores: Scores, batch: Batch, counts: bool = True) -> None:
        """Run the backward passes of a micro-batch, whose weights are not divided yet.

        Args:
            counts: False for a dummy batch with weight 0, by which a rank keeps step with the others.
        """
        whole, value = self.loss(scores, batch), None
        if batch.value_weights is not None:
            value = self.loss(scores, evolve(batch, weights=torch.zeros_like(batch.weights)))
        if counts and not self._checked:
            self._check_linear(scores, batch, whole, value)
            self._checked = True
        if value is None:
            whole.total.backward()
        # Two backward passes over one graph: the policy's terms into `grad`, then the critic's into the swapped-in
        # sums.
        else:
            (whole.total - value.total).backward(retain_graph=True)
            self._swap()
            value.total.backward()
            self._swap()
        if counts:
            of_values = {} if value is None else _numbers(value)
            policy = {name: number - of_values.get(name, 0.0) for name, number in _numbers(whole).items()}
            self._sums.add_sums(policy)
            self._sums.add(whole.maxima, whole.statistics)  # they are of both losses, so they are added once
            self._value_sums.add_sums(of_values)

    def divide(self, step: OptimizerStep, tally: MetricAccumulator, steps: int) -> torch.Tensor:
        """Turn the sums of gradients into one gradient, and add the metrics to `tally`, which covers `steps` optimiser
        steps. Return the loss.
        """
        self._check_whole()
        for name, parameter in self.parameters.items():
            value = self._value_gradients.get(name)
            if parameter.grad is not None:
                parameter.grad.div_(step.divisor)
            if value is not None:
                value.div_(step.value_divisor)
                parameter.grad = value if parameter.grad is None else parameter.grad.add_(value)
        found = MetricAccumulator({"loss/total": torch.zeros(())})
        found.add_sums(self._sums.sums, step.divisor)
        found.add_sums(self._value_sums.sums, step.value_divisor)
        tally.add_sums(found.sums, steps)
        tally.add(self._sums.maxima, self._sums.statistics)
        return found.sums["loss/total"]

    def again(self, steps: Sequence[OptimizerStep]) -> tuple[ModelInputs | None, Light, list[OptimizerStep]]:
        """Return the parts that were kept, joined, with the same optimiser steps: those after the first use the
        micro-batches of all parts.
        """
        self._check_whole()
        if not self._parts:
            return None, {}, list(steps)
        micro_batches, start = list[Array](), 0
        for heavy, _, indices, _ in self._parts:
            micro_batches += [start + of_batch for of_batch in indices]
            start += 0 if heavy is None else len(heavy)
        passes = sum(passes for _, _, _, passes in self._parts)
        light = {name: _joined([part[1][name] for part in self._parts]) for name in self._parts[0][1]}
        there = [heavy for heavy, _, _, _ in self._parts if heavy is not None]
        further = [evolve(step, micro_batches=tuple(micro_batches), passes=passes) for step in steps[1:]]
        return (ModelInputs.concat(there) if there else None), light, [steps[0], *further]

    def _swap(self) -> None:
        """Exchange the policy's and the critic's sums of gradients."""
        for name, parameter in self.parameters.items():
            parameter.grad, self._value_gradients[name] = self._value_gradients.get(name), parameter.grad

    @torch.no_grad()
    def _check_linear(self, scores: Scores, batch: Batch, whole: Loss, value: Loss | None) -> None:
        """Check that the loss is linear: half the weights of the policy, or of the critic, must halve its terms. Raises
        PluginError otherwise.
        """
        of_all, of_values = _numbers(whole), {} if value is None else _numbers(value)
        half = self.loss(scores, evolve(batch, weights=batch.weights / 2))
        wanted = {name: (number + of_values.get(name, 0.0)) / 2 for name, number in of_all.items()}
        pairs = [(_numbers(half), wanted, of_all)]
        if value is not None and batch.value_weights is not None:
            nothing = torch.zeros_like(batch.weights)
            half = self.loss(scores, evolve(batch, weights=nothing, value_weights=batch.value_weights / 2))
            pairs.append((_numbers(half), {name: number / 2 for name, number in of_values.items()}, of_values))
        for found, wanted, size in pairs:
            for name, number in wanted.items():
                most = LINEAR * float(abs(size[name]) + abs(number)) + 1e-6
                if name not in found or float(abs(found[name] - number)) > most:
                    raise PluginError(
                        f"the algorithm says advantage_scope GROUP, and its {name} is not linear in the batch's "
                        f"weights and value weights, so that asynchrony.streaming_update cannot normalise it at the "
                        f"end; return sums of entries times weights, or leave out advantage_scope"
                    )


def _numbers(loss: Loss) -> dict[str, torch.Tensor]:
    return {"loss/total": loss.total.detach(), **loss.metrics}


def _joined(arrays: Sequence[Array | None]) -> Array | None:
    there = [array for array in arrays if array is not None]
    return np.concatenate(there) if there else None

"""Captured functions, with a recorder that uses the same buffers and no graph."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from eager_recorder import EagerRecorder
from vla_rl.toolkit.models.acting import cuda_graphs
from vla_rl.toolkit.models.acting.cuda_graphs import CapturedFunction, CudaGraphRecorder, padded_size


class CountingRecorder(EagerRecorder):
    def __init__(self) -> None:
        self.recorded = 0

    def record_function(self, run: Any) -> Any:
        self.recorded += 1
        return super().record_function(run)


def network(weight: nn.Parameter) -> Any:
    return lambda inputs: {"out": torch.tanh(inputs["x"] @ weight) + inputs["noise"]}


def batch(rows: int, seed: int = 0) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(rows, 3, generator=rng), "noise": torch.rand(rows, 2, generator=rng)}


@pytest.fixture
def weight() -> nn.Parameter:
    return nn.Parameter(torch.randn(3, 2, generator=torch.Generator().manual_seed(1)), requires_grad=False)


def test_sizes_are_powers_of_two_and_multiples_of_the_largest() -> None:
    assert [padded_size(rows) for rows in (1, 2, 3, 5, 9, 64, 65, 256, 257, 600)] == [
        1, 2, 4, 8, 16, 64, 128, 256, 512, 768,
    ]  # fmt: skip


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 11])
def test_padded_rows_do_not_change_the_others(weight: nn.Parameter, rows: int) -> None:
    function = network(weight)
    captured = CapturedFunction(function, EagerRecorder())

    torch.testing.assert_close(captured(batch(rows))["out"], function(batch(rows))["out"], rtol=0, atol=1e-6)


def test_a_size_is_captured_once_and_results_are_copies(weight: nn.Parameter) -> None:
    recorder = CountingRecorder()
    captured = CapturedFunction(network(weight), recorder)
    first = captured(batch(3))["out"]
    kept = first.clone()
    captured(batch(4, seed=1))
    captured(batch(3, seed=2))

    assert torch.equal(first, kept)
    assert recorder.recorded == captured.capture_count == 1
    captured(batch(9))
    assert recorder.recorded == captured.capture_count == 2


def test_weights_that_change_in_place_act_at_once(weight: nn.Parameter) -> None:
    captured = CapturedFunction(network(weight), EagerRecorder())
    captured(batch(2))
    with torch.no_grad():
        weight.zero_()

    assert torch.equal(captured(batch(2))["out"], batch(2)["noise"])


def test_greedy_and_sampled_decisions_are_captured_apart(weight: nn.Parameter) -> None:
    def function(inputs: Any) -> Any:
        x = inputs["x"] @ weight
        return {"out": x + inputs["noise"] if "noise" in inputs else x}

    captured = CapturedFunction(function, EagerRecorder())
    sampled = captured(batch(2))["out"]
    greedy = captured({"x": batch(2)["x"]})["out"]

    assert captured.capture_count == 2
    torch.testing.assert_close(sampled - greedy, batch(2)["noise"])


@pytest.mark.parametrize(
    "read",
    [lambda x: float(x.sum()), lambda x: x.nonzero(), lambda x: x[x > 0], lambda x: x.sum().item()],
    ids=["float", "nonzero", "mask", "item"],
)
def test_host_reads_are_refused(read: Any) -> None:
    def function(inputs: Any) -> Any:
        read(inputs["x"])
        return {"out": inputs["x"]}

    with pytest.raises(RuntimeError, match="on the host"):
        CapturedFunction(function, EagerRecorder())(batch(2))


def test_each_width_has_its_own_graph_up_to_a_limit(monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(cuda_graphs, "MAX_LAYOUTS", 2)
    recorder = CountingRecorder()
    captured = CapturedFunction(lambda inputs: {"out": inputs["x"].sum(1)}, recorder)
    for width in (3, 5, 3, 5):
        assert torch.equal(captured({"x": torch.ones(2, width)})["out"], torch.full((2,), float(width)))
    assert recorder.recorded == 2
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        for width in (7, 9):
            assert torch.equal(captured({"x": torch.ones(2, width)})["out"], torch.full((2,), float(width)))

    assert recorder.recorded == 2
    (record,) = caplog.records
    assert "x now has another one ([7])" in record.getMessage()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_graph_gives_what_the_function_gives() -> None:
    device = torch.device("cuda", 0)
    weight = torch.randn(3, 2, device=device)
    function = network(weight)
    captured = CapturedFunction(function, CudaGraphRecorder(device))
    for rows in (1, 3, 4, 7, 3):
        inputs = {name: tensor.to(device) for name, tensor in batch(rows, seed=rows).items()}
        torch.testing.assert_close(captured(inputs)["out"], function(inputs)["out"])
    assert captured.capture_count == 3

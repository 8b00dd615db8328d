"""Compiled blocks: once for each kind, counted, eager where the compiler fails, and separate copies."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from vla_rl.toolkit.models.acting import compilation
from vla_rl.toolkit.models.acting.compilation import CompilationReport, CompiledBlocks


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        y = x + torch.tanh(self.linear(x))
        return y if scale is None else y * scale


class Tower(nn.Module):
    def __init__(self, *widths: int, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(width) for width in widths)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Breaking(Block):
    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x, scale)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_equal_blocks_are_compiled_once_and_names_stay() -> None:
    tower = Tower(4, 4, 4, 4)
    names, x = list(tower.state_dict()), torch.randn(3, 4)
    expected = tower(x)
    compiled = CompiledBlocks(tower, (Block,), backend="aot_eager")

    with torch.no_grad():
        assert torch.allclose(tower(x), expected)
    assert compiled.graphs == 1
    assert list(tower.state_dict()) == names
    assert compiled.take_report().to_metrics()["compile/recompilations"] == 0
    assert compiled.take_report() == CompilationReport(), "a report counts from the last one"


def test_blocks_of_other_sizes_do_not_count_as_recompilations() -> None:
    tower = nn.ModuleList([Tower(4, 4), Tower(6, 6)])
    compiled = CompiledBlocks(tower, (Block,), backend="aot_eager")
    with torch.no_grad():
        for part, width in zip(tower, (4, 6), strict=True):
            part(torch.randn(3, width))

    assert (compiled.graphs, compiled.recompilations) == (2, 0)


def test_batch_sizes_are_dynamic_from_the_second_on() -> None:
    tower = Tower(4, 4)
    compiled = CompiledBlocks(tower, (Block,), backend="aot_eager")
    with torch.no_grad():
        for rows in (3, 5, 7, 9, 11, 64):
            tower(torch.randn(rows, 4))

    assert (compiled.graphs, compiled.recompilations) == (2, 1)


def test_gradients_flow_through_a_compiled_block() -> None:
    tower, x = Tower(4, 4), torch.randn(3, 4)
    expected = torch.autograd.grad(tower(x).sum(), list(tower.parameters()))
    CompiledBlocks(tower, (Block,), backend="aot_eager")
    found = torch.autograd.grad(tower(x).sum(), list(tower.parameters()))

    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_a_copy_computes_with_its_own_weights() -> None:
    tower, x = Tower(4), torch.randn(3, 4)
    CompiledBlocks(tower, (Block,), backend="aot_eager")
    copy = deepcopy(tower)
    with torch.no_grad():
        copy.blocks[0].linear.weight.zero_()
        copy.blocks[0].linear.bias.zero_()

    assert torch.equal(copy(x), x)
    assert not torch.equal(tower(x), x)


def test_hooks_run_around_the_compiled_code() -> None:
    tower, calls = Tower(4), list[str]()
    CompiledBlocks(tower, (Block,), backend="aot_eager")
    tower.blocks[0].register_forward_pre_hook(lambda *_: calls.append("before"))
    tower.blocks[0].register_forward_hook(lambda *_: calls.append("after"))
    for _ in range(2):
        tower(torch.randn(3, 4))

    assert calls == ["before", "after"] * 2


def test_a_failing_compiler_is_reported_once_and_the_blocks_run_in_eager_mode(caplog: Any) -> None:
    calls = []

    def broken(graph: Any, inputs: Any) -> Any:
        calls.append(graph)
        raise RuntimeError("no C++ compiler")

    tower, x = Tower(4, 6 - 2), torch.randn(3, 4)
    expected = tower(x)
    compiled = CompiledBlocks(tower, (Block,), backend=broken)
    for _ in range(3):
        assert torch.equal(tower(x), expected)

    (note,) = compiled.take_report().notes
    assert "no C++ compiler" in note
    assert "eager" in note
    assert note in caplog.text
    assert len(calls) == 1, "it is not tried again"
    assert compiled.take_report().notes == ()


def test_a_graph_break_is_a_failure_too() -> None:
    tower, x = Tower(4, block=Breaking), torch.randn(3, 4)
    expected = tower(x)
    compiled = CompiledBlocks(tower, (Breaking,), backend="aot_eager")

    assert torch.equal(tower(x), expected)
    assert compiled.failure is not None


def test_a_mode_that_counts_operators_sees_those_of_the_block() -> None:
    tower, x = Tower(4), torch.randn(3, 4)
    compiled = CompiledBlocks(tower, (Block,), backend="aot_eager")
    for _ in range(2):
        with FlopCounterMode(display=False) as counter:
            tower(x)
        assert counter.get_total_flops() == 2 * 3 * 4 * 4
        tower(x)

    assert (compiled.failure, compiled.graphs) == (None, 1)


def test_an_error_of_the_block_itself_is_raised() -> None:
    tower = Tower(4)
    CompiledBlocks(tower, (Block,), backend="aot_eager")
    with pytest.raises(RuntimeError, match="shape|mat1"):
        tower(torch.randn(3, 5))


def test_many_recompilations_name_the_shape_that_changed(monkeypatch: Any) -> None:
    monkeypatch.setattr(compilation, "MAX_RECOMPILATIONS", 1)
    block = Block(4)
    compiled = CompiledBlocks(block, (Block,), backend="aot_eager")
    with torch.no_grad():
        for shape in ((3, 4), (3, 2, 4), (3, 2, 2, 4)):
            block(torch.randn(shape))

    (note,) = compiled.notes
    assert "[3, 2, 4] -> [3, 2, 2, 4]" in note
    assert compiled.recompilations == 2


def test_merged_reports_take_the_longest_and_say_each_thing_once() -> None:
    one = CompilationReport(graphs=1, seconds=2.0, recompilations=1, notes=("a",))
    two = CompilationReport(graphs=2, seconds=3.0, recompilations=2, notes=("a", "b"))

    merged = CompilationReport.merge_reports([one, two])

    assert merged == CompilationReport(graphs=3, seconds=3.0, recompilations=3, notes=("a", "b"))


class Scaled(Tower):
    def __init__(self, *widths: int) -> None:
        super().__init__(*widths)
        self.scale = nn.Parameter(torch.ones(()))

    def begin(self, x: Tensor) -> Tensor:
        return x * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.begin(x))


class Policy:
    def __init__(self, tower: nn.Module) -> None:
        self.module = tower
        self.offset = torch.ones(4)

    def act(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.module(x) + self.offset
        return y, y.sum(-1)


def test_a_region_contains_the_blocks_and_regions_that_it_calls() -> None:
    tower, x = Scaled(4, 4), torch.randn(3, 4)
    policy = Policy(tower)
    expected = policy.act(x)
    compiled = CompiledBlocks(tower, (Block,), regions=(Policy.act, Scaled.begin), policy=policy, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(policy.act(x), expected)
    assert (compiled.failure, compiled.graphs) == (None, 1)
    with torch.no_grad():
        torch.testing.assert_close(tower(x), expected[0] - 1)
    assert compiled.graphs == 3, "outside of the region its begin and its blocks are separate graphs"


def test_gradients_flow_through_regions_and_blocks() -> None:
    tower, x = Scaled(4, 4), torch.randn(3, 4)
    expected = torch.autograd.grad(tower(x).sum(), list(tower.parameters()))
    compiled = CompiledBlocks(tower, (Block,), regions=(Scaled.begin,), backend="aot_eager")
    for a, b in zip(torch.autograd.grad(tower(x).sum(), list(tower.parameters())), expected, strict=True):
        torch.testing.assert_close(a, b)
    assert (compiled.failure, compiled.graphs) == (None, 2)


def test_a_failing_region_is_named_and_runs_in_eager_mode() -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no C++ compiler")

    policy, x = Policy(Tower(4)), torch.randn(3, 4)
    expected = policy.act(x)
    compiled = CompiledBlocks(policy.module, (Block,), regions=(Policy.act,), policy=policy, backend=broken)
    assert torch.equal(policy.act(x)[0], expected[0])
    assert "Policy.act could not be compiled" in (compiled.failure or "")


def test_inductor_compiles_a_block() -> None:
    tower, x = Tower(4, 4), torch.randn(3, 4)
    expected = tower(x)
    compiled = CompiledBlocks(tower, (Block,))
    torch.testing.assert_close(tower(x), expected)
    if compiled.failure is not None:
        pytest.skip(f"inductor cannot run here: {compiled.failure}")
    assert compiled.graphs == 2  # the second block's input has a gradient

"""Weights stored in 8 or 4 bits: rounding, products, gradients, and what is kept between the two passes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8
from vla_rl.toolkit.models import frozen_weights
from vla_rl.toolkit.models.checkpoints.fitting import MismatchError
from vla_rl.toolkit.models.frozen_weights import FrozenLinear, count_weights, find_fp8_problem, store_frozen_weights

KINDS = ("int8", "nf4", "fp8")
ROUNDING = {"int8": 0.006, "nf4": 0.1, "fp8": 0.03}
"""Relative error of normally distributed weights, at most; QLoRA's NF4 has 0.09."""
TYPES = (torch.float32, torch.bfloat16)


def make_layer(outputs: int = 96, inputs: int = 64, dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias=bias).to(dtype).requires_grad_(False)


def draw_input(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_stored_weight_is_the_weight_but_for_rounding(kind: str, dtype: torch.dtype) -> None:
    layer = make_layer(dtype=dtype)
    stored = FrozenLinear(layer, kind)
    found = stored.read_weight()
    assert found.dtype == dtype and found.shape == layer.weight.shape
    assert 0 < relative_error(found, layer.weight) < ROUNDING[kind]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_that_was_stored_once_is_stored_exactly(kind: str, dtype: torch.dtype) -> None:
    """A checkpoint, which is in full precision, thus gives the network that was trained."""
    layer = make_layer(dtype=dtype)
    once = FrozenLinear(layer, kind).read_weight()
    layer.weight.copy_(once)
    assert torch.equal(FrozenLinear(layer, kind).read_weight(), once)


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (5, 7), (64, 1), (3, 129)])
@pytest.mark.parametrize("kind", KINDS)
def test_sizes_that_fill_no_block_and_rows_of_zeros(kind: str, outputs: int, inputs: int) -> None:
    layer = make_layer(outputs, inputs)
    layer.weight[-1] = 0
    found = FrozenLinear(layer, kind).read_weight()
    assert found.shape == (outputs, inputs) and torch.equal(found[-1], torch.zeros(inputs))
    if outputs > 1:
        assert relative_error(found, layer.weight) < 2 * ROUNDING[kind]


def test_bytes_of_a_weight() -> None:
    layer = make_layer(256, 512, torch.bfloat16, bias=False)
    sizes = {kind: sum(p.nbytes for p in FrozenLinear(layer, kind).parameters()) for kind in KINDS}
    number = 256 * 512
    assert sizes["int8"] == sizes["fp8"] == number + 4 * 256, "a byte each, and a scale for a row"
    assert sizes["nf4"] == number * 4.25 / 8
    assert count_weights(nn.Sequential(FrozenLinear(layer, "nf4"), nn.Linear(2, 3))) == number + 9


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_products_are_those_of_the_dequantised_weight_to_the_bit(kind: str, dtype: torch.dtype) -> None:
    layer, x = make_layer(dtype=dtype), draw_input(3, 5, 64, dtype=dtype)
    stored = FrozenLinear(layer, kind)
    found = stored(x)
    found.square().sum().backward()
    assert x.grad is not None
    gradient, x.grad = x.grad, None
    layer.weight.copy_(stored.read_weight())
    layer(x).square().sum().backward()
    assert torch.equal(found, layer(x)) and torch.equal(gradient, x.grad)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_autocast_computes_as_with_the_dequantised_weight(kind: str) -> None:
    layer, x = make_layer(), draw_input(3, 64)
    stored = FrozenLinear(layer, kind)
    with torch.autocast("cpu", torch.bfloat16):
        found = stored(x)
    assert found.dtype == torch.bfloat16
    assert relative_error(found, layer(x)) < 1.2 * ROUNDING[kind] + 0.01


@fp8.needs_fp8
@pytest.mark.parametrize("dtype", TYPES)
def test_fp8_multiplies_forward_and_backward(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own FP8 product, which a CPU has too, slowly."""
    layer, x = make_layer(dtype=dtype), draw_input(3, 5, 64, dtype=dtype)
    stored = FrozenLinear(layer, "fp8")
    calls: list[tuple[torch.dtype, torch.dtype]] = []
    multiply = torch._scaled_mm

    def record_call(left: Tensor, right: Tensor, **keys: Any) -> Tensor:
        calls.append((left.dtype, right.dtype))
        return multiply(left, right, **keys)

    monkeypatch.setattr(torch, "_scaled_mm", record_call)
    found = stored(x)
    found.square().sum().backward()
    assert calls == [(torch.float8_e4m3fn, torch.float8_e4m3fn)] * 2
    assert found.dtype == dtype and x.grad is not None and x.grad.dtype == dtype
    gradient, x.grad = x.grad, None
    layer.weight.copy_(stored.read_weight())
    layer(x).square().sum().backward()
    assert 0 < relative_error(found, layer(x)) < 0.04, "the input is rounded too"
    assert 0 < relative_error(gradient, x.grad) < 0.06


def collect_kept(run: Any, x: Tensor) -> list[Tensor]:
    """Return what a forward pass keeps for the backward pass."""
    kept: list[Tensor] = []

    def keep_tensor(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep_tensor, lambda tensor: tensor):
        result = run(x)
    result.float().sum().backward()
    return kept


@pytest.mark.parametrize("backend", [None, "aot_eager_decomp_partition"])
@pytest.mark.parametrize("kind", fp8.KINDS)
def test_no_weight_in_full_precision_waits_for_the_backward_pass(
    kind: str, backend: str | None, fresh_compiler: None
) -> None:
    """The compiler chooses what it keeps: with equal operators in both passes it keeps the dequantised weights."""
    layers = [FrozenLinear(make_layer(64, 64, torch.bfloat16), kind) for _ in range(3)]
    network: Any = nn.Sequential(layers[0], nn.SiLU(), layers[1], nn.SiLU(), layers[2])
    x = draw_input(2, 64, dtype=torch.bfloat16)
    expected = network(x)
    if backend is not None:
        network = torch.compile(network, fullgraph=True, backend=backend)
    torch.testing.assert_close(network(x), expected)
    kept = collect_kept(network, x)
    wide = [tensor for tensor in kept if tensor.numel() >= 64 * 64 and tensor.element_size() > 1]
    assert kept and not wide


class Block(nn.Module):
    """Repeated layer with a linear layer of each sort."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(16, 32).requires_grad_(False)
        self.trained = nn.Linear(16, 32)
        self.norm = nn.ModuleDict({"dense": nn.Linear(16, 32).requires_grad_(False)})
        self.narrow = nn.Linear(16, 5).requires_grad_(False)


def make_network() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"blocks": nn.ModuleList([Block(), Block()]), "head": nn.Linear(16, 32).requires_grad_(False)})


def stored_names(network: nn.Module) -> set[str]:
    return {name for name, part in network.named_modules() if isinstance(part, FrozenLinear)}


def test_only_frozen_linear_layers_of_blocks_are_stored() -> None:
    network = make_network()
    store_frozen_weights(network, (Block,), "bf16")
    assert not stored_names(network)
    store_frozen_weights(network, (Block,), "nf4")
    assert stored_names(network) == {f"blocks.{i}.{name}" for i in (0, 1) for name in ("frozen", "narrow")}


def test_fp8_leaves_layers_that_it_does_not_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen_weights, "find_fp8_problem", lambda device: None)
    network = make_network()
    store_frozen_weights(network, (Block,), "fp8")
    assert stored_names(network) == {f"blocks.{i}.frozen" for i in (0, 1)}


def test_fp8_is_refused_by_name_where_the_device_has_none() -> None:
    with pytest.raises(MismatchError, match=r"model.frozen_weights: fp8 .*'cpu' does not; use int8, nf4 or bf16"):
        store_frozen_weights(make_network(), (Block,), "fp8")
    assert find_fp8_problem(torch.device("meta")) is None


def test_fp8_asks_for_the_device_of_blocks_alone() -> None:
    """Critics of flow models are initialised on the host, and moved to the GPU after the blocks were stored."""
    with torch.device("meta"):
        network = nn.ModuleDict({"blocks": nn.ModuleList([Block()])})
    store_frozen_weights(nn.Sequential(nn.Linear(1, 1), network), (Block,), "fp8")
    assert stored_names(network) == {"blocks.0.frozen"}


@pytest.mark.parametrize(("capability", "works"), [((8, 0), False), ((8, 9), True), ((9, 0), True)])
def test_gpus_without_fp8_are_named(capability: tuple[int, int], works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    problem = find_fp8_problem(torch.device("cuda", 0))
    assert problem is None if works else "NVIDIA A100 does not; use int8" in (problem or "")


@pytest.mark.parametrize("kind", KINDS)
def test_the_meta_device_has_the_same_sizes(kind: str) -> None:
    real, meta = FrozenLinear(make_layer(), kind), FrozenLinear(make_layer().to("meta"), kind)
    for name, tensor in real.state_dict().items():
        assert meta.state_dict()[name].shape == tensor.shape and meta.state_dict()[name].dtype == tensor.dtype
    x = draw_input(3, 64).detach().to("meta").requires_grad_()
    meta(x).sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape

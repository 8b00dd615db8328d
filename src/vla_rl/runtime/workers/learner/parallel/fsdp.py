"""Learners that each hold a share of the model (FSDP2, Zhao et al. 2023).

Imported where it is asked for: PyTorch takes a second to load what this needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from attrs import asdict
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from vla_rl.core.errors import NotOffered, UserError
from vla_rl.core.hookspecs import VLAModel
from vla_rl.core.types import EnvInfo
from vla_rl.runtime.messages.model_inputs import ModelInputs, dummy_sample
from vla_rl.runtime.workers.learner.parallel.data_parallel import on_host

T = TypeVar("T")


class _Whole(nn.Module):
    """Makes any function of a model the forward pass of a module, around which FSDP gathers weights."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, forward: Callable[[], Any]) -> Any:
        """What is given out are no views, on which FSDP's hooks could be lost."""
        result = forward()
        if isinstance(result, torch.Tensor):
            return result.clone()
        return {name: None if tensor is None else tensor.clone() for name, tensor in result.items()}


class FullyShardedParallel:
    """A share of the model on every rank. Weights are gathered a block at a time: `blocks` are submodules, the rest
    (embeddings, heads) is one more block. Gradients are reduced as soon as a block's are there."""

    lockstep = True

    def __init__(self, module: nn.Module, blocks: Iterable[nn.Module], device: str, world: int) -> None:
        """Raises UserError for a block whose trainable weights differ in type."""
        blocks = list(blocks)
        _check_types(module, blocks)
        mesh = init_device_mesh(torch.device(device).type, (world,))
        self.blocks: list[FSDPModule] = [fully_shard(block, mesh=mesh) for block in blocks]
        self.whole_module: Any = fully_shard(_Whole(module), mesh=mesh)
        for part in (self.whole_module, *self.blocks):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # a plain sum, which every backend has
        self.whole_module.set_reduce_scatter_unused_params(True)

    def run(self, forward: Callable[[], T]) -> T:
        result: T = self.whole_module(forward)
        return result

    def reduce(self, parameters: Sequence[nn.Parameter]) -> None:
        """The backward pass has done it."""

    def gather(self) -> None:
        for part in (self.whole_module, *self.blocks):
            part.unshard()
        self.whole_module.set_reshard_after_forward(False)

    def release(self) -> None:
        for part in (self.whole_module, *self.blocks):
            part.reshard()
        self.whole_module.set_reshard_after_forward(True)

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """FSDP has no part in these weights: `state_dict` finds them, and NumPy may hold their memory."""
        parts = list(self.whole_module.modules())
        places = [(part, name, p) for part in parts for name, p in part.named_parameters(recurse=False)]
        made: dict[int, nn.Parameter] = {}
        for part, name, p in places:
            if id(p) not in made:
                made[id(p)] = nn.Parameter(_tensor_of_all(p.detach()), requires_grad=p.requires_grad)
            setattr(part, name, made[id(p)])
        yield
        for part, name, p in places:
            setattr(part, name, p)

    def whole(self, tensor: Any) -> Any:
        return on_host(_tensor_of_all(tensor))

    def share(self, tensor: Any, like: torch.Tensor) -> Any:
        """As FSDP cuts it: in rows, of which the last ranks have fewer."""
        if not isinstance(tensor, torch.Tensor) or not tensor.dim():
            return tensor
        assert isinstance(like, DTensor)
        parts = tensor.chunk(like.device_mesh.size())
        rank = like.device_mesh.get_local_rank()
        own = parts[rank] if rank < len(parts) else tensor[:0]
        return DTensor.from_local(
            own.to(like.to_local().device).contiguous(),
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )


def _tensor_of_all(value: Any) -> Any:
    """Of the shares of all ranks."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def _check_types(module: nn.Module, blocks: Sequence[nn.Module]) -> None:
    names = {id(part): name for name, part in module.named_modules()}
    of_block = {id(p): names[id(block)] for block in blocks for p in block.parameters()}
    types: dict[str, set[str]] = {}
    for p in module.parameters():
        if p.requires_grad:
            types.setdefault(of_block.get(id(p), "outside of its blocks"), set()).add(str(p.dtype))
    for name, found in types.items():
        if len(found) > 1:
            raise UserError(
                f"train.sharding: full needs trainable weights of one type in a block, and the model has "
                f"{', '.join(sorted(found))} in {name!r}; set train.sharding: replicated, or keep all weights in "
                f"float32 and compute in bfloat16 (model.dtype: float32, train.precision: bf16)"
            )


@contextmanager
def called(model: VLAModel) -> Iterator[list[nn.Module]]:
    """Collects the model's blocks that are called meanwhile: members of its module lists, and the critic. Those that
    lie in another are left out."""
    critic = [] if model.critic is None else [model.critic]
    lists = [part for parts in model.module.modules() if isinstance(parts, nn.ModuleList) for part in parts]
    candidates = [part for part in (*critic, *lists) if any(True for _ in part.parameters())]
    inner = {id(below) for part in candidates for below in part.modules() if below is not part}
    found: dict[int, nn.Module] = {}
    hooks = [
        part.register_forward_pre_hook(lambda part, inputs: found.__setitem__(id(part), part))
        for part in candidates
        if id(part) not in inner
    ]
    blocks: list[nn.Module] = []
    try:
        yield blocks
    finally:
        for hook in hooks:
            hook.remove()
        blocks.extend(found.values())


def shard(model: VLAModel, info: EnvInfo, device: str, world: int) -> tuple[FullyShardedParallel, ModelInputs]:
    """Keep a share of the model, whose weights are equal on all ranks; all ranks together. -> (how it is held, one
    blank sample)."""
    obs, chunk = dummy_sample(model, info)
    passes: list[Callable[[], Any]] = []
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        with called(model) as blocks:
            for forward in (
                lambda: asdict(model.chunk_log_probs(obs, chunk), recurse=False),
                lambda: model.imitation_loss(obs, chunk.actions),
            ):
                try:
                    forward()
                except NotOffered:  # one that cannot be trained this way
                    continue
                passes.append(forward)
        held = FullyShardedParallel(model.module, blocks, device, world)
        held.run(passes[0])  # FSDP finds its blocks in the first pass
    held.release()
    return held, ModelInputs(obs=obs, actions=chunk.actions, extras=chunk.extras)

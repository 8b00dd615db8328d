"""Fully sharded data parallelism (FSDP2, Zhao et al. 2023): each learner holds a share of the model. The module is
imported only where it is used, because PyTorch takes a second to load what it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from attrs import asdict
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from vla_rl.core.capabilities import Compilable, HasCritic
from vla_rl.core.errors import UserError
from vla_rl.core.hookspecs import VLAModel
from vla_rl.core.trainers import ModelInputs
from vla_rl.core.types import EnvInfo
from vla_rl.toolkit.models.blocks import find_blocks
from vla_rl.toolkit.trainers.dummy_samples import dummy_sample
from vla_rl.toolkit.trainers.master_weights import is_narrow
from vla_rl.toolkit.trainers.parallel import ParallelStrategy, sharding_problem

T = TypeVar("T")


class _RunModule(nn.Module):
    """Module whose forward pass is any function of the model, so that FSDP gathers weights around it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, forward: Callable[[], Any]) -> Any:
        """Call the function. Results are cloned, because FSDP's hooks could be lost on views."""
        result = forward()
        if isinstance(result, torch.Tensor):
            return result.clone()
        if isinstance(result, tuple):
            return tuple(tensor.clone() for tensor in result)
        return {name: None if tensor is None else tensor.clone() for name, tensor in result.items()}


class FullyShardedParallel(ParallelStrategy):
    """Fully sharded strategy: a share of the model on every rank. Weights are gathered block by block: `blocks` are
    submodules, and the rest (embeddings, heads) is one more block. Gradients of a block are reduced as soon as they are
    there. Shards of trained weights are float32, and are gathered in the type that the model was built with."""

    lockstep = True

    def __init__(self, device: str, world: int) -> None:
        """Describe the ranks, which have entered their process group when the strategy is `prepare`d."""
        self.world = world
        self._device = device

    def prepare_model(self, model: VLAModel, info: EnvInfo) -> ModelInputs:
        """Shard the model, as the base class says. Blocks may be compiled before: FSDP's hooks run around them. This
        stays eager: the batch does not come again."""
        obs, chunk = dummy_sample(model, info)
        passes: list[Callable[[], Any]] = []
        eager = torch.compiler.set_stance("force_eager")
        with eager, torch.no_grad(), torch.random.fork_rng(devices=[]):
            with collect_called_blocks(model) as blocks:
                for forward in (
                    lambda: asdict(model.chunk_log_probs(obs, chunk), recurse=False),
                    lambda: model.imitation_loss(obs, chunk.actions),
                ):
                    try:
                        forward()
                    except UserError:  # the model cannot be trained in this way
                        continue
                    passes.append(forward)
            self.shard_module(model.module, blocks)
            self.run(passes[0])  # FSDP finds its blocks in the first pass
        self.release_weights()
        return ModelInputs(obs=obs, actions=chunk.actions, extras=chunk.extras)

    def shard_module(self, module: nn.Module, blocks: Iterable[nn.Module]) -> None:
        """Shard a module. Raises UserError for a block with trainable weights of several types, and an old torch."""
        problem = sharding_problem()
        if problem is not None:
            raise UserError(f"train.sharding: full {problem}")
        blocks = list(blocks)
        _check_types(module, blocks)
        self.mesh = init_device_mesh(torch.device(self._device).type, (self.world,))
        acting_types = {name: p.dtype for name, p in module.named_parameters()}
        self._whole: set[nn.Parameter] = set()
        """Frozen weights that stay whole on every rank."""
        self.blocks: list[FSDPModule] = [self._shard_unit(block) for block in blocks]
        for block in blocks:
            for method in getattr(block, "called_methods", ()):
                register_fsdp_forward_method(block, method)
        self.root: Any = self._shard_unit(_RunModule(module))
        self._acting_types = {id(p): acting_types[name] for name, p in module.named_parameters()}
        """Id of a parameter -> its type when it is gathered."""
        for unit in self._gathered_units:
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)  # not an average, as every backend has a plain sum
        self.root.set_reduce_scatter_unused_params(True)

    def _shard_unit(self, unit: nn.Module) -> Any:
        """Shard what no earlier unit has. Frozen weights wider than the trained stay whole: a unit has one type."""
        own = [p for p in unit.parameters() if not isinstance(p, DTensor) and p not in self._whole]
        narrow = [p for p in own if p.requires_grad and is_narrow(p.dtype)]
        if not narrow:
            return fully_shard(unit, mesh=self.mesh, ignored_params=self._whole)
        dtype = narrow[0].dtype
        self._whole |= {p for p in own if not p.requires_grad and p.dtype != dtype}
        for p in narrow:
            p.data = p.data.float()
        precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        return fully_shard(unit, mesh=self.mesh, mp_policy=precision, ignored_params=self._whole)

    @property
    def _gathered_units(self) -> tuple[Any, ...]:
        """Modules that FSDP gathers one at a time."""
        return self.root, *self.blocks

    def run(self, forward: Callable[[], T]) -> T:
        result: T = self.root(forward)
        return result

    def reduce(self, parameters: Sequence[nn.Parameter]) -> None:
        """Do nothing: the backward pass has reduced the gradients."""

    def gather_weights(self) -> None:
        for unit in self._gathered_units:
            unit.unshard()
        self.root.set_reshard_after_forward(False)

    def release_weights(self) -> None:
        for unit in self._gathered_units:
            unit.reshard()
        self.root.set_reshard_after_forward(True)

    @contextmanager
    def full_weights(self) -> Iterator[None]:
        """Context in which parameters are plain full tensors, outside of FSDP, for `state_dict` and NumPy."""
        modules = list(self.root.modules())
        sharded = [(module, name, p) for module in modules for name, p in module.named_parameters(recurse=False)]
        full: dict[int, nn.Parameter] = {}
        """Id of a sharded parameter -> the full one; modules may share a parameter."""
        for module, name, p in sharded:
            if id(p) not in full:
                weight = p.detach().to(self._acting_types[id(p)])
                full[id(p)] = nn.Parameter(self.unshard_tensor(weight), requires_grad=p.requires_grad)
            setattr(module, name, full[id(p)])
        yield
        for module, name, p in sharded:
            setattr(module, name, p)

    def unshard_tensor(self, tensor: Any) -> Any:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def own_part(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def local_shard(self, tensor: Any, like: torch.Tensor) -> Any:
        """Return this rank's shard as FSDP2 cuts it: in chunks of the first dimension, shorter on last ranks."""
        if not isinstance(tensor, torch.Tensor) or not tensor.dim():
            return tensor
        assert isinstance(like, DTensor)
        chunks = tensor.chunk(like.device_mesh.size())
        rank = like.device_mesh.get_local_rank()
        chunk = chunks[rank] if rank < len(chunks) else tensor[:0]
        return DTensor.from_local(
            chunk.to(like.to_local().device).contiguous(),
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )


def _check_types(module: nn.Module, blocks: Sequence[nn.Module]) -> None:
    names = {id(part): name for name, part in module.named_modules()}
    of_block = {id(p): names[id(block)] for block in blocks for p in block.parameters()}
    types: dict[str, set[str]] = {}
    for p in module.parameters():
        if p.requires_grad:
            types.setdefault(of_block.get(id(p), "outside of its blocks"), set()).add(str(p.dtype))
    for name, dtypes in types.items():
        if len(dtypes) > 1:
            raise UserError(
                f"train.sharding: full needs trainable weights of one type in a block, and the model has "
                f"{', '.join(sorted(dtypes))} in {name!r}; set train.sharding: replicated, or keep all weights in "
                f"float32 and compute in bfloat16 (model.dtype: float32, train.precision: bf16)"
            )


@contextmanager
def collect_called_blocks(model: VLAModel) -> Iterator[list[nn.Module]]:
    """Context that collects the called blocks of `find_blocks`, and the critic, without blocks of the critic."""
    critic = [model.critic] if isinstance(model, HasCritic) and model.critic is not None else []
    in_critic = {id(part) for critic_module in critic for part in critic_module.modules()}
    classes = model.blocks if isinstance(model, Compilable) else ()
    blocks_outside = [block for block in find_blocks(model.module, classes) if id(block) not in in_critic]
    called_blocks: dict[int, nn.Module] = {}
    hooks = [
        part.register_forward_pre_hook(lambda part, inputs: called_blocks.__setitem__(id(part), part))
        for part in (*critic, *blocks_outside)
    ]
    blocks: list[nn.Module] = []
    try:
        yield blocks
    finally:
        for hook in hooks:
            hook.remove()
        blocks.extend(called_blocks.values())

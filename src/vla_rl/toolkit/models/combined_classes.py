"""Classes of policies whose settings decide about their capabilities (`vla_rl.core.capabilities`)."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, cast

from vla_rl.core.capabilities import HasReference
from vla_rl.core.hookspecs import VLAModel
from vla_rl.toolkit.models.adapters import before_training

if TYPE_CHECKING:
    from torch import Tensor

    from vla_rl.core.types import Chunk, Observation

P = TypeVar("P")


def combine_classes(policy: type[P], *parts: type) -> type[P]:
    """Return the class of a policy with these parts: classes that inherit a common base of all policies of a family,
    and a capability. Their methods take precedence over those of `policy`. Equal arguments give the same class."""
    known: type = policy
    return cast("type[P]", _make_class(known, parts)) if parts else policy


@cache
def _make_class(policy: type, parts: tuple[type, ...]) -> type:
    names = ", ".join(part.__name__ for part in parts)
    return type(f"{policy.__name__}[{names}]", (*parts, policy), {"__module__": policy.__module__})


class AdaptedPolicy(VLAModel, HasReference):
    """A policy with adapters. Without them the weights are those before training, so a reference needs no copy."""

    module: Any
    trained_heads: tuple[str, ...]
    """Parts of the module in addition to its network that decide log-probs: of these a copy is kept."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._first = {name: deepcopy(getattr(self.module, name)) for name in self.trained_heads}

    def reference_log_probs(self, obs: Observation, chunk: Chunk) -> Tensor:
        """Score recorded chunks under the weights that were loaded, without adapters. Return float32 [B, C, M]."""
        import torch

        with torch.no_grad(), before_training(self.module, value_head=None, **self._first):
            return self.chunk_log_probs(obs, chunk).log_probs

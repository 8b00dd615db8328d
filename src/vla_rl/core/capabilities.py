"""What a component can do in addition to the contract of its kind: one small abstract class a capability.

A class inherits the capabilities that it has, next to its contract: `class MyModel(VLAModel, HasCritic, ActionTokens)`.
Who uses one asks `isinstance`, of wrapped components too. Python refuses to create an object of a class that leaves out
an abstract method; core refuses a component that has a method of a capability without inheriting it, or lacks an
attribute of one that it inherits.

The class is the answer, so a plugin whose settings decide about a capability builds another class. `HasCritic` is the
exception: core, and not the plugin's settings, decides whether a model gets a critic.

Each method is also a pluggy hook specification, as those of the contracts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from vla_rl.core.errors import UserError
from vla_rl.core.hookspecs import hookspec

if TYPE_CHECKING:
    import torch

    from vla_rl.core.randomness import Noise
    from vla_rl.core.trainers import TrajectoryPart
    from vla_rl.core.types import ArrayOrTensor, Chunk, Observation, UnexecutedActions

C = TypeVar("C")
S = TypeVar("S")
STEERING = "steering"
"""Name in `Chunk.extras` of the noise that a steering head chose (`Steerable.steering_noise`)."""


def require_capability(component: object, capability: type[C], who: str) -> C:
    """Return the component, typed as the capability. Raise UserError if it does not inherit it.

    Args:
        who: caller that needs it, for the message, such as "trainer 'dsrl'".
    """
    if isinstance(component, capability):
        return component
    raise UserError(f"{who} needs {capability.__name__}, and {component.__class__.__name__} does not inherit it")


class HasCritic(ABC):
    """A model that estimates values, where `ModelContext.values` asks for them."""

    critic: torch.nn.Module | None
    """Submodule of `module` that only `values` depend on. It has its own learning rate and warm-up. None exactly where
    `ModelContext.values` is "none": no one needs values there."""

    @abstractmethod
    @hookspec(firstresult=True)
    def values(self, obs: Observation) -> torch.Tensor:
        """Return the critic's values, [B] or [B, C], without gradient and samples. Called with a critic only."""


class HasReference(ABC):
    """A model that can score chunks under the policy before training, for a KL term."""

    @abstractmethod
    @hookspec(firstresult=True)
    def reference_log_probs(self, obs: Observation, chunk: Chunk) -> torch.Tensor:
        """Return the log-probs [B, C, M] under the reference policy (the policy before training), without gradient."""


class ActionTokens(ABC):
    """A model whose actions are tokens, and whose log-probs are those of discrete distributions."""

    @abstractmethod
    @hookspec(firstresult=True)
    def encode_actions(self, actions: ArrayOrTensor) -> torch.Tensor:
        """Tokenise actions, float [B, C, A] in the simulator's units, and return int64 [B, C, M]."""

    @abstractmethod
    @hookspec(firstresult=True)
    def decode_actions(self, tokens: ArrayOrTensor) -> torch.Tensor:
        """Return the actions of tokens int64 [B, C, M] as float32 [B, C, A], un-normalised by the checkpoint."""


class HasFeatures(ABC):
    """A model with features on which trainers build critics."""

    @abstractmethod
    @hookspec(firstresult=True)
    def policy_features(self, obs: Observation) -> torch.Tensor:
        """Return what the policy makes of an observation before it chooses actions, [B, D] with gradient."""


class Reparameterised(HasFeatures):
    """A model whose sampled actions have a gradient in its features, for actor-critic trainers."""

    @abstractmethod
    @hookspec(firstresult=True)
    def reparameterised_actions(
        self, features: torch.Tensor, normals: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the chunks that the policy samples given its `policy_features` [B, D] and standard normal numbers
        [B, C, A], and their log-probs, both with gradient (reparameterisation trick). Actions are float32 [B, C, A] in
        the simulator's units; log_probs [B, C, M] are those of `chunk_log_probs`."""


class Steerable(HasFeatures):
    """A frozen flow policy whose initial noise a trained head chooses."""

    steering_shape: tuple[int, int]
    """R, W: vectors and numbers of the initial noise that the head chooses."""

    @abstractmethod
    @hookspec(firstresult=True)
    def steering_noise(self, features: torch.Tensor, normals: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the initial noise that the steering head samples, given `policy_features` [B, D] and standard normal
        numbers [B, R, W], and its log-probs, both [B, R, W] with gradient. Noise is scaled to (-1, 1), before the
        head's range; log-probs are those of the scaled noise. `Chunk.extras["steering"]` is the inverse hyperbolic
        tangent of the scaled noise of a chunk."""


class ContinuesChunks(ABC):
    """A model or an engine that continues the chunk that a robot still executes (real-time chunking)."""

    @abstractmethod
    @hookspec(firstresult=True)
    def continue_chunk(
        self, obs: Observation, noise: Noise, greedy: bool, previous: Sequence[UnexecutedActions]
    ) -> torch.Tensor:
        """Return actions float32 [B, C, A] that continue the `previous` chunk of each sample. They begin at the
        observation, so the first `delay` of them repeat actions that are executed meanwhile. Called by `vla-rl serve`
        for clients that send the actions they have left."""


class Compilable(ABC):
    """A model with repeated layers that are compiled once (`train.compile`, `rollout.compile`) and sharded one by
    one (`train.sharding`)."""

    blocks: tuple[type[torch.nn.Module], ...]
    """Classes of the repeated layers of `module`. Their forward passes take and return tensors, read nothing on the
    host, and are called as modules."""
    regions: tuple[Callable[..., Any], ...] = ()
    """Methods that are compiled together with the blocks, as their classes hold them: methods of this class, and of
    parts of `module`. They take and return tensors, and read nothing on the host. Optional."""


class Capturable(Compilable):
    """A model whose decisions a CUDA graph can capture (`rollout.compile: graphs`)."""

    @abstractmethod
    def decide(self, inputs: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Do the part of `sample_chunk` between its inputs and its chunk: from tensors to tensors, all of them on the
        device and [B, ...], with random numbers among the inputs. `sample_chunk` calls it by this name. It reads
        nothing on the host, and its shapes depend on those of the inputs alone."""


class Offloadable(ABC, Generic[S]):
    """A simulator whose device memory learners can have (`placement.offload.sim`). S: its snapshots."""

    @abstractmethod
    @hookspec(firstresult=True)
    def snapshot(self) -> S:
        """Return all that `restore` of a newly built simulator needs to continue exactly; tensors in host memory."""

    @abstractmethod
    @hookspec(firstresult=True)
    def restore(self, snapshot: S) -> None:
        """Continue from the `snapshot` of another instance."""


class TrainsInParts(ABC):
    """A trainer of trajectories that begins before the training step is collected (streaming update)."""

    @abstractmethod
    @hookspec(firstresult=True)
    def accumulate(self, data: TrajectoryPart) -> None:
        """Run forward and backward passes of a part of a training step's samples; `update` makes the optimiser step."""

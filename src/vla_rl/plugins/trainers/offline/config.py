"""Settings of `offline`."""

from __future__ import annotations

from typing import Literal

from attrs import field, frozen
from attrs import validators as v

from vla_rl.core.spec.sections import number_between, positive_between
from vla_rl.toolkit.trainers.settings import CriticWarmupSettings


@frozen(kw_only=True)
class AWR:
    """Values fitted to recorded returns (Peng et al. 2019)."""

    type: Literal["awr"] = "awr"


@frozen(kw_only=True)
class IQL:
    """Q-values and an expectile of them, learned by temporal differences (Kostrikov et al. 2021)."""

    type: Literal["iql"] = "iql"
    expectile: float = field(default=0.7, validator=v.and_(v.ge(0.5), v.lt(1.0)))
    """Expectile of the Q-values that a value approaches, 0.5 (their mean) to below 1 (the best recorded action)."""
    target_rate: float = field(default=0.005, validator=positive_between(0.0, 1.0))
    """Share of the distance that the target Q-networks move in each optimiser step."""


@frozen(kw_only=True)
class OfflineConfig(CriticWarmupSettings):
    """Spec keys of the trainer `offline`."""

    algorithm: AWR | IQL = field(factory=IQL)
    """Critic whose advantages weigh the cloned actions."""
    discount: float = field(default=0.99, validator=positive_between(0.0, 1.0))
    """Discount of rewards per environment step, above 0, at most 1."""
    temperature: float = field(default=0.3, validator=positive_between(1e-4, 1e4))
    """Temperature of the weights exp(advantage / temperature). Rewards are scaled so that recorded returns span a range
    of 1."""
    max_weight: float = field(default=20.0, validator=positive_between(1e-3, 1e6))
    """Largest weight of a sample."""
    hidden: tuple[int, ...] = field(default=(256, 256), validator=v.deep_iterable(number_between(1, 16_384)))
    """Widths of the critics' hidden layers, 1 to 16,384."""
    layer_norm: bool = True
    """Normalise the hidden layers of critics."""
    lr: float = field(default=3e-4, validator=positive_between(1e-12, 10))
    """Learning rate of the critics (Adam)."""
    features: Literal["trained", "frozen"] = "trained"
    """Whether the critics' losses also train the policy's features on which critics work."""

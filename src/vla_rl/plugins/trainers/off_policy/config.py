"""Settings of `off_policy`."""

from __future__ import annotations

from typing import Any, Literal

from attrs import evolve, field, fields, frozen
from attrs import validators as v

from vla_rl.core.spec.sections import ValueRange, number_between, positive_between
from vla_rl.toolkit.trainers.settings import DemonstrationSettings, DemonstrationShare

MOST_UPDATES = 1000
"""Highest UTD ratio."""


@frozen(kw_only=True)
class LearnedTemperature:
    """Settings of a learned temperature."""

    initial: float = field(default=1.0, validator=positive_between(0.0, 1e4))
    """Temperature at the beginning."""
    target_entropy: float | None = None
    """Entropy in nats that the temperature aims at: of a chunk, or with `dsrl` of the noise, scaled to [-1, 1]. Null:
    minus the number of its numbers, with `dsrl` half of that."""
    lr: float = field(default=3e-4, validator=positive_between(1e-12, 10))
    """Learning rate of the temperature (Adam)."""


@frozen(kw_only=True)
class Learned:
    """A temperature that is learned, so that the entropy approaches a target."""

    learned: LearnedTemperature = field(factory=LearnedTemperature)


@frozen(kw_only=True)
class SACConfig:
    """Spec keys of SAC that `off_policy` and `dsrl` share."""

    updates_per_step: float = field(default=1.0)
    """Updates for each collected transition (UTD ratio), above 0, at most 1000."""
    min_data: int = field(default=1000, validator=number_between(1, 1_000_000_000))
    """Transitions that are collected before the first update."""
    capacity: int = field(default=100_000, validator=number_between(1, 1_000_000_000))
    """Transitions that are kept; the oldest ones are forgotten."""
    batch: int = field(default=256, validator=number_between(1, 1_000_000))
    """Transitions of an update."""
    discount: float = field(default=0.99, validator=positive_between(0.0, 1.0))
    """Discount of rewards per environment step, above 0, at most 1."""
    critics: int = field(default=2, validator=number_between(1, 100))
    """Q-networks: 2 in SAC, 10 in RLPD."""
    target_critics: int = field(default=2, validator=number_between(1, 100))
    """Number of target networks that each update draws at random; the lowest of their values counts in a target. At
    most `critics`."""
    actor_value: Literal["lowest", "mean"] = "lowest"
    """Value of the Q-networks that the policy maximises: the lowest one (SAC) or their mean (RLPD)."""
    entropy_backup: bool = True
    """Whether targets contain the entropy of the policy."""
    target_rate: float = field(default=0.005, validator=positive_between(0.0, 1.0))
    """Share of the distance that target networks move in each update."""
    hidden: tuple[int, ...] = field(default=(256, 256), validator=v.deep_iterable(number_between(1, 16_384)))
    """Widths of the critics' hidden layers, 1 to 16,384."""
    layer_norm: bool = True
    """Normalise the hidden layers of critics (RLPD)."""
    lr: float = field(default=3e-4, validator=positive_between(1e-12, 10))
    """Learning rate of the critics (Adam)."""
    actor_interval: int = field(default=1, validator=number_between(1, 1_000_000))
    """Updates of the critics for each update of policy and temperature."""
    critic_updates: int = field(default=0, validator=number_between(0, 1_000_000_000))
    """First updates, which train the critics alone, without the features: values of untrained critics undo what a clone
    has learnt."""
    temperature: float | Learned = field(factory=Learned, validator=ValueRange(positive_between(0.0, 1e4)))
    """Weight of the entropy: a number, or learned."""

    @updates_per_step.validator
    def _check_updates(self, attribute: Any, value: float) -> None:
        if not 0 < value <= MOST_UPDATES:
            raise ValueError(
                f"{value:g} updates for each transition cannot be made: SAC makes 1, RLPD 20; give a number above 0, "
                f"such as 0.25, at most {MOST_UPDATES}"
            )

    @capacity.validator
    def _holds_min_data(self, attribute: Any, value: int) -> None:
        if value < self.min_data:
            raise ValueError(f"{value} transitions are fewer than min_data ({self.min_data}); raise it")

    @target_critics.validator
    def _in_ensemble(self, attribute: Any, value: int) -> None:
        if value > self.critics:
            raise ValueError(f"{value} of {self.critics} critics cannot be drawn; lower it, or raise critics")


@frozen(kw_only=True)
class DemonstratedShare(DemonstrationShare):
    """Demonstrations of `off_policy`."""

    corrections: bool = False
    """Whether chunks of whoever took over count as demonstrations too (HIL-SERL, Luo et al. 2024)."""
    cloning: float = field(default=0.0, validator=number_between(0.0, 1e6))
    """Weight, in the policy's loss, of the mean squared error of its likeliest actions on the demonstrations of a
    batch, corrections included, scaled to [-1, 1] (Nair et al. 2018, without their filter by Q-values)."""


@frozen(kw_only=True)
class OffPolicyConfig(SACConfig, DemonstrationSettings):
    """Spec keys of the trainer `off_policy`."""

    algorithm: Literal["sac"] = "sac"
    """Soft actor-critic (Haarnoja et al. 2018); with an ensemble, `layer_norm` and demonstrations it is RLPD (Ball et
    al. 2023)."""
    demonstrations: DemonstratedShare | None = None
    """Demonstrations (`imitation.data`) in each batch; null: none."""
    takeovers: Literal["continue", "end"] = "continue"
    """What a takeover is for the policy's action that led to it: nothing special (`continue`), or the end of the
    episode without further reward (`end`), as for policy gradients; compare RLIF (Luo et al. 2023). Actions of whoever
    took over earn what they earn either way."""
    cloning: float = field(default=0.0, validator=number_between(0.0, 1e6))
    """Weight, in the policy's loss, of the mean squared distance between the policy's actions and those of the batch,
    both scaled to [-1, 1] (TD3+BC, Fujimoto and Gu 2021). It keeps the policy near actions whose values the critics
    know: set it where few transitions follow a clone. 0 leaves it out."""
    features: Literal["trained", "frozen"] = "trained"
    """Whether the critics' loss trains the policy's features, on which critics and the policy's head work. The policy's
    own loss trains its head alone. Frozen features are kept in the buffer instead of frames, and updates are several
    times as fast: choose it for a cloned policy."""


@frozen(kw_only=True)
class DsrlConfig(SACConfig):
    """Spec keys of the trainer `dsrl`. `train.lr` is the learning rate of the steering head."""

    def of_noise(self, numbers: int) -> OffPolicyConfig:
        """Return the settings of SAC over noise of this many numbers."""
        keys = {attribute.name: getattr(self, attribute.name) for attribute in fields(SACConfig)}
        if isinstance(self.temperature, Learned) and self.temperature.learned.target_entropy is None:
            keys["temperature"] = Learned(learned=evolve(self.temperature.learned, target_entropy=-numbers / 2))
        return OffPolicyConfig(**keys, features="frozen")

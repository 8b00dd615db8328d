"""Conversion between a simulator's observations and actions and those of a policy's training (`conventions:`)."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import numpy as np
from attrs import evolve, frozen

from vla_rl.core.errors import UserError
from vla_rl.core.manager import hookimpl
from vla_rl.core.spec.sections import ConventionsSpec
from vla_rl.core.types import ArrayOrTensor, Chunk, EnvInfo, Observation, UnexecutedActions

TURNED: dict[str, tuple[int, ...]] = {"as_is": (), "rotated": (1, 2), "flipped": (1,), "mirrored": (2,)}
"""Value of `images` -> dimensions of frames [N, H, W, 3] that are reversed."""
TEXTS: dict[str, Callable[[str], str]] = {
    "as_is": lambda text: text,
    "lower_case": str.lower,
    "sentence": lambda text: f"{text[:1].upper()}{text[1:].rstrip('.')}.",
    "none": lambda text: "",
    "underscores": lambda text: text.replace(" ", "_"),
}


@frozen
class Converter:
    """Conversions of one `conventions:` section. Its `@hookimpl` functions convert what a model returns."""

    spec: ConventionsSpec

    def convert_info(self, info: EnvInfo) -> EnvInfo:
        """Return the simulator's description as the policy knows it. Raise UserError for places that the state or an
        action does not have."""
        spec = self.spec
        for key, count in (("state", info.state_dim), ("action", info.action_dim)):
            order, negated = getattr(spec, f"{key}_order"), getattr(spec, f"{key}_negated")
            if order and sorted(order) != list(range(count)):
                raise UserError(f"conventions.{key}_order: {list(order)} is not an order of 0 to {count - 1}")
            if not set(negated) <= set(range(count)):
                raise UserError(f"conventions.{key}_negated: {list(negated)} is not among 0 to {count - 1}")
        ends = np.array([info.action_low, info.action_high], np.float64)
        low, high = np.sort(self.convert_actions(ends), axis=0).tolist()
        return evolve(
            info,
            action_low=tuple(low),
            action_high=tuple(high),
            action_names=_reorder(info.action_names, spec.action_order),
            state_names=_reorder(info.state_names, spec.state_order),
            tasks=tuple(evolve(task, instruction=TEXTS[spec.instruction](task.instruction)) for task in info.tasks),
        )

    def convert_observation(self, obs: Observation) -> Observation:
        """Return the observation that the policy was trained with."""
        spec = self.spec
        state = None if obs.state is None else _negate(obs.state, spec.state_negated)
        return evolve(
            obs,
            images={name: self._convert_frames(frames) for name, frames in obs.images.items()},
            state=state if state is None or not spec.state_order else state[..., list(spec.state_order)],
            instructions=tuple(map(TEXTS[spec.instruction], obs.instructions)),
        )

    def convert_actions(self, actions: ArrayOrTensor) -> Any:
        """Return the simulator's actions [..., A] as the policy gives them."""
        policy = _negate(actions, self.spec.action_negated) * self.spec.action_scale
        return policy[..., list(self.spec.action_order)] if self.spec.action_order else policy

    def restore_actions(self, actions: ArrayOrTensor) -> Any:
        """Return the policy's actions [..., A] as the simulator takes them."""
        simulator: Any = actions
        if self.spec.action_order:
            simulator = simulator[..., np.argsort(self.spec.action_order).tolist()]
        return _negate(simulator, self.spec.action_negated) * (1 / self.spec.action_scale)

    @property
    def arguments(self) -> dict[str, Callable[[Any], Any]]:
        """Conversions of the arguments of a model's methods, as `wrap` takes them."""
        return {
            "obs": self.convert_observation,
            "actions": self.convert_actions,
            "chunk": lambda chunk: evolve(chunk, actions=self.convert_actions(chunk.actions)),
            "previous": self._convert_previous,
        }

    @hookimpl(wraps="model")
    def sample_chunk(self) -> Generator[None, Chunk, Chunk]:
        chunk = yield
        return evolve(chunk, actions=self.restore_actions(chunk.actions))

    @hookimpl(wraps="model")
    def decode_actions(self) -> Generator[None, Any, Any]:
        return self.restore_actions((yield))

    @hookimpl(wraps="model")
    def continue_chunk(self) -> Generator[None, Any, Any]:
        return self.restore_actions((yield))

    @hookimpl(wraps="model")
    def reparameterised_actions(self) -> Generator[None, Any, Any]:
        actions, log_probs = yield
        return self.restore_actions(actions), log_probs

    def _convert_frames(self, frames: ArrayOrTensor) -> Any:
        axes = (*TURNED[self.spec.images], *((3,) if self.spec.channels == "bgr" else ()))
        if not axes:
            return frames
        return np.ascontiguousarray(np.flip(frames, axes)) if isinstance(frames, np.ndarray) else frames.flip(axes)

    def _convert_previous(self, previous: Iterable[UnexecutedActions]) -> list[UnexecutedActions]:
        return [evolve(rest, actions=self.convert_actions(rest.actions)) for rest in previous]


def _negate(numbers: Any, negated: Sequence[int]) -> Any:
    """Return numbers [..., D] with the sign of some turned."""
    if not negated:
        return numbers
    signs = [-1 if number in negated else 1 for number in range(numbers.shape[-1])]
    return numbers * (np.array(signs, numbers.dtype) if isinstance(numbers, np.ndarray) else numbers.new_tensor(signs))


def _reorder(names: tuple[str, ...], order: Sequence[int]) -> tuple[str, ...]:
    return tuple(names[number] for number in order) if names and order else names

"""A policy out of a checkpoint, without its simulator."""

from __future__ import annotations

import hashlib
import reprlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from attrs import define, field

from vla_rl.core.capabilities import ContinuesChunks, require_capability
from vla_rl.core.errors import PluginError, UserError
from vla_rl.core.hookspecs import PolicyEngine
from vla_rl.core.randomness import Noise
from vla_rl.core.spec.spec import Spec, has_own_policy
from vla_rl.core.types import Array, EnvInfo, Observation, UnexecutedActions, to_numpy
from vla_rl.runtime.placement.hardware import check_device
from vla_rl.runtime.run_folder.env_info import read_env_info
from vla_rl.runtime.run_folder.folder import checkpoint_in, read_state
from vla_rl.runtime.run_folder.manifest import NAME as MANIFEST
from vla_rl.runtime.run_folder.spec_file import load_run_spec
from vla_rl.runtime.workers.models import build_actor, policy_name
from vla_rl.runtime.workers.policy.weight_versions import load_trained
from vla_rl.version import __version__

Key = tuple[int, int, int]

MAX_INSTRUCTION = 1000
"""Characters."""


class _Brief(reprlib.Repr):
    """A client's data as text for an error message; bytes are cut before formatting, as they may be many."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 78

    def repr_bytes(self, data: bytes, level: int) -> str:
        return repr(data[:40])


brief = _Brief().repr


class BadObservation(UserError):
    """An observation differs from those the policy was trained on; the message describes the expected one."""


@define(eq=False)
class Policy:
    """An engine that acts; calls from several threads take turns."""

    engine: PolicyEngine
    spec: Spec
    """Spec of the run that trained it, or whose simulator an engine with its own policy is for."""
    info: EnvInfo
    """Cameras, state and actions of the simulator that it was trained in."""
    step: int | None
    """Training step of the checkpoint; None for an engine with its own policy."""
    sha256: str | None
    """Hash of the checkpoint's manifest, with the hash of each file; None for an engine with its own policy."""
    device: str
    greedy: bool
    acted: int = field(default=0, init=False)
    """Chunks that were chosen."""
    clipped: int = field(default=0, init=False)
    """Number of these chunks with a number outside the bounds."""
    _lock: Any = field(factory=Lock, init=False, repr=False)

    @property
    def continues(self) -> bool:
        """Whether it can continue previous actions."""
        return isinstance(self.engine, ContinuesChunks)

    @property
    def plugin(self) -> str:
        """Type of the model, or of an engine with its own policy."""
        return self.spec.rollout.engine.type if has_own_policy(self.spec) else self.spec.model.type

    @property
    def _plugin_label(self) -> str:
        """Kind and type of the plugin, for messages."""
        return policy_name(self.spec)

    @property
    def chunk(self) -> int:
        """C, actions that are chosen at once."""
        return self.spec.rollout.chunk

    def act(
        self,
        images: Mapping[str, Any],
        state: Any = None,
        instruction: str | None = None,
        *,
        key: Key | None = None,
        previous: Any = None,
        delay: int = 0,
    ) -> Array:
        """The next actions of one robot, to be executed in their order.

        Args:
            images: camera -> uint8 [H, W, 3], upright, as `info.cameras` has them.
            state: `info.state_dim` numbers, in the simulator's units.
            instruction: what to do; None: that of the only task that it was trained on.
            key: of the random numbers, where the policy is not greedy: equal keys choose equal actions for equal
                observations. None: (0, 0, number of the call).
            previous: what is left of the last chunk, [M, A] in the simulator's units, for real-time chunking: the
                actions continue it. Of models that denoise (pi0, pi05, smolvla, gr00t).
            delay: how many of these will have been executed when the answer comes.

        Returns: float32 [C, A] in the simulator's units, within its bounds. The first is for the observation's moment.

        Raises BadObservation; PluginError where the model gives numbers that are not finite.
        """
        obs = self.observation(images, state, instruction)
        unexecuted = None if previous is None else self.unexecuted(previous, delay)
        actions: Array = self.act_on(obs, [(0, 0, self.acted) if key is None else key], [unexecuted])[0]
        return actions

    def observation(self, images: Mapping[str, Any], state: Any, instruction: str | None) -> Observation:
        """One row, as the model takes it. Raises BadObservation."""
        info, wanted = self.info, f"it must be {self.info.state_dim} numbers"
        shape = (info.state_dim,)
        return Observation(
            images={camera: _check_image(images, camera, size)[None] for camera, size in info.cameras.items()},
            state=_check_numbers(state, "the state", wanted, shape.__eq__)[None] if info.state_dim else None,
            instructions=(self._check_instruction(instruction),),
        )

    def unexecuted(self, previous: Any, delay: Any) -> UnexecutedActions:
        """Return the rest of the last chunk, in the form that `act_on` takes. Raises BadObservation."""
        if not self.continues:
            raise BadObservation(
                f"{self._plugin_label} cannot continue previous actions (real-time chunking); send none"
            )
        width = self.info.action_dim
        wanted = f"it must be [M, {width}], M within 1 and {self.chunk}: what was not executed of the last chunk"
        shapes = [(left, width) for left in range(1, self.chunk + 1)]
        actions = _check_numbers(previous, "the array of previous actions", wanted, shapes.__contains__)
        if not isinstance(delay, int | np.integer) or not 0 <= delay <= len(actions):
            raise BadObservation(
                f"the delay is {brief(delay)}; it must be a whole number within 0 and {len(actions)}, the "
                "number of previous actions"
            )
        return UnexecutedActions(actions=actions, delay=int(delay))

    def act_on(
        self,
        obs: Observation,
        keys: Sequence[Key],
        previous: Sequence[UnexecutedActions | None] = (),
        clipped: Array | None = None,
    ) -> Array:
        """Return actions float32 [N, C, A] for N rows of `observation`. Each has a key of random numbers, and may have
        what `unexecuted` returned. Which chunks were clipped is written to `clipped`, bool [N]. Raises PluginError."""
        with self._lock:
            actions = self._choose_actions(obs, keys, previous or [None] * len(obs))
            if not np.isfinite(actions).all():
                raise PluginError(f"{self._plugin_label} chose actions that are not finite")
            low, high = (np.array(bound, np.float32) for bound in (self.info.action_low, self.info.action_high))
            within: Array = np.clip(actions, low, high)
            beyond = (within != actions).any((1, 2))
            self.acted += len(obs)
            self.clipped += int(beyond.sum())
            if clipped is not None:
                clipped[:] = beyond
            return within

    def _choose_actions(
        self, obs: Observation, keys: Sequence[Key], previous: Sequence[UnexecutedActions | None]
    ) -> Array:
        """Return the chosen actions [N, C, A]: one inference for the rows with previous actions, one for the others."""
        actions = np.empty((len(obs), self.chunk, self.info.action_dim), np.float32)
        starting = [row for row, unexecuted in enumerate(previous) if unexecuted is None]
        continued = [row for row, unexecuted in enumerate(previous) if unexecuted is not None]
        for rows in filter(None, (starting, continued)):
            row_obs = obs if len(rows) == len(obs) else obs.take(np.array(rows))
            noise = Noise(self.spec.seed, "serving", *zip(*(keys[row] for row in rows), strict=True))
            if rows is starting:
                chunk = self.engine.act(row_obs, noise, self.greedy).actions
            else:
                unexecuted = [rest for rest in previous if rest is not None]
                engine = require_capability(self.engine, ContinuesChunks, "real-time chunking")
                chunk = engine.continue_chunk(row_obs, noise, self.greedy, unexecuted)
            actions[rows] = to_numpy(chunk)
        return actions

    def warm_up(self, rows: int) -> None:
        """Run inference for one black image and for a batch of this many, so that no client waits for one-time work."""
        self.engine.warm_up(sorted({1, rows}))
        info = self.info
        images = {camera: np.zeros((*size, 3), np.uint8) for camera, size in info.cameras.items()}
        row = self.observation(images, np.zeros(info.state_dim, np.float32), info.tasks[0].instruction)
        for count in (1, rows):
            self.act_on(Observation.concat([row] * count), [(0, 0, n) for n in range(count)])
        self.acted = self.clipped = 0

    def close(self) -> None:
        """Close the engine; the policy cannot act afterwards."""
        self.engine.close()

    def about(self) -> dict[str, Any]:
        """Return what a client has to know, as plain data."""
        info = self.info
        return {
            "protocol": 1,
            "vla_rl": __version__,
            "model": self.plugin,
            "checkpoint_sha256": self.sha256,
            "step": self.step,
            "statistics": self.engine.statistics_name,
            "greedy": self.greedy,
            "temperature": self.spec.rollout.temperature,
            "action_chunk": self.chunk,
            "action_dim": info.action_dim,
            "action_low": [float(number) for number in info.action_low],
            "action_high": [float(number) for number in info.action_high],
            "cameras": {camera: list(size) for camera, size in info.cameras.items()},
            "state_dim": info.state_dim,
            "real_time_chunking": self.continues,
        }

    def _check_instruction(self, instruction: str | None) -> str:
        if instruction is None and len(self.info.tasks) == 1:
            return self.info.tasks[0].instruction
        if not isinstance(instruction, str) or not instruction.strip() or len(instruction) > MAX_INSTRUCTION:
            example = self.info.tasks[0].instruction
            got = "none" if instruction is None else brief(instruction)
            raise BadObservation(
                f"the instruction is {got}; it must be a text of 1 to {MAX_INSTRUCTION} characters, such as {example!r}"
            )
        return instruction


def open_policy(
    folder: str | Path, *, device: str | None = None, greedy: bool = True, overrides: Sequence[str] = ()
) -> Policy:
    """Return the policy of a checkpoint: the same model with the same weights as in `vla-rl eval`, without the
    simulator. With an override that chooses an engine with its own policy, such as `remote`, that policy acts.

    Args:
        folder: RUN (its newest checkpoint) or RUN/checkpoints/step_...; its files are compared with their hashes.
        device: "cpu", "cuda", "cuda:1"; None: a GPU, if available.
        greedy: draw nothing (for most models: the likeliest actions); else sample as in training.
        overrides: changes of the run's spec, such as `model.checkpoint=...` where that is elsewhere now.

    Raises UserError: CheckpointError for a damaged, incomplete or another model's checkpoint, SpecError, PluginError.
    """
    checkpoint = checkpoint_in(Path(folder))
    spec = load_run_spec(checkpoint.parents[1], overrides)
    state, info = read_state(checkpoint), read_env_info(checkpoint)
    device = check_device(device)
    engine = build_actor(spec, info, device, state.scaling)
    if has_own_policy(spec):
        return Policy(engine=engine, spec=spec, info=info, step=None, sha256=None, device=device, greedy=greedy)
    load_trained(engine, checkpoint / "trainer" / "learner.pt")
    digest = hashlib.sha256((checkpoint / MANIFEST).read_bytes()).hexdigest()
    return Policy(engine=engine, spec=spec, info=info, step=state.step, sha256=digest, device=device, greedy=greedy)


def _check_image(images: Mapping[str, Any], camera: str, size: tuple[int, int]) -> Array:
    if camera not in images:
        raise BadObservation(f"there is no image of camera {camera!r}; there are: {', '.join(map(str, images)) or '-'}")
    image = np.asarray(images[camera])
    if image.dtype != np.uint8 or image.shape != (*size, 3):
        raise BadObservation(
            f"the image of camera {camera!r} is {image.dtype} {list(image.shape)}; the policy was trained on uint8 "
            f"{[*size, 3]}: height, width, RGB"
        )
    return np.ascontiguousarray(image)


def _check_numbers(data: Any, what: str, wanted: str, fits: Callable[[tuple[int, ...]], bool]) -> Array:
    """A copy in float32: what came in a frame cannot be written to. Shapes are looked at before a copy."""
    if isinstance(data, np.ndarray) and not fits(data.shape):
        raise BadObservation(f"{what} has the shape {list(data.shape)}; {wanted}")
    try:
        with np.errstate(over="ignore"):  # what is infinite then is refused
            numbers = np.array(data, np.float32)
    except (TypeError, ValueError):
        raise BadObservation(f"{what} is {brief(data)}; {wanted}") from None
    if not fits(numbers.shape):
        raise BadObservation(f"{what} has the shape {list(numbers.shape)}; {wanted}")
    if not np.isfinite(numbers).all():
        raise BadObservation(f"{what} has numbers that are not finite")
    return numbers

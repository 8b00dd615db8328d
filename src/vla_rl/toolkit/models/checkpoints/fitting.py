"""Compatibility checks of a checkpoint, a simulator and a spec. Cheap to import."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from vla_rl.core.contexts import CheckContext
from vla_rl.core.errors import CheckpointError, UserError, did_you_mean
from vla_rl.core.spec.structure import at
from vla_rl.core.types import EnvInfo
from vla_rl.toolkit.models.checkpoints.files import WANTED, check_tokenizer, find_weights, folder_of, resolve_checkpoint
from vla_rl.toolkit.relative_actions import (
    References,
    RelativeActions,
    check_references,
    choose_numbers,
    match_state,
    needs_names,
)

logger = logging.getLogger(__name__)
NEAR = 0.01
"""Share of the simulator's range within which two ends count as equal."""


class MismatchError(UserError):
    """Model and simulator are incompatible."""


def one_source(config: Any, attribute: Any, preset: str | None) -> None:
    """Validate `preset` in a config with `checkpoint` before it: exactly one must be given (attrs validator)."""
    if (config.checkpoint is None) == (preset is None):
        raise ValueError("give exactly one of `checkpoint` (a folder to start from) and `preset` (random weights)")


def choose_cameras(
    model: str, env: EnvInfo, spec_cameras: Sequence[str] | None, trained: Collection[str], usual: Sequence[str]
) -> tuple[str, ...]:
    """Return the cameras that the spec asks for, else those of the checkpoint's training if the simulator has them all,
    else the usual ones. Raise MismatchError for an unknown camera, and if none is chosen."""
    available = tuple(env.cameras)
    chosen = tuple(spec_cameras or (trained if trained and set(trained) <= set(available) else usual))
    for name in chosen:
        if name not in available:
            suggestion = did_you_mean(name, available)
            names = ", ".join(available) or "none"
            raise MismatchError(f"no camera {name!r} in this simulator; it has: {names}{suggestion}")
    if not chosen:
        raise MismatchError(f"{model} needs at least one camera, and this simulator has none")
    return chosen


def check_camera_count(trained: Sequence[str], chosen: Sequence[str]) -> None:
    """Raise MismatchError if the policy would see fewer or more cameras than in training (`trained`: () if unknown)."""
    if trained and len(trained) != len(chosen):
        raise MismatchError(
            f"the checkpoint was trained with {len(trained)} cameras ({', '.join(trained)}), the policy would see "
            f"{len(chosen)} ({', '.join(chosen)}); name the right ones in model.cameras"
        )


def require_state(env: EnvInfo, key: str) -> None:
    """Raise MismatchError if the spec's `key` asks for a state that the simulator does not have."""
    if env.state_dim == 0:
        raise MismatchError(f"{key} needs a state, and this simulator has none; set {key}: false")


def check_action_dim(trained: str, dim: int, env: EnvInfo) -> None:
    """Raise MismatchError for another action dimension. `trained` begins the message, such as "FOLDER was trained"."""
    if dim != env.action_dim:
        raise MismatchError(f"{trained} for {dim}-dimensional actions, the simulator takes {env.action_dim}")


def check_action_range(
    source: str,
    ranges: Sequence[tuple[float, float]],
    env: EnvInfo,
    *,
    gripper: str | None = None,
    converts: bool = False,
    remedy: str = "",
) -> None:
    """Compare the range of the model's un-normalised actions with the simulator's bounds, dimension by dimension. Raise
    MismatchError if the two do not overlap. Warn if most of the range would be clipped, and if it is exactly one half
    of the simulator's range, as for a gripper of 0 and 1 against one of -1 and 1.

    Args:
        source: such as "statistics 'KEY' of FOLDER".
        ranges: lowest and highest number of each dimension in the simulator's units, scaled or not.
        gripper: the model's setting that turns 0 and 1 of the last dimension into -1 and 1, if it has one.
        converts: that setting is on: the last dimension's range is not compared.
        remedy: what to set if statistics are another robot's.
    """
    bounds = list(zip(env.action_low, env.action_high, strict=True))
    if converts:
        low, high = bounds.pop()
        if low > -1 or high < 1:
            logger.warning(
                "%s makes the last number of an action -1 or 1, and the simulator takes %g to %g; if the gripper does "
                "not move as it should, leave that setting out",
                gripper, low, high,
            )  # fmt: skip
    for i, ((low, high), (start, end)) in enumerate(zip(bounds, ranges, strict=False)):
        fact = f"{source}: dimension {i} ranges from {start:g} to {end:g}, the simulator takes {low:g} to {high:g}"
        shared = min(high, end) - max(low, start)
        middle, tolerance = (low + high) / 2, NEAR * (high - low)
        if shared < -tolerance:
            raise MismatchError(f"{fact}; they belong to another robot or other units{remedy}")
        halves = ((middle, high), (low, middle))
        if any(abs(start - one) <= tolerance and abs(end - other) <= tolerance for one, other in halves):
            setting = f": set {gripper} if it is a gripper" if gripper and i == env.action_dim - 1 else ""
            logger.warning("%s; actions never reach the other half of that%s", fact, setting)
        elif end > start and shared <= (end - start) / 2:
            logger.warning("%s; half of it or more is clipped, as with another robot's or other units%s", fact, remedy)


def choose_references(config: Any, env: EnvInfo, recorded: References | None = None, source: str = "") -> References:
    """Return what actions are relative to: as the spec says, else as the checkpoint's folder does. Raise MismatchError
    where they contradict each other, and where the simulator lacks the numbers.

    Args:
        config: has `actions`.
        recorded: what the folder says; None: nothing.
        source: the folder, for messages.
    """
    setting = config.actions
    if recorded is None:
        references = match_state(setting, env, MismatchError) if isinstance(setting, RelativeActions) else ()
    else:
        references = recorded
        _check_agreement(setting, env, recorded, source)
    check_references(references, env, source, MismatchError)
    return references


def _check_agreement(setting: RelativeActions | str | None, env: EnvInfo, recorded: References, source: str) -> None:
    """Raise MismatchError where the spec asks for other relative numbers than a folder's statistics are of, or names
    other numbers of the state. Names that the simulator does not know, but the folder's data did, are not compared."""
    if setting is None:
        return
    relative = {number: index for number, index in enumerate(recorded) if index is not None}
    wanted: dict[int, int] = {}
    if isinstance(setting, RelativeActions):
        if needs_names(setting) and recorded and not env.action_names:
            return
        named = setting.dimensions.values() if isinstance(setting.dimensions, Mapping) else ()
        if named and (env.state_names or all(isinstance(place, int) for place in named)):
            pairs = enumerate(match_state(setting, env, MismatchError))
            wanted = {number: index for number, index in pairs if index is not None}
        else:
            numbers = choose_numbers(setting, env, MismatchError).values()
            wanted = {number: relative.get(number, number) for number in numbers}
    if wanted != relative:
        as_pairs = wanted.keys() == relative.keys()  # else the numbers themselves differ
        raise MismatchError(
            f"model.actions asks for actions with {_describe_numbers(wanted, as_pairs)}, and the statistics in "
            f"{source} are of actions with {_describe_numbers(relative, as_pairs)}; leave model.actions out, or "
            "train it on demonstrations with imitation.statistics: data"
        )


def _describe_numbers(relative: Mapping[int, int], as_pairs: bool) -> str:
    numbers = (f"{number} (to {place})" if as_pairs else f"{number}" for number, place in sorted(relative.items()))
    return f"numbers {', '.join(numbers)} relative to the state" if relative else "no relative numbers"


def data_references(config: Any, env: EnvInfo, read: Callable[[Path], References | None]) -> References:
    """Return what actions are relative to in a model that is scaled by the data, for `ModelPlugin.relative_actions`: as
    the spec says, else as the checkpoint's folder does, which `read` reads.

    Args:
        config: has `checkpoint` and `actions`.
    """
    if config.checkpoint is None or config.actions is not None:
        return choose_references(config, env)
    folder = resolve_checkpoint(config.checkpoint)
    return choose_references(config, env, read(folder), str(folder))


def check_state_dim(trained: str, dim: int, env: EnvInfo) -> None:
    """Raise MismatchError if the simulator has another state dimension; `trained` as in `check_action_dim`."""
    if dim != env.state_dim:
        raise MismatchError(f"{trained} on a {dim}-dimensional state, the simulator's has {env.state_dim} dimensions")


def check_horizon(folder: Path | str | None, horizon: int, chunk: int) -> None:
    """Raise MismatchError for chunks longer than those of training. Of shorter ones the first actions are executed."""
    if chunk > horizon:
        raise MismatchError(
            f"{folder} was trained for chunks of {horizon} actions, the spec asks for {chunk}; "
            f"set rollout.chunk to {horizon} or less"
        )


def known_number(
    checkpoint: str | None,
    read: Callable[[Path], int | None],
    wanted: Sequence[str] = WANTED,
    builtin: Path | None = None,
) -> int | None:
    """Return the number that `read` finds in the checkpoint's folder, for `ModelPlugin.action_dim` and
    `ModelPlugin.default_chunk`. None for a preset, which adapts; for an unreadable folder (building the model reports
    that in full); and for a hub name that is not in the cache.

    Args:
        wanted, builtin: as in `checkpoints.resolve_checkpoint`.
    """
    if checkpoint is None:
        return None
    try:
        return read(resolve_checkpoint(checkpoint, wanted, builtin, download=False))
    except (CheckpointError, OSError, ValueError, LookupError, TypeError, AttributeError, ImportError):
        return None


def check_folder(config: Any, context: CheckContext, read: Callable[[Path], int]) -> None:
    """Check that a model folder is complete, and that the spec's chunk is no longer than the model's; for
    `ModelPlugin.check` of models that are one folder with a tokenizer.

    Args:
        config: has `checkpoint` and `tokenizer`.
        read: reads the small files and returns the length of the model's chunks; raises UserError for a bad one.
    """
    if config.checkpoint is None:
        return
    with at("checkpoint"):
        folder = folder_of(config.checkpoint)
        if folder is not None:
            check_horizon(folder, read(folder), context.chunk)
            find_weights(folder)
    check_tokenizer(folder, config.tokenizer)

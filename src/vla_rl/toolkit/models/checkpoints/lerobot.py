"""Checkpoints in lerobot's layout: the statistics that normalise actions and state, and the files of pre- and
post-processing that hold them. Cheap to import. A folder has config.json, policy_preprocessor.json and the safetensors
file that its normaliser names."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from vla_rl.core.errors import CheckpointError, did_you_mean
from vla_rl.core.types import EnvInfo
from vla_rl.toolkit.json_files import Record, encode_json, path_inside
from vla_rl.toolkit.models.checkpoints.files import MAX_CHUNK, MAX_SIZE, WEIGHTS, find_weights, read_file, read_keys
from vla_rl.toolkit.relative_actions import GRIPPER, References

PREPROCESSOR, POSTPROCESSOR = "policy_preprocessor.json", "policy_postprocessor.json"
NORMALIZER = "normalizer_processor"
RELATIVE, ABSOLUTE = "relative_actions_processor", "absolute_actions_processor"
"""lerobot's step that subtracts the state from actions, and the one that adds it again."""
OWN_RELATIVE = "vla_rl_relative_actions_processor"
"""Our step in place of `RELATIVE` where an action's number is relative to a state's number at another place, which
lerobot cannot express. It refuses steps that it does not know."""
RELATIVE_FLAG, ACTION_NAMES = "use_relative_actions", "action_feature_names"
WITH_RELATIVE = ("pi0", "pi05")
"""Types of models in whose config.json lerobot reads `RELATIVE_FLAG`."""
LEROBOT = "model."
"""Prefix of every tensor's name in lerobot's files."""
EXECUTED = "n_action_steps"
"""Key of config.json: actions of a chunk that are executed, the default of `rollout.chunk`."""
ACTION, STATE, IMAGES = "action", "observation.state", "observation.images."
OLD_STATISTICS = re.compile(r"normalize_(inputs|targets|outputs)\.")
"""Names of the tensors in which lerobot kept statistics before 0.4."""
MIGRATE = ("python", "-m", "lerobot.processor.migrate_policy_normalization")
"""lerobot's script that turns such a folder into one with pre- and post-processing (0.4 to 0.6)."""
MODES = {
    "MEAN_STD": ("mean", "std"),
    "MIN_MAX": ("min", "max"),
    "QUANTILES": ("q01", "q99"),
    "QUANTILE10": ("q10", "q90"),
    "IDENTITY": (),
}
"""lerobot's normalisation modes and the two statistics that each needs."""
LARGEST_SCALE = 1e30
"""The largest number of statistics; twice as much, and what it is multiplied with, are finite in float32."""


@frozen(kw_only=True)
class FeatureScale:
    """Normalisation of one feature, by lerobot's rules."""

    mode: str
    values: tuple[tuple[float, ...], ...]
    """The mode's two statistics, D numbers each; none for IDENTITY."""
    dim: int
    eps: float = 1e-8
    margin: float = 0.0
    """Added to the width of a range in both directions (openpi's quantiles)."""
    flat: bool = False
    """A dimension with an empty range is normalised to 0 and restored to that range (GR00T), without eps."""
    clip: bool = False
    """Numbers outside the range are clipped to it, in both directions (GR00T N1.7)."""
    by_step: tuple[tuple[tuple[float, ...], ...], ...] = ()
    """The mode's two statistics for each step of a chunk, H times D numbers each, where they are not the same for all
    steps (relative actions of GR00T N1.7); `values` then has the widest range of all steps."""

    def usual_ranges(self) -> list[tuple[float, float]]:
        """Return the lowest and highest usual number of each dimension: the mode's ends, or one standard deviation
        below and above the mean, which is exact for a gripper that is as often open as closed. Empty for IDENTITY."""
        if self.mode == "MEAN_STD":
            mean, deviation = self.values
            return [(m - d, m + d) for m, d in zip(mean, deviation, strict=True)]
        return list(zip(*self.values, strict=True))


@frozen(kw_only=True)
class Statistics:
    """Normalisation of actions and state."""

    action: FeatureScale
    state: FeatureScale | None
    """Normalisation of the state; None: the folder has no state."""
    references: References | None = ()
    """What actions are relative to; `action` scales the differences. None: the folder does not say."""


def bounds_statistics(env: EnvInfo, uses_state: bool) -> Statistics:
    """Return statistics that scale actions by the simulator's bounds and leave the state as it is."""
    bounds = (tuple(map(float, env.action_low)), tuple(map(float, env.action_high)))
    return Statistics(
        action=FeatureScale(mode="MIN_MAX", values=bounds, dim=env.action_dim),
        state=FeatureScale(mode="IDENTITY", values=(), dim=env.state_dim) if uses_state else None,
    )


def read_statistics(folder: Path, raw: Mapping[str, Any]) -> Statistics:
    """Read the statistics of the normaliser in policy_preprocessor.json. Raise CheckpointError if it has none: a
    checkpoint is never used with actions that are not scaled.

    Args:
        raw: config.json.
    """
    steps, record = read_steps(folder), _config_record(folder, raw)
    step = next((s for s in steps if s.data.get("registry_name") == NORMALIZER), None)
    if step is None:
        raise CheckpointError(
            f"{folder / PREPROCESSOR} has no step {NORMALIZER!r}: there are no statistics to scale with"
        )
    settings = step.get_section("config")
    file, tensors = folder / PREPROCESSOR, {}
    if "state_file" in step.data:
        file = path_inside(folder, step.get_text("state_file"), f"{step.source}: 'state_file'", CheckpointError)
        tensors = _read_tensors(file)
    modes = record.get_section("normalization_mapping"), settings.get_section("norm_map")
    features: dict[str, Record] = {}
    for section in (record.get_section("output_features"), record.get_section("input_features")):
        features |= section.records_here()
    features |= settings.get_section("features").records_here()

    def read_scale(feature: str, kind: str) -> FeatureScale:
        mode = next((part.get_text(kind) for part in reversed(modes) if kind in part.data), "IDENTITY")
        if mode not in MODES:
            raise CheckpointError(f"{folder}: normalisation {mode!r} is not known{did_you_mean(mode, MODES)}")
        names = [f"{feature}.{statistic}" for statistic in MODES[mode]]
        missing = [name for name in names if name not in tensors]
        if missing:
            raise CheckpointError(
                f"{folder} normalises {feature!r} by {mode} and lacks {', '.join(missing)}; the statistics there are: "
                f"{', '.join(sorted(tensors)) or 'none'}"
            )
        values = tuple(tensors[name] for name in names)
        check_scale(str(file), mode, dict(zip(names, values, strict=True)))
        dim = len(values[0]) if values else _read_dim(features[feature])
        return FeatureScale(mode=mode, values=values, dim=dim, eps=settings.get_number("eps", 0, high=1, default=1e-8))

    if ACTION not in features:
        raise CheckpointError(f"{folder / 'config.json'} names no output feature {ACTION!r}")
    action = read_scale(ACTION, "ACTION")
    return Statistics(
        action=action,
        state=read_scale(STATE, "STATE") if STATE in features else None,
        references=read_references(folder, raw, action.dim),
    )


def check_scale(source: str, mode: str, values: Mapping[str, Sequence[float]]) -> None:
    """Raises CheckpointError for statistics that cannot scale anything: they would give NaN, or actions upside down.

    Args:
        source: the file, and the place in it.
        mode: of MODES.
        values: its two statistics, with the names that the file has for them.
    """
    for name, numbers in values.items():
        for i, number in enumerate(numbers):
            if not abs(number) <= LARGEST_SCALE:
                raise CheckpointError(
                    f"{source}: {f'{name}[{i}]'!r} is {number}, a number of at most {LARGEST_SCALE:g} is expected"
                )
    if not values:
        return
    (first, low), (second, high) = values.items()
    if len(low) != len(high):
        raise CheckpointError(f"{source} has {len(low)} numbers of {first!r} and {len(high)} of {second!r}")
    for i, (start, end) in enumerate(zip(low, high, strict=True)):
        if mode == "MEAN_STD" and end < 0:
            raise CheckpointError(f"{source}: {f'{second}[{i}]'!r} is {end}, a number from 0 on is expected")
        if mode != "MEAN_STD" and end < start:
            raise CheckpointError(
                f"{source}: {f'{second}[{i}]'!r} is {end}, below the {start} of {f'{first}[{i}]'!r}: not a range"
            )


def read_horizon(raw: Record) -> int:
    """H, actions in a denoised chunk, by config.json. Raises CheckpointError."""
    return raw.get_integer("chunk_size", 1, MAX_CHUNK, default=50)


def read_executed(raw: Record) -> int | None:
    """Return how many actions of a chunk lerobot executes, by config.json; None: unknown. Raise CheckpointError."""
    return raw.get_integer(EXECUTED, 1, MAX_CHUNK) if raw.has_value(EXECUTED) else None


def read_steps(folder: Path) -> list[Record]:
    """Return the steps of lerobot's pre-processing, in order. Raise CheckpointError for a missing or damaged file."""
    refuse_old_statistics(folder)
    return read_keys(folder / PREPROCESSOR).list_of_records("steps", [])


def refuse_old_statistics(folder: Path) -> None:
    """Raise CheckpointError, with the command that migrates it, for a folder of lerobot before 0.4 (October 2025)."""
    if (folder / PREPROCESSOR).is_file() or not (folder / WEIGHTS).is_file():
        return
    old = [name for name in find_weights(folder).shapes if OLD_STATISTICS.search(name)]
    if not old:
        return
    migrated = f"{folder}-migrated"
    raise CheckpointError(
        f"{folder} keeps its statistics among the weights ({old[0]}), as lerobot did before 0.4, and has no "
        f"{PREPROCESSOR}; migrate it, where lerobot is installed:\n"
        f"  {shlex.join([*MIGRATE, '--pretrained-path', str(folder), '--output-dir', migrated])}\n"
        f"then set model.checkpoint: {migrated}"
    )


def _config_record(folder: Path, raw: Mapping[str, Any]) -> Record:
    return Record(source=str(folder / "config.json"), data=raw, error=CheckpointError)


def _read_dim(feature: Record) -> int:
    """Numbers of a feature. Raises CheckpointError."""
    shape = feature.get_sizes("shape", 0, MAX_SIZE)
    if len(shape) != 1:
        raise feature.build_error("shape", "a list of one whole number")
    return shape[0]


def check_actions(folder: Path, raw: Mapping[str, Any]) -> None:
    """Check a folder whose statistics are not used and may be missing. Raise CheckpointError."""
    read_references(folder, raw, 0)
    for section in ("input_features", "output_features"):
        _config_record(folder, raw).get_section(section).records_here()
    _config_record(folder, raw).get_section("normalization_mapping")


def read_references(folder: Path, raw: Mapping[str, Any], action_dim: int) -> References:
    """Return which number of the state each of an action's numbers is relative to, by the steps of pre-processing, or
    by config.json in a folder without such a step. Raise CheckpointError where the two contradict each other.

    Args:
        raw: config.json.
    """
    record = _config_record(folder, raw)
    flag = _read_flag(record, RELATIVE_FLAG)
    if _read_flag(record, "use_delta_joint_actions_aloha"):
        raise CheckpointError(
            f"{record.source}: 'use_delta_joint_actions_aloha' is true, which lerobot never implemented for this "
            f"layout; set it to false, or use a folder with {RELATIVE_FLAG!r}"
        )
    steps = read_steps(folder) if (folder / PREPROCESSOR).is_file() else []
    configs = {step.data.get("registry_name"): step.get_section("config") for step in steps}
    if OWN_RELATIVE in configs:
        indices = configs[OWN_RELATIVE].get_sizes("state_index", -1, MAX_SIZE)
        return tuple(None if place < 0 else place for place in indices)
    if RELATIVE in configs:
        step = configs[RELATIVE]
        enabled = step.get_boolean("enabled", False)
        if flag and not enabled:
            raise CheckpointError(
                f"{record.source} says {RELATIVE_FLAG!r}, and its pre-processing switches {RELATIVE!r} off; correct "
                f"the one that is wrong"
            )
        names, excluded = _read_names(step, "action_names"), _read_names(step, "exclude_joints")
    else:
        enabled, names = flag, _read_names(record, ACTION_NAMES)
        excluded = _read_names(record, "relative_exclude_joints") if flag else ()
        excluded = (GRIPPER,) if excluded is None else excluded
    if not enabled:
        return ()
    mask = mask_by_names(names, excluded or (), action_dim)
    return tuple(place if relative else None for place, relative in enumerate(mask)) if any(mask) else ()


def mask_by_names(names: Sequence[str] | None, excluded: Sequence[str], count: int) -> list[bool]:
    """Return lerobot's mask of relative numbers: all but those whose name has one of the `excluded` texts in it, in any
    case. Without names, and beyond them, numbers are relative."""
    tokens = [token.lower() for token in excluded if token]
    mask = [not any(token in name.lower() for token in tokens) for name in (names or ())[:count]]
    return mask + [True] * (count - len(mask))


def _read_names(record: Record, key: str) -> tuple[str, ...] | None:
    return record.get_texts(key) if record.has_value(key) else None


def _read_flag(record: Record, key: str) -> bool:
    """False where it is left out or null. Raises CheckpointError."""
    return record.get_boolean(key) if record.has_value(key) else False


def model_config(
    statistics: Statistics, cameras: Sequence[str], pixels: int, horizon: int, **own: Any
) -> dict[str, Any]:
    """Return config.json for a network from another layout; `own` has the model's keys, including `type`."""
    inputs: dict[str, Any] = {f"{IMAGES}{name}": {"type": "VISUAL", "shape": [3, pixels, pixels]} for name in cameras}
    modes = {"VISUAL": "IDENTITY", "ACTION": statistics.action.mode}
    if statistics.state is not None:
        inputs[STATE] = {"type": "STATE", "shape": [statistics.state.dim]}
        modes["STATE"] = statistics.state.mode
    kind = own.pop("type")
    return {
        "type": kind,
        "n_obs_steps": 1,
        "input_features": inputs,
        "output_features": {ACTION: {"type": "ACTION", "shape": [statistics.action.dim]}},
        "normalization_mapping": modes,
        **own,
        **_relative_keys(kind, statistics.references or (), ()),
        "chunk_size": horizon,
    }


def rescale_config(raw: Mapping[str, Any], statistics: Statistics) -> dict[str, Any]:
    """Return config.json of a model that these statistics normalise; empty if `raw` is."""
    if not raw:
        return {}
    modes = {**(raw.get("normalization_mapping") or {}), "ACTION": statistics.action.mode}
    inputs = {name: entry for name, entry in (raw.get("input_features") or {}).items() if name != STATE}
    if statistics.state is not None:
        modes["STATE"] = statistics.state.mode
        inputs[STATE] = {"type": "STATE", "shape": [statistics.state.dim]}
    outputs = {ACTION: {"type": "ACTION", "shape": [statistics.action.dim]}}
    keys = {"normalization_mapping": modes, "input_features": inputs, "output_features": outputs}
    kept = {key: value for key, value in raw.items() if key not in (RELATIVE_FLAG, "relative_exclude_joints")}
    names = raw.get(ACTION_NAMES)
    return {**kept, **keys, **_relative_keys(raw.get("type"), statistics.references or (), names)}


def _relative_keys(kind: Any, references: References, names: Any) -> dict[str, Any]:
    """Return the keys of config.json that say which actions are relative, where lerobot has keys for it."""
    if kind not in WITH_RELATIVE or not references or not by_place(references):
        return {}
    settings = _describe_mask(references, names)
    return {
        RELATIVE_FLAG: True,
        "relative_exclude_joints": settings["exclude_joints"],
        ACTION_NAMES: settings["action_names"],
    }


def by_place(references: References) -> bool:
    """Return whether each relative number belongs to the state's number at the same place, as lerobot needs."""
    return all(place in (None, number) for number, place in enumerate(references))


def _describe_mask(references: References, names: Any) -> dict[str, list[str]]:
    """Return names of an action's numbers, and which of them lerobot excludes, for these relative numbers: the given
    names where the mask that lerobot makes of them is right, else names that say no more than that."""
    wanted = [place is not None for place in references]
    known = [f"{'relative' if relative else 'absolute'}_{number}" for number, relative in enumerate(wanted)]
    if isinstance(names, list | tuple) and len(names) == len(wanted):
        excluded = [name for name, relative in zip(names, wanted, strict=True) if not relative]
        known = list(names) if mask_by_names(names, excluded, len(wanted)) == wanted else known
    excluded = [name for name, relative in zip(known, wanted, strict=True) if not relative]
    return {"exclude_joints": excluded, "action_names": known}


def write_processors(
    raw: Mapping[str, Any], statistics: Statistics, prompt: Sequence[str], tokenizer: str, normalise_first: bool
) -> dict[str, bytes]:
    """Return lerobot's pre- and post-processing files with these statistics, by name.

    Args:
        raw: config.json.
        prompt: names of the steps that make the prompt of the instruction.
        tokenizer: its name on the hub.
        normalise_first: normalise before the prompt, which then holds the state; else last.
    """
    settings = {
        "eps": statistics.action.eps,
        "features": {**raw["input_features"], **raw["output_features"]},
        "norm_map": raw["normalization_mapping"],
    }
    tokens = {
        "max_length": raw["tokenizer_max_length"],
        "task_key": "task",
        "padding_side": "right",
        "padding": raw.get("pad_language_to", "max_length"),
        "truncation": True,
        "tokenizer_name": tokenizer,
    }
    device = {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}}
    start: list[dict[str, Any]] = [
        {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
        {"registry_name": "to_batch_processor", "config": {}},
    ]
    references = statistics.references or ()
    back = [{"registry_name": ABSOLUTE, "config": {"enabled": True}}] if references else []
    if references and by_place(references):
        mask = _describe_mask(references, raw.get(ACTION_NAMES))
        start.append({"registry_name": RELATIVE, "config": {"enabled": True, **mask}})
    elif references:
        indices = [-1 if place is None else place for place in references]
        start.append({"registry_name": OWN_RELATIVE, "config": {"state_index": indices}})
    text = [{"registry_name": name, "config": {}} for name in prompt]
    text.append({"registry_name": "tokenizer_processor", "config": tokens})
    at = len(start) if normalise_first else len(start) + len(text) + 1
    before, after = (f"policy_preprocessor_step_{at}_{NORMALIZER}", f"policy_postprocessor_step_0_un{NORMALIZER}")
    scaling = {"registry_name": NORMALIZER, "config": settings, "state_file": f"{before}.safetensors"}
    pre = [*start, scaling, *text, device] if normalise_first else [*start, *text, device, scaling]
    outwards = {**settings, "features": raw["output_features"]}
    unscaling = {"registry_name": f"un{NORMALIZER}", "config": outwards, "state_file": f"{after}.safetensors"}
    post = [unscaling, *back, device]
    tensors = _encode_statistics(statistics)
    return {
        PREPROCESSOR: encode_json({"name": "policy_preprocessor", "steps": pre}),
        POSTPROCESSOR: encode_json({"name": "policy_postprocessor", "steps": post}),
        f"{before}.safetensors": tensors,
        f"{after}.safetensors": tensors,
    }


def _encode_statistics(statistics: Statistics) -> bytes:
    from safetensors.torch import save
    from torch import tensor

    tensors = {}
    for feature, scale in ((ACTION, statistics.action), (STATE, statistics.state)):
        for name, values in zip(MODES[scale.mode], scale.values, strict=True) if scale is not None else ():
            tensors[f"{feature}.{name}"] = tensor(values)
        if scale is not None and scale.margin:
            tensors[f"{feature}.{MODES[scale.mode][1]}"] += scale.margin
    return save(tensors)


def _read_tensors(path: Path) -> dict[str, tuple[float, ...]]:
    from safetensors.numpy import load_file

    if not path.is_file():
        raise CheckpointError(f"{path.parent} has no statistics to scale with: {path.name} is missing")
    return {name: tuple(array.reshape(-1).tolist()) for name, array in read_file(path, load_file).items()}

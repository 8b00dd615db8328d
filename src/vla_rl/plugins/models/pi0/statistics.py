"""Locates a checkpoint and reads its config.json and the statistics that scale actions and state.

Light to import: specs are checked with it. Two public layouts are read:
lerobot: config.json with `type: pi0` or `pi05`, policy_preprocessor.json, the safetensors file its normaliser names.
openpi: config.json with `action_horizon`, `assets/<asset id>/norm_stats.json`.
Parameters have transformers' names inside and openpi's in files (lerobot's are openpi's with the prefix `model.`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from vla_rl.core.contexts import CheckContext
from vla_rl.core.errors import CheckpointError, did_you_mean
from vla_rl.core.spec.structure import at
from vla_rl.core.types import EnvInfo
from vla_rl.plugins.models.pi0.config import STATE_KINDS, Pi05Config, PiConfig
from vla_rl.toolkit.json_files import Record
from vla_rl.toolkit.models.checkpoints import lerobot, openpi_layout
from vla_rl.toolkit.models.checkpoints.files import (
    MAX_CHUNK,
    MAX_DIM,
    WEIGHTS,
    check_tokenizer,
    find_weights,
    folder_of,
    read_keys,
)
from vla_rl.toolkit.models.checkpoints.fitting import check_horizon, data_references, known_number
from vla_rl.toolkit.models.checkpoints.lerobot import LEROBOT, PREPROCESSOR, FeatureScale, Statistics
from vla_rl.toolkit.relative_actions import References

OPENPI_STATISTICS = "norm_stats.json"
OPENPI_EPS, OPENPI_WIDTH = 1e-6, 32
TRAINER = ("metadata.pt", "optimizer.pt")
"""Files that openpi's PyTorch trainer writes next to its weights."""
MODELS = ("pi0", "pi05")
STATE_KIND = "state_in_prompt.json"
"""Our file in addition to lerobot's files, which do not distinguish `exact` from `padded`."""
STATE_STEP, NEW_LINE_STEP = "pi05_prepare_state_tokenizer_processor_step", "pi0_new_line_processor"
"""Names of steps in lerobot's preprocessing."""


def read_config(folder: Path, model: str) -> Record:
    """config.json of either layout. Raises CheckpointError for another model than that one."""
    if not (folder / "config.json").is_file():
        _refuse_trainers(folder)
    record = read_keys(folder / "config.json")
    raw = record.data
    if raw.get("type") == model or is_openpi(raw):
        return record
    kind = raw.get("type", raw.get("model_type"))
    remedy = f"; set model.type: {kind}" if kind in MODELS else ""
    raise CheckpointError(
        f"{folder / 'config.json'} describes a model of type {kind!r}; {model} reads lerobot's layout "
        f"(`type: {model}`) and openpi's (`action_horizon`){remedy}"
    )


def is_openpi(raw: Mapping[str, Any]) -> bool:
    """Whether config.json has openpi's layout."""
    return "action_horizon" in raw and "type" not in raw


def _refuse_trainers(folder: Path) -> None:
    """Raise CheckpointError for a folder of one of openpi's two trainers; the message says how to convert it."""
    if (folder / "params").is_dir():
        raise CheckpointError(
            f"{folder} is a checkpoint of openpi's JAX trainer (params/), which is not read; convert it in a clone of "
            f"openpi, with the name of its training config:\n"
            f"  uv run examples/convert_jax_model_to_pytorch.py --checkpoint_dir {folder} --config_name NAME "
            f"--output_path {folder}-pytorch"
        )
    if (folder / WEIGHTS).is_file() and any((folder / name).is_file() for name in TRAINER):
        width = find_weights(folder, open_names).shapes.get("action_in_proj.weight", (0, OPENPI_WIDTH))[1]
        raise CheckpointError(
            f"{folder} is a checkpoint of openpi's PyTorch trainer, which writes no config.json; write it with the "
            f"action_horizon of its training config (50 unless that says otherwise; pi05_libero has 10):\n"
            f'  echo \'{{"action_dim": {width}, "action_horizon": 50}}\' > {folder / "config.json"}\n'
            f"and set model.type: {detect_model(find_weights(folder).shapes)}; optimizer.pt and metadata.pt are not "
            "needed"
        )


def check_stored_model(folder: Path, model: str, names: Collection[str]) -> None:
    """Raise CheckpointError for weights of the other one of the two models."""
    stored = detect_model(names)
    if stored != model:
        raise CheckpointError(
            f"the weights in {folder} are those of {stored}, not of {model}; set model.type: {stored}"
        )


def read_statistics(folder: Path, raw: Record, asset_id: str | None, model: str) -> Statistics:
    """Statistics of the folder, lerobot's before openpi's, which are z-scores for pi0 and quantiles for pi0.5. Raises
    CheckpointError when there are none: a checkpoint is never used with actions that are not scaled."""
    if (folder / PREPROCESSOR).is_file():
        if asset_id is not None:
            raise CheckpointError(
                f"asset_id chooses among openpi's statistics; {folder} has lerobot's, which are one set"
            )
        return lerobot.read_statistics(folder, raw.data)
    files = {path.parent.relative_to(folder): path for path in sorted(folder.rglob(OPENPI_STATISTICS))}
    file_of_asset = {path.as_posix().removeprefix("assets/"): file for path, file in files.items()}
    if not file_of_asset:
        lerobot.refuse_old_statistics(folder)
        raise CheckpointError(
            f"{folder} has no statistics to scale actions and state with: neither {PREPROCESSOR} (lerobot) nor "
            f"assets/<asset id>/{OPENPI_STATISTICS} (openpi)"
        )
    if asset_id is None and len(file_of_asset) > 1:
        raise CheckpointError(f"{folder} has several statistics; set asset_id to one of: {', '.join(file_of_asset)}")
    chosen = next(iter(file_of_asset)) if asset_id is None else asset_id
    if chosen not in file_of_asset:
        raise CheckpointError(
            f"no statistics {chosen!r} in {folder}; there are: {', '.join(file_of_asset)}"
            f"{did_you_mean(chosen, file_of_asset)}"
        )
    return _read_openpi(file_of_asset[chosen], raw, quantiles=model == "pi05")


def _read_openpi(path: Path, raw: Record, quantiles: bool) -> Statistics:
    """Return openpi's statistics. openpi adds 1e-6 in both directions: to the deviation (added here to the values) or
    to the range's width. Lists as long as the network is wide are padded; zeros at the end of shorter ones are numbers
    that never moved."""
    entries, width = read_keys(path).get_record("norm_stats", {}), action_width(raw)
    mode = "QUANTILES" if quantiles else "MEAN_STD"
    names = lerobot.MODES[mode]

    def read_scale(name: str) -> FeatureScale:
        entry = entries.get_record(name) if entries.has_value(name) else None
        if entry is None or not set(names) <= set(entry.data):
            available = ", ".join(entries.data) or "nothing"
            raise CheckpointError(f"{path} has no {names[0]} and {names[1]} of {name!r}; it has: {available}")
        first, second = (entry.get_numbers(key) for key in names)
        lerobot.check_scale(entry.source, mode, dict(zip(names, (first, second), strict=True)))
        dim = len(first)
        if dim >= width:
            dim = max((i + 1 for i, pair in enumerate(zip(first, second, strict=True)) if any(pair)), default=0)
        first, second = first[:dim], second[:dim]
        if quantiles:
            return FeatureScale(mode=mode, values=(first, second), dim=dim, eps=0.0, margin=OPENPI_EPS)
        return FeatureScale(mode=mode, values=(first, tuple(s + OPENPI_EPS for s in second)), dim=dim, eps=0.0)

    return Statistics(
        action=read_scale("actions"), state=read_scale("state"), references=openpi_layout.read_references(raw)
    )


def read_state_kind(folder: Path, raw: Record, requested: str | None) -> str:
    """How pi0.5's prompt tells the state: as the spec says, else the folder. Raises CheckpointError if neither does."""
    if requested is not None:
        return requested
    if (folder / STATE_KIND).is_file():
        recorded = read_keys(folder / STATE_KIND)
        if recorded.get_text("state_in_prompt") not in STATE_KINDS:
            raise recorded.build_error("state_in_prompt", f"one of {', '.join(STATE_KINDS)}")
        return recorded.get_text("state_in_prompt")
    if raw.data.get("type") != "pi05" or not (folder / PREPROCESSOR).is_file():
        raise CheckpointError(
            f"nothing in {folder} says whether its prompts hold the state; set model.state_in_prompt: exact "
            "(pi05_base, pi05_droid, ALOHA) or none (openpi's and RLinf's LIBERO, ManiSkill, MetaWorld and CALVIN "
            "checkpoints)"
        )
    steps = [step.data.get("registry_name") for step in lerobot.read_steps(folder)]
    return "exact" if STATE_STEP in steps or NEW_LINE_STEP not in steps else "none"


def relative_actions(config: PiConfig, env: EnvInfo) -> References:
    """Return what actions are relative to (`ModelPlugin.relative_actions`). Raise CheckpointError or MismatchError."""

    def read_folder(folder: Path) -> References | None:
        raw = read_config(folder, model_name(config))
        if is_openpi(raw.data):
            return openpi_layout.read_references(raw)
        return lerobot.read_references(folder, raw.data, env.action_dim)

    return data_references(config, env, read_folder)


def check_checkpoint(config: PiConfig, context: CheckContext) -> None:
    """Check that the folder is complete, of this model, and has chunks as long as the spec's."""
    if config.checkpoint is None:
        return
    model = model_name(config)
    with at("checkpoint"):
        folder = folder_of(config.checkpoint)
    if folder is None:
        check_tokenizer(None, config.tokenizer)
        return
    with at("checkpoint"):
        raw = read_config(folder, model)
        check_horizon(folder, read_chunk_horizon(raw), context.chunk)
        check_stored_model(folder, model, find_weights(folder).shapes)
    with at("checkpoint" if config.asset_id is None else "asset_id"):
        if context.scaling is None:
            read_statistics(folder, raw, config.asset_id, model)
        else:
            lerobot.check_actions(folder, raw.data)
    check_tokenizer(folder, config.tokenizer)
    if isinstance(config, Pi05Config):
        with at("state_in_prompt"):
            read_state_kind(folder, raw, config.state_in_prompt)


def model_name(config: PiConfig) -> str:
    return "pi05" if isinstance(config, Pi05Config) else "pi0"


def read_chunk_horizon(raw: Record) -> int:
    """H, actions in a denoised chunk, by config.json of either layout. Raises CheckpointError."""
    return raw.get_integer("action_horizon", 1, MAX_CHUNK) if is_openpi(raw.data) else lerobot.read_horizon(raw)


def action_width(raw: Record) -> int:
    """Numbers that openpi's network takes of actions and state. Raises CheckpointError."""
    return raw.get_integer("action_dim", 1, MAX_DIM, default=OPENPI_WIDTH)


def action_dim(config: PiConfig) -> int | None:
    """Return the number of action dimensions in the checkpoint's statistics, where it is known (`known_number`)."""
    model = model_name(config)

    def read_action_dim(folder: Path) -> int:
        return read_statistics(folder, read_config(folder, model), config.asset_id, model).action.dim

    return known_number(config.checkpoint, read_action_dim)


def default_chunk(config: PiConfig) -> int | None:
    """Return `n_action_steps` of the checkpoint's config.json, where known (`known_number`): in lerobot's layout."""
    return known_number(
        config.checkpoint, lambda folder: lerobot.read_executed(read_config(folder, model_name(config)))
    )


RENAMED = (
    ("model.dit.embed_tokens.", "paligemma_with_expert.gemma_expert.lm_head."),
    ("model.dit.", "paligemma_with_expert.gemma_expert.model."),
    ("model.vlm.language_model.embed_tokens.", "paligemma_with_expert.paligemma.lm_head."),
    ("model.vlm.vision_tower.", "paligemma_with_expert.paligemma.model.vision_tower.vision_model."),
    ("model.vlm.", "paligemma_with_expert.paligemma.model."),
    ("embed_action_time.", ""),
)
"""Prefixes here -> prefixes in openpi's files; the first match applies."""
TIED = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
HEAD = "paligemma_with_expert.paligemma.lm_head.weight"


ADAPTIVE = ".dense."
"""Part of the names of pi0.5's norms. It identifies pi0.5: an old pi0 has time_mlp_* as pi0.5 does, but plain norms."""


def public_name(name: str) -> str:
    """Return openpi's name of a parameter with this name in transformers."""
    for inside, public in RENAMED:
        if name.startswith(inside):
            return public + name.removeprefix(inside)
    return name


def open_names(names: Collection[str]) -> dict[str, str]:
    """Return the names of a checkpoint's tensors -> openpi's names, whichever layout it has. The embedding may be
    stored as itself, as the tied head or as both (one is left out); `time_mlp_*` is an old name in pi0, and the name in
    pi0.5."""
    prefix = LEROBOT if all(name.startswith(LEROBOT) for name in names) else ""
    opened = {name: name.removeprefix(prefix) for name in names}
    if not any(ADAPTIVE in name for name in names):
        opened = {
            name: f"action_{public}" if public.startswith("time_mlp_") else public for name, public in opened.items()
        }
    has_head = HEAD in opened.values()
    return {
        name: HEAD if public == TIED else public for name, public in opened.items() if public != TIED or not has_head
    }


def detect_model(names: Collection[str]) -> str:
    """Return the model, "pi0" or "pi05", that has tensors of these names."""
    return "pi05" if any(ADAPTIVE in name for name in names) else "pi0"

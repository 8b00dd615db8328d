"""Checks that a checkpoint's folder and the spec agree, as far as files tell. Light to import: specs are checked with
it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vla_rl.core.errors import CheckpointError
from vla_rl.core.spec.structure import at
from vla_rl.core.types import Context
from vla_rl.plugins.models.openvla.config import FamilyConfig, OpenVLAARConfig, OpenVLAOFTConfig
from vla_rl.plugins.models.openvla.locate import ADAPTER_CONFIG, BUILTIN, SENTENCEPIECE
from vla_rl.plugins.models.openvla.statistics import STATISTICS, choose_range, choose_statistics
from vla_rl.toolkit.models.checkpoints import INDEX, WEIGHTS, find_weights, folder_of, read_json
from vla_rl.toolkit.models.fitting import MismatchError

MODEL_TYPE = "openvla"
PLUGINS = {"autoregressive": "openvla", "parallel": "openvla_oft"}
PART = "{}--{}_checkpoint.pt"
"""File name of a part that OpenVLA-OFT saves beside the network: name, and step of its training."""
LORA_FOLDER = "lora_adapter"
READ = ("action_head", "proprio_projector")
"""Supported parts."""
TOKENIZER = "tokenizer.json"
logger = logging.getLogger(__name__)


def check(config: FamilyConfig, context: Context) -> None:
    """Check, for `Plugin.check`, that the folder is complete, of this model, and was trained for the spec's chunks."""
    if config.checkpoint is None:
        return
    with at("checkpoint"):
        folder = folder_of(config.checkpoint, BUILTIN)
        if folder is None:
            return
        raw = read_config(folder)
        find_tokenizer(folder)
        known = read_json(folder / STATISTICS) if (folder / STATISTICS).is_file() else raw.get("norm_stats") or {}
        check_decoding(folder, raw.get("policy_setup") or {}, config, context.chunk)
        check_head(folder, find_part(folder, "action_head"), config)
        check_parts(folder, config)
        _check_weights(folder)
    if context.scaling is None:
        with at("checkpoint" if config.unnorm_key is None else "unnorm_key"):
            key, entry = choose_statistics(folder, known, config.unnorm_key)
        with at("statistics_range"):
            choose_range(folder, key, entry, raw.get("policy_setup") or {}, config)


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json. Raise CheckpointError where it cannot be read, or is of another model."""
    _refuse_adapter_alone(folder)
    raw = read_json(folder / "config.json")
    if raw.get("model_type") != MODEL_TYPE:
        raise CheckpointError(
            f"{folder} holds a model of type {raw.get('model_type')!r}, not {MODEL_TYPE!r}; "
            "choose the model plugin that matches it"
        )
    return raw


def _refuse_adapter_alone(folder: Path) -> None:
    """Raise CheckpointError for what OpenVLA-OFT's training writes where it does not merge: `lora_adapter/` beside the
    parts, or that folder itself."""
    inner = folder if folder.name == LORA_FOLDER else folder / LORA_FOLDER
    merged = any((folder / name).is_file() for name in (WEIGHTS, INDEX))
    beside = all((folder / name).is_file() for name in (ADAPTER_CONFIG, "config.json"))
    if merged or beside or not (inner / ADAPTER_CONFIG).is_file():
        return
    base = read_json(inner / ADAPTER_CONFIG).get("base_model_name_or_path") or "openvla/openvla-7b"
    raise CheckpointError(
        f"{folder} holds an adapter of {base!r} alone, which OpenVLA-OFT's training did not merge. Merge it in a clone "
        f"of openvla-oft:\n"
        f"  python vla-scripts/merge_lora_weights_and_save.py --base_checkpoint {base} "
        f"--lora_finetuned_checkpoint_dir {inner.parent}\n"
        f"then set model.checkpoint: {inner.parent}"
    )


def find_tokenizer(folder: Path) -> Path:
    """Return the path of tokenizer.json. Raise CheckpointError if there is none."""
    file = folder / TOKENIZER
    if (folder / SENTENCEPIECE).is_file() and not file.is_file():
        raise CheckpointError(
            f"{folder} has its tokenizer as {SENTENCEPIECE} alone, which is not read; write {TOKENIZER} beside it:\n"
            "  pip install sentencepiece protobuf\n"
            f"  python -c \"from transformers import LlamaTokenizer as T; f = '{folder}'; "
            'T.from_pretrained(f).save_pretrained(f)"'
        )
    if not file.is_file():
        raise CheckpointError(f"{folder} is not a complete checkpoint: it has no {TOKENIZER}")
    return file


UNSUPPORTED = {
    "vision_backbone": "vision transformers with FiLM layers (OpenVLA-OFT's use_film)",
    "noisy_action_projector": "the input of OpenVLA-OFT's diffusion head (use_diffusion)",
}
"""Unsupported parts beside the network -> what they are."""


def check_parts(folder: Path, config: FamilyConfig) -> None:
    """Raise CheckpointError for a part that is not read: without it the network is not the one that was trained."""
    for file in sorted(folder.glob(PART.format("*", "*"))):
        name = file.name.partition("--")[0]
        if name in UNSUPPORTED:
            raise CheckpointError(
                f"{file} holds {UNSUPPORTED[name]}, which is not supported, and without it the network is not the one "
                "that was trained; use a checkpoint that was trained without"
            )
        if name not in READ:
            raise CheckpointError(
                f"{file} holds a part that is not known here, and without it the network is not the one that was "
                f"trained; known are: {', '.join(READ)}. Move it out of the folder if it was not used in training"
            )
        if name == "proprio_projector" and not isinstance(config, OpenVLAOFTConfig):
            raise CheckpointError(
                f"{file} holds the projector of a state, which plain OpenVLA does not have: the checkpoint is "
                "OpenVLA-OFT's; set model.type: openvla_oft"
            )
        if name == "proprio_projector" and isinstance(config, OpenVLAOFTConfig) and config.use_proprio is False:
            logger.warning("%s is not read (model.use_proprio: false): the network was trained to see a state", file)


def find_part(folder: Path, name: str) -> Path | None:
    """Return the file of a part beside the network, if there is one. Raise CheckpointError where there are several."""
    files = sorted(folder.glob(PART.format(name, "*")))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise CheckpointError(f"{folder} holds {len(files)} files of the {name}; keep one of: {names}")
    return files[0] if files else None


def decoding(config: FamilyConfig) -> str:
    """Return how action tokens are decoded: "autoregressive" or "parallel"."""
    return "autoregressive" if isinstance(config, OpenVLAARConfig) else "parallel"


def l1(config: FamilyConfig) -> bool:
    return isinstance(config, OpenVLAOFTConfig) and config.head == "l1"


def check_decoding(folder: Path, setup: Mapping[str, Any], config: FamilyConfig, asked: int) -> None:
    """Check that decoding and chunk are those of the training. Raise MismatchError otherwise. A public folder does not
    record them: plain OpenVLA predicts one action, and the chunk of an OFT checkpoint is taken from the spec.

    Args:
        setup: settings of the policy's training, as far as the folder records them.
        asked: actions per chunk in the spec.
    """
    own = decoding(config)
    trained = setup.get("decoding", "parallel" if "chunk" in setup else own)
    if trained != own:
        raise MismatchError(
            f"{folder} was trained with {trained} decoding, {PLUGINS[own]} has {own} decoding; "
            f"set model.type to {PLUGINS.get(trained, trained)}"
        )
    chunk = setup.get("chunk", 1 if own == "autoregressive" else asked)
    if chunk != asked:
        why = "" if "chunk" in setup else " (OpenVLA answers with one action and was never trained to go on)"
        raise MismatchError(
            f"{folder} was trained for chunks of {chunk} action{'s' if chunk > 1 else ''}{why}, "
            f"the spec asks for {asked}; set rollout.chunk to {chunk}"
        )


def check_head(folder: Path, file: Path | None, config: FamilyConfig) -> None:
    """Check that the L1 head's file exists if, and only if, the spec asks for the L1 head. Raise MismatchError
    otherwise."""
    if l1(config) and file is None:
        raise MismatchError(
            f"{folder} has no action_head--*_checkpoint.pt, which `head: l1` needs; "
            "put the file there, or use `head: discrete`"
        )
    if file is not None and not l1(config):
        raise MismatchError(
            f"{folder} was trained with the L1 head ({file.name}); its action tokens mean nothing. "
            "Set model.type: openvla_oft and model.head: l1 to evaluate it; with model.deviation: {} too, RL trains it"
        )


def _check_weights(folder: Path) -> None:
    """Check the headers of the weight files. Those of an adapter's base are read when the model is built."""
    adapter = not any((folder / name).is_file() for name in (WEIGHTS, INDEX)) and (folder / ADAPTER_CONFIG).is_file()
    if not adapter:
        find_weights(folder)

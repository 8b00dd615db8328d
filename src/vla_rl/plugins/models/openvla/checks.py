"""Checks that a checkpoint's folder and the spec agree, as far as files tell. Light to import, for reading specs."""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vla_rl.core.contexts import CheckContext
from vla_rl.core.errors import CheckpointError
from vla_rl.core.installation import pip_command
from vla_rl.core.spec.structure import at
from vla_rl.plugins.models.openvla.adapter_config import read_adapter_config
from vla_rl.plugins.models.openvla.config import RANGES, FamilyConfig, OpenVLAARConfig, OpenVLAOFTConfig
from vla_rl.plugins.models.openvla.locate import ADAPTER_CONFIG, BUILTIN, SENTENCEPIECE, read_known
from vla_rl.plugins.models.openvla.statistics import check_suites, choose_range, choose_statistics
from vla_rl.toolkit.json_files import LARGEST, Record
from vla_rl.toolkit.models.checkpoints.files import (
    INDEX,
    MAX_CHUNK,
    MAX_LAYERS,
    MAX_PIXELS,
    MAX_SIZE,
    MAX_TOKENS,
    WEIGHTS,
    find_weights,
    folder_of,
    read_keys,
)
from vla_rl.toolkit.models.checkpoints.fitting import MismatchError

MODEL_TYPE = "openvla"
PLUGINS = {"autoregressive": "openvla", "parallel": "openvla_oft"}
PART = "{}--{}_checkpoint.pt"
"""File name of a part that OpenVLA-OFT saves separately from the network: name, and step of its training."""
LORA_FOLDER = "lora_adapter"
READ = ("action_head", "proprio_projector")
"""Supported parts."""
TOKENIZER = "tokenizer.json"
logger = logging.getLogger(__name__)


def check_checkpoint(config: FamilyConfig, context: CheckContext) -> None:
    """Check that the folder is complete, of this model, and was trained for the spec's chunks."""
    if config.checkpoint is None:
        return
    with at("checkpoint"):
        folder = folder_of(config.checkpoint, BUILTIN)
        if folder is None:
            return
        raw = read_config(folder)
        find_tokenizer(folder)
        known = read_known(folder, raw)
        setup = read_setup(raw)
        check_decoding(folder, setup, config, context.chunk)
        check_head(folder, find_part(folder, "action_head"), config)
        check_parts(folder, config)
        _check_weights(folder)
    if context.scaling is None:
        with at("checkpoint" if config.unnorm_key is None else "unnorm_key"):
            key, entry = choose_statistics(folder, known, config.unnorm_key)
            check_suites(folder, known, key, context.suites)
        with at("statistics_range"):
            choose_range(folder, key, entry, setup, config)


def read_config(folder: Path) -> Record:
    """config.json. Raises CheckpointError where it cannot be read, is of another model, or describes no network."""
    _refuse_adapter_alone(folder)
    raw = read_keys(folder / "config.json")
    kind = raw.data.get("model_type")
    if kind != MODEL_TYPE:
        raise CheckpointError(
            f"{folder} holds a model of type {kind!r}, not {MODEL_TYPE!r}; choose the model plugin that matches it"
        )
    _check_network(raw)
    return raw


TEXT_SIZES = {
    "hidden_size": MAX_SIZE,
    "intermediate_size": MAX_SIZE,
    "num_hidden_layers": MAX_LAYERS,
    "num_attention_heads": MAX_SIZE,
    "num_key_value_heads": MAX_SIZE,
    "head_dim": MAX_SIZE,
    "vocab_size": MAX_SIZE,
    "max_position_embeddings": LARGEST,
}
"""Keys of `text_config`, which is Llama's, and their largest values."""
TEXT_NUMBERS = {"rms_norm_eps": 1.0, "attention_dropout": 1.0, "initializer_range": 1e6}
TEXT_FLAGS = ("attention_bias", "mlp_bias", "output_hidden_states", "output_attentions")
STRATEGIES = ("resize-naive", "letterbox", "resize-crop")
"""How images become squares, by `image_resize_strategy`."""
BINS, PADDING, PAD, VOCABULARY = 256, 64, 32000, 32000
"""What `OpenVLAConfig` has for keys that are left out."""


def _check_network(raw: Record) -> None:
    """Raises CheckpointError for a key of another type than the network needs, or that no network has."""
    text = raw.get_section("text_config")
    _check_llama(text)
    bins = raw.get_integer("n_action_bins", 2, MAX_TOKENS, default=BINS)
    padding = raw.get_integer("pad_to_multiple_of", 0, MAX_TOKENS, default=PADDING)
    vocabulary = text.get_integer("vocab_size", 1, default=VOCABULARY)
    if bins + padding > vocabulary:
        raise raw.error(
            f"{raw.source}: {bins} action tokens ('n_action_bins') and {padding} of padding ('pad_to_multiple_of') are "
            f"more than the vocabulary's {vocabulary} ('vocab_size')"
        )
    raw.get_integer("pad_token_id", 0, vocabulary - 1, default=PAD)
    if text.has_value("pad_token_id"):
        text.get_integer("pad_token_id", 0, vocabulary - 1)
    if raw.has_value("image_sizes") and len(raw.get_sizes("image_sizes", 1, MAX_PIXELS)) != 2:
        raise raw.build_error("image_sizes", "a list of two whole numbers")
    if raw.get_text("image_resize_strategy", STRATEGIES[0]) not in STRATEGIES:
        raise raw.build_error("image_resize_strategy", f"one of {', '.join(STRATEGIES)}")
    if raw.has_value("timm_model_ids"):
        raw.get_texts("timm_model_ids")
    read_setup(raw)


def _check_llama(text: Record) -> None:
    for key, high in TEXT_SIZES.items():
        if text.has_value(key):
            text.get_integer(key, 1, high)
    for key, most in TEXT_NUMBERS.items():
        text.get_number(key, 0, high=most, default=0.0)
    for key in TEXT_FLAGS:
        if text.has_value(key):
            text.get_boolean(key)
    for rope in (text, text.get_section("rope_parameters"), text.get_section("rope_scaling")):
        rope.get_number("rope_theta", 1, high=1e12, default=1e4)
        kinds = [key for key in ("rope_type", "type") if key in rope.data and rope is not text]
        if any(rope.get_text(key) != "default" for key in kinds):
            raise rope.build_error(kinds[0], "'default', the positions of Llama 2,")
    text.get_text("hidden_act", "silu")
    heads = text.get_integer("num_attention_heads", 1, default=32)
    groups = text.get_integer("num_key_value_heads", 1) if text.has_value("num_key_value_heads") else heads
    if heads % groups:
        raise text.build_error("num_key_value_heads", f"a divisor of the {heads} of 'num_attention_heads'")
    if text.has_value("head_dim") and text.get_integer("head_dim") % 2:
        raise text.build_error("head_dim", "an even number")


def read_setup(raw: Record) -> Mapping[str, Any]:
    """How the policy was trained, as far as config.json says so. Raises CheckpointError."""
    setup = raw.get_section("policy_setup")
    if setup.get_text("decoding", "parallel") not in PLUGINS:
        raise setup.build_error("decoding", f"one of {', '.join(PLUGINS)}")
    if setup.get_text("statistics_range", "q01_q99") not in RANGES:
        raise setup.build_error("statistics_range", f"one of {', '.join(RANGES)}")
    setup.get_texts("cameras", ())
    setup.get_integer("chunk", 1, MAX_CHUNK, default=1)
    setup.get_boolean("append_stop_token", True)
    return setup.data


def _refuse_adapter_alone(folder: Path) -> None:
    """Raise CheckpointError for what OpenVLA-OFT's training writes where it does not merge: `lora_adapter/` next to the
    parts, or that folder itself."""
    inner = folder if folder.name == LORA_FOLDER else folder / LORA_FOLDER
    merged = any((folder / name).is_file() for name in (WEIGHTS, INDEX))
    has_both = all((folder / name).is_file() for name in (ADAPTER_CONFIG, "config.json"))
    if merged or has_both or not (inner / ADAPTER_CONFIG).is_file():
        return
    adapter = read_keys(inner / ADAPTER_CONFIG)
    named = adapter.get_text("base_model_name_or_path") if adapter.has_value("base_model_name_or_path") else ""
    base = named or "openvla/openvla-7b"
    raise CheckpointError(
        f"{folder} holds an adapter of {base!r} alone, which OpenVLA-OFT's training did not merge. Merge it in a clone "
        f"of openvla-oft:\n"
        f"  python vla-scripts/merge_lora_weights_and_save.py --base_checkpoint {base} "
        f"--lora_finetuned_checkpoint_dir {inner.parent}\n"
        f"then set model.checkpoint: {inner.parent}"
    )


def find_tokenizer(folder: Path) -> Path:
    """Return the path of tokenizer.json. Raise CheckpointError if it is missing."""
    file = folder / TOKENIZER
    if (folder / SENTENCEPIECE).is_file() and not file.is_file():
        raise CheckpointError(
            f"{folder} has its tokenizer as {SENTENCEPIECE} alone, which is not read; write {TOKENIZER} next to it:\n"
            f"  {pip_command('install')} sentencepiece protobuf\n"
            f"  {shlex.quote(sys.executable)} -c \"from transformers import LlamaTokenizer as T; f = '{folder}'; "
            'T.from_pretrained(f).save_pretrained(f)"'
        )
    if not file.is_file():
        raise CheckpointError(f"{folder} is not a complete checkpoint: it has no {TOKENIZER}")
    return file


UNSUPPORTED = {
    "vision_backbone": "vision transformers with FiLM layers (OpenVLA-OFT's use_film)",
    "noisy_action_projector": "the input of OpenVLA-OFT's diffusion head (use_diffusion)",
}
"""Unsupported parts that are stored separately from the network -> what they are."""


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
    """Return the file of a part that is stored separately, or None. Raise CheckpointError for several such files."""
    files = sorted(folder.glob(PART.format(name, "*")))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise CheckpointError(f"{folder} holds {len(files)} files of the {name}; keep one of: {names}")
    return files[0] if files else None


def find_decoding(config: FamilyConfig) -> str:
    """Return how action tokens are decoded: "autoregressive" or "parallel"."""
    return "autoregressive" if isinstance(config, OpenVLAARConfig) else "parallel"


def uses_l1_head(config: FamilyConfig) -> bool:
    return isinstance(config, OpenVLAOFTConfig) and config.head == "l1"


def check_decoding(folder: Path, setup: Mapping[str, Any], config: FamilyConfig, spec_chunk: int) -> None:
    """Check that decoding and chunk are those of the training. Raise MismatchError otherwise. A public folder does not
    record them: plain OpenVLA predicts one action, and the chunk of an OFT checkpoint is taken from the spec.

    Args:
        setup: settings of the policy's training, as far as the folder records them.
        spec_chunk: actions per chunk in the spec.
    """
    expected = find_decoding(config)
    trained = setup.get("decoding", "parallel" if "chunk" in setup else expected)
    if trained != expected:
        raise MismatchError(
            f"{folder} was trained with {trained} decoding, {PLUGINS[expected]} has {expected} decoding; "
            f"set model.type to {PLUGINS.get(trained, trained)}"
        )
    chunk = setup.get("chunk", 1 if expected == "autoregressive" else spec_chunk)
    if chunk != spec_chunk:
        why = "" if "chunk" in setup else " (OpenVLA answers with one action and was never trained to continue)"
        raise MismatchError(
            f"{folder} was trained for chunks of {chunk} action{'s' if chunk > 1 else ''}{why}, "
            f"the spec asks for {spec_chunk}; set rollout.chunk to {chunk}"
        )


def check_head(folder: Path, file: Path | None, config: FamilyConfig) -> None:
    """Check that the L1 head's file exists if, and only if, the spec asks for it. Raise MismatchError otherwise."""
    if uses_l1_head(config) and file is None:
        raise MismatchError(
            f"{folder} has no action_head--*_checkpoint.pt, which `head: l1` needs; "
            "put the file there, or use `head: discrete`"
        )
    if file is not None and not uses_l1_head(config):
        raise MismatchError(
            f"{folder} was trained with the L1 head ({file.name}); its action tokens mean nothing. "
            "Set model.type: openvla_oft and model.head: l1 to evaluate it; with model.deviation: {} too, RL trains it"
        )


def _check_weights(folder: Path) -> None:
    """Check the headers of the weight files, or an adapter's settings. Its base is read when the model is built."""
    if not any((folder / name).is_file() for name in (WEIGHTS, INDEX)) and (folder / ADAPTER_CONFIG).is_file():
        read_adapter_config(folder)
    else:
        find_weights(folder)

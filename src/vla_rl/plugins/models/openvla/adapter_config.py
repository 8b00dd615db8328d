"""`adapter_config.json` of a LoRA adapter, as peft writes it. Light to import: specs are checked with it."""

from __future__ import annotations

import math
from pathlib import Path

from attrs import frozen

from vla_rl.core.errors import CheckpointError
from vla_rl.plugins.models.openvla.locate import ADAPTER_CONFIG
from vla_rl.toolkit.models.checkpoints.files import MAX_SIZE, read_keys

READ = frozenset({"peft_type", "base_model_name_or_path", "r", "lora_alpha", "use_rslora", "init_lora_weights", "bias"})
"""Keys whose values count here."""
WITHOUT_EFFECT = frozenset(
    {
        *("task_type", "auto_mapping", "peft_version", "revision", "inference_mode", "runtime_config"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),  # the tensors' names say it
        *("lora_dropout", "megatron_core", "qalora_group_size"),
        *("eva_config", "corda_config", "loftq_config", "lora_ga_config"),  # init_lora_weights says which one counts
    }
)
"""Keys that may have any value: W + scale B A is the adapted weight with each."""
KEEP_THE_BASE = ("true", "false", "gaussian", "orthogonal", "eva", "mica")
"""Values of init_lora_weights for which peft leaves the base's weights as they are. With others (pissa, olora, corda,
loftq, lora_ga) it changes them when it inserts the adapter, and stores the adapter alone."""


@frozen(kw_only=True)
class AdapterSettings:
    """Settings of a plain LoRA adapter: the base that it changes, and how much."""

    base: str
    """Name of the base, as in a spec."""
    rank: int
    alpha: float
    """The update is alpha / rank B A. For a rank-stabilised scale (use_rslora), the alpha that gives its scale."""


def read_adapter_config(folder: Path) -> AdapterSettings:
    """Read the settings of a folder's adapter. Raise CheckpointError for another kind of adapter than plain LoRA, for
    keys that change what it computes, and for a base that is not named."""
    file = folder / ADAPTER_CONFIG
    record = read_keys(file)
    kind = record.get_text("peft_type")
    started = record.data.get("init_lora_weights", True)
    rank, alpha = record.get_integer("r", 1, MAX_SIZE), record.get_number("lora_alpha", high=MAX_SIZE)
    used = [key for key, value in record.data.items() if key not in READ | WITHOUT_EFFECT and value]
    if record.data.get("bias", "none") != "none":
        used.append("bias")
    if kind != "LORA" or used:
        raise CheckpointError(
            f"{file}: only plain LoRA adapters are read, this is {kind}"
            f"{' with ' if used else ''}{', '.join(sorted(used))}; merge it into its base with peft's "
            "merge_and_unload(), and give the merged folder"
        )
    if str(started).lower() not in KEEP_THE_BASE:
        raise CheckpointError(
            f"{file}: init_lora_weights is {started!r}, so peft changes the base's weights and stores the "
            f"adapter alone; it is known on the unchanged base with: {', '.join(KEEP_THE_BASE)}. Merge it where it was "
            "trained with peft's merge_and_unload() and give the merged folder, or convert it there to plain LoRA with "
            "save_pretrained(FOLDER, path_initial_model_for_weight_conversion=INITIAL)"
        )
    if not record.has_value("base_model_name_or_path"):
        raise CheckpointError(f"{file} names no base; set base_model_name_or_path to the checkpoint it belongs to")
    stabilised = record.get_boolean("use_rslora", False)
    return AdapterSettings(
        base=record.get_text("base_model_name_or_path"),
        rank=rank,
        alpha=alpha * math.sqrt(rank) if stabilised else alpha,
    )

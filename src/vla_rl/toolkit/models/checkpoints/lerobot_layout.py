"""A saved folder for lerobot's users. pi0, pi0.5 and SmolVLA are saved in lerobot's layout already, so the weights and
the processing are copied; config.json gets what lerobot needs to act alike. Cheap to import."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vla_rl.core.errors import UserError
from vla_rl.toolkit.models.checkpoints.files import read_json
from vla_rl.toolkit.models.checkpoints.lerobot import EXECUTED, RELATIVE, Statistics, by_place, read_statistics
from vla_rl.toolkit.models.checkpoints.openpi_layout import has_padded_state

DENOISE_STEPS = {"pi0": "num_inference_steps", "pi05": "num_inference_steps", "smolvla": "num_steps"}
"""Types of models that are saved in lerobot's layout, and lerobot's key for `model.denoise_steps`."""
ELSEWHERE = ("use_peft", "load_vlm_weights")
"""Keys that let lerobot take weights from elsewhere; the folder has all of them, with adapters merged."""
UNKNOWN = {
    "architecture.json": "its network has other sizes than the public ones, and lerobot's config.json names no others",
    "steering_head.safetensors": "a steering head chooses its initial noise (model.steering), and lerobot has none",
    "instruction.json": "it appends a text to every instruction, and lerobot does not; take --format own, and append "
    "the text that its README.md gives in your own code",
}
"""Files that change how a policy acts and that lerobot does not read, with the reasons."""


def build_config(folder: Path, settings: Mapping[str, Any]) -> str:
    """Return the text of config.json with which lerobot acts as the policy in a saved folder does. Raise UserError for
    a policy that lerobot cannot express, and CheckpointError for files that are missing or unreadable.

    Args:
        settings: `model:` of the spec that the policy was trained with.
    """
    raw = read_json(folder / "config.json")
    kind = raw.get("type", raw.get("model_type"))
    if kind not in DENOISE_STEPS:
        known = ", ".join(DENOISE_STEPS)
        raise UserError(f"--format lerobot is for {known}; {folder} holds a model of type {kind!r}, take --format own")
    statistics = read_statistics(folder, raw)
    obstacle = next(_reasons_against_lerobot(folder, kind, statistics, settings), None)
    if obstacle is not None:
        raise UserError(f"lerobot cannot act as the policy in {folder} does: {obstacle}")
    raw |= {key: False for key in ELSEWHERE if key in raw}
    if "denoise_steps" in settings:
        raw[DENOISE_STEPS[kind]] = settings["denoise_steps"]
    if statistics.references:  # lerobot-eval adds the state of each step, not of the step that a chunk begins with
        raw[EXECUTED] = 1
    return json.dumps(raw, indent=2) + "\n"


def _reasons_against_lerobot(
    folder: Path, kind: str, statistics: Statistics, settings: Mapping[str, Any]
) -> Iterator[str]:
    """Yield why lerobot would not act as the policy in the folder does. `settings`: the spec's `model:`."""
    for name, reason in UNKNOWN.items():
        if (folder / name).is_file():
            yield reason
    state, references = statistics.state, statistics.references or ()
    if kind == "pi05" and has_padded_state(folder):
        yield (
            "its prompts hold a state padded with zeros (model.state_in_prompt: padded), as in lerobot 0.4 and not "
            "later; train it with state_in_prompt: exact"
        )
    if kind != "pi05" and (state is None or settings.get("use_state") is False):
        yield "it sees no state (model.use_state), and lerobot always feeds one"
    if not by_place(references):
        yield f"numbers of its actions are relative to the state's at other places, which {RELATIVE!r} cannot say"
    if references and (state is None or state.dim < len(references)):
        yield (
            f"its actions have {len(references)} numbers and are relative to a state of fewer, which {RELATIVE!r} "
            f"cannot subtract"
        )

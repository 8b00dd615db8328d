"""Conversion of parameter names: transformers' inside, openpi's in files (lerobot's are openpi's with the prefix
`model.`). Light to import."""

from __future__ import annotations

from collections.abc import Collection

from vla_rl.toolkit.models.checkpoints.lerobot import LEROBOT

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
    """Return the names of a checkpoint's tensors -> openpi's names, whichever layout it has.

    The embedding may be stored as itself, as the tied head or as both (one is left out); `time_mlp_*` is an old name in
    pi0, and the name in pi0.5.
    """
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

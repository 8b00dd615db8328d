"""Parameter names: transformers' inside, openpi's in files (lerobot's are openpi's behind `model.`)."""

from __future__ import annotations

from torch import Tensor

LEROBOT = "model."
RENAMED = (
    ("model.dit.embed_tokens.", "paligemma_with_expert.gemma_expert.lm_head."),
    ("model.dit.", "paligemma_with_expert.gemma_expert.model."),
    ("model.vlm.language_model.embed_tokens.", "paligemma_with_expert.paligemma.lm_head."),
    ("model.vlm.vision_tower.", "paligemma_with_expert.paligemma.model.vision_tower.vision_model."),
    ("model.vlm.", "paligemma_with_expert.paligemma.model."),
    ("embed_action_time.", ""),
)
"""Prefixes here -> prefixes in openpi's files; the first that fits holds."""
TIED = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
HEAD = "paligemma_with_expert.paligemma.lm_head.weight"


def public_name(name: str) -> str:
    """transformers' name of a parameter -> openpi's."""
    for inside, public in RENAMED:
        if name.startswith(inside):
            return public + name.removeprefix(inside)
    return name


def open_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A file's tensors under openpi's names, whichever layout it has.

    The embedding may be stored as itself, as the tied head or as both; `time_mlp_*` is an old name.
    """
    if all(name.startswith(LEROBOT) for name in state):
        state = {name.removeprefix(LEROBOT): tensor for name, tensor in state.items()}
    state = {f"action_{name}" if name.startswith("time_mlp_") else name: tensor for name, tensor in state.items()}
    if TIED in state:
        embedding = state.pop(TIED)
        state.setdefault(HEAD, embedding)
    return state

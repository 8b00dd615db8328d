"""Policies of pi0 and pi0.5, built from a spec's config and a worker's context; what does not fit is refused. Prompts
are padded on the right. pi0: BOS, instruction, newline; cached. pi0.5: the same, or instruction and state as text,
which change at every step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import evolve
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import PI0ForConditionalGeneration
from transformers.models.gemma.modeling_gemma import GemmaDecoderLayer
from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer

from vla_rl.core.contexts import ModelContext
from vla_rl.core.errors import CheckpointError
from vla_rl.core.types import Array, Observation, to_numpy
from vla_rl.plugins.models.pi0.adaptive import AdaptiveLayer, Pi05Module, empty_adaptive, initialise_adaptive
from vla_rl.plugins.models.pi0.architecture import PROMPTS, PiSizes, name_variants, network_config, read_shape
from vla_rl.plugins.models.pi0.config import Pi0Config, Pi05Config
from vla_rl.plugins.models.pi0.network import LastLayer, Pi0Module, empty_network, stays_float32
from vla_rl.plugins.models.pi0.statistics import (
    NEW_LINE_STEP,
    STATE_KIND,
    STATE_STEP,
    check_stored_model,
    open_names,
    public_name,
    read_config,
    read_state_kind,
    read_statistics,
)
from vla_rl.toolkit.models.checkpoints.files import read_sizes
from vla_rl.toolkit.models.checkpoints.fitting import MismatchError
from vla_rl.toolkit.models.checkpoints.lerobot import PREPROCESSOR, check_actions
from vla_rl.toolkit.models.flow.build import TINY, FlowBuilder, TrainedParts
from vla_rl.toolkit.models.flow.checkpoint import ARCHITECTURE, FlowCheckpoint, open_folder
from vla_rl.toolkit.models.flow.fit import FlowIOAdapter
from vla_rl.toolkit.models.flow.network import Heads, initialise_flow
from vla_rl.toolkit.models.flow.policy import FlowPolicy
from vla_rl.toolkit.models.prompts import BOS, PaddedPrompts, pad_tokens


def prompt_text(instruction: str) -> str:
    """Return openpi's prompt."""
    return instruction.strip().replace("_", " ").replace("\n", " ") + "\n"


BINS, ROUND = 256, 16


EDGES = np.arange(BINS, dtype=np.float32) / (BINS / 2) - 1


def find_state_bins(state: Array) -> Array:
    """Return the bins of normalised numbers, int64 0..255 for 256 equal parts of [-1, 1]; -1 below it and 255 above."""
    bins: Array = np.searchsorted(EDGES, state, side="right") - 1
    return bins


def state_text(instruction: str, bins: Sequence[int]) -> str:
    """Return openpi's prompt of pi0.5 that contains the state."""
    return f"Task: {prompt_text(instruction)[:-1]}, State: {' '.join(map(str, bins))};\nAction: "


class PiPrompts(PaddedPrompts):
    """Prompts of pi0 and pi0.5."""

    def __init__(self, tokenizer: Tokenizer, **rest: Any) -> None:
        self._bos = find_bos(tokenizer)
        super().__init__(tokenizer, **rest)

    def prompt_ids(self, instruction: str) -> list[int]:
        return [self._bos, *self.tokenizer.encode(prompt_text(instruction), add_special_tokens=False).ids]

    def state_rows(self, instructions: Sequence[str], bins: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Return ids and mask of prompts with the state's bins, like `rows`, padded to the next multiple of 16."""
        tokens = []
        for instruction, row in zip(instructions, bins, strict=True):
            ids = self.tokenizer.encode(state_text(instruction, row), add_special_tokens=False).ids
            tokens.append(self._limit_ids([self._bos, *ids], instruction))
        width = -(-max(map(len, tokens)) // ROUND) * ROUND
        return pad_tokens(tokens, self.limit if self._full_width else min(width, self.limit), self._device)


def find_bos(tokenizer: Tokenizer) -> int:
    """Return the id of the first token (BOS). Raise CheckpointError for a tokenizer without it."""
    bos = tokenizer.token_to_id(BOS)
    if bos is None:
        raise CheckpointError(f"the tokenizer has no {BOS!r}; pi0's is PaliGemma's")
    return int(bos)


WITH_STATE = ("exact", "padded")
"""Kinds of pi0.5's prompt that hold the state."""


class Pi0Policy(FlowPolicy):
    """pi0's policy; `builder.build_policy` creates it."""

    module: Pi0Module
    prompts: PiPrompts
    state_in_prompt: str | None = None
    """Form of the state in the prompt of pi0.5."""
    name = "pi0"
    blocks: tuple[type[nn.Module], ...] = (SiglipEncoderLayer, GemmaDecoderLayer, LastLayer)
    regions = (*FlowPolicy.regions, *Pi0Module.regions)

    def save(self, folder: Path) -> None:
        """Save in lerobot's layout, with adapters merged into the weights."""
        kind, source, folder = self.state_in_prompt, self.checkpoint, Path(folder)
        in_prompt = kind in WITH_STATE
        kept = source.processors.get(PREPROCESSOR)
        if kept is not None and kind is not None and (STATE_STEP.encode() in kept) != in_prompt:
            # lerobot would make another prompt of the folder than the spec asked for
            source = evolve(source, raw={**source.shape.to_lerobot(), **source.raw}, processors={})
        self.save_lerobot(
            folder,
            source,
            self.name,
            name_variants(source.sizes),
            prompt=(STATE_STEP if in_prompt else NEW_LINE_STEP,),
            tokenizer="google/paligemma-3b-pt-224",
            normalise_first=in_prompt,
            public_name=public_name,
            image_resolution=[source.sizes.image_size, source.sizes.image_size],
        )
        if kind is not None:
            (folder / STATE_KIND).write_text(json.dumps({"state_in_prompt": kind}) + "\n", encoding="utf-8")


class Pi05Policy(Pi0Policy):
    """pi0.5's policy; `builder.build_policy` creates it."""

    module: Pi05Module
    name = "pi05"
    blocks = (*Pi0Policy.blocks, AdaptiveLayer)
    regions = (*FlowPolicy.regions, *Pi05Module.regions)

    def _encode_prompts(self, obs: Observation, state: Tensor) -> tuple[Tensor, Tensor]:
        if self._state_scaler is None:
            return super()._encode_prompts(obs, state)
        # From the recorded state and not from `state`, for which the host would wait.
        width = state.shape[1] if self.state_in_prompt == "padded" else self._state_scaler.dim
        shown_state = self._state_scaler.normalise_on_host(to_numpy(obs.state), width)
        return self.prompts.state_rows(obs.instructions, find_state_bins(shown_state).tolist())

    def _count_missing_tokens(self, ids: Tensor) -> int:
        return 0 if self._state_scaler is None else self.prompts.limit - ids.shape[1]


def build_policy(config: Pi0Config | Pi05Config, context: ModelContext) -> Pi0Policy:
    """Build the policy. Raise CheckpointError or MismatchError when checkpoint, spec and simulator do not fit."""
    builder = Pi05Builder if isinstance(config, Pi05Config) else Pi0Builder
    policy: Pi0Policy = builder(config, context).build()
    return policy


class Pi0Builder(FlowBuilder):
    """Builds pi0's policy."""

    policy: type[Pi0Policy] = Pi0Policy
    prompts = PiPrompts
    presets = {
        "tiny": PiSizes(**TINY, expert_width=64, expert_mlp=128, depth=3, patch_size=16),
        "full": PiSizes(),
    }
    stays_float32 = staticmethod(stays_float32)
    public_name = staticmethod(public_name)

    def open_checkpoint(self, folder: Path) -> FlowCheckpoint:
        """Open a folder in lerobot's or openpi's layout."""
        model = self.policy.name
        raw = read_config(folder, model)
        architecture = folder / ARCHITECTURE
        check_actions(folder, raw.data)
        opened = open_folder(
            folder,
            raw.data if "type" in raw.data else {},
            sizes=read_sizes(architecture, PiSizes) if architecture.is_file() else PiSizes.from_variants(raw),
            shape=read_shape(raw, model),
            statistics=self.measured or read_statistics(folder, raw, self.config.asset_id, model),
            tokenizer=self.config.tokenizer,
            slots=self.slots,
            open_names=open_names,
        )
        check_stored_model(folder, model, opened.weights.shapes if opened.weights else ())
        return opened

    def prompt_text(self, instruction: str) -> str:
        return prompt_text(instruction)

    def empty_network(self, checkpoint: FlowCheckpoint) -> PI0ForConditionalGeneration:
        return empty_network(network_config(checkpoint.sizes, checkpoint.shape))

    def initialise_network(self, network: PI0ForConditionalGeneration, seed: int) -> None:
        initialise_flow(network, seed, rms=0.0)

    def find_parts(self, network: Any) -> TrainedParts:
        vlm = network.model.vlm
        return TrainedParts(vlm=vlm, language=vlm.language_model, state=network.embed_action_time.state_proj.weight)

    def make_module(self, network: Any, fit: FlowIOAdapter, prompts: Any, heads: Heads) -> Pi0Module:
        return Pi0Module(network, *heads)


class Pi05Builder(Pi0Builder):
    """Builds pi0.5's policy."""

    policy = Pi05Policy
    max_prompt = PROMPTS["pi05"]
    quantiles = True
    blind = "state_in_prompt: none"
    kind: str
    """Form of the state in the prompt."""

    @property
    def pads(self) -> bool:
        """Whether the critic's mean includes the prompt's padding."""
        critic = self.config.value_head
        return bool(self.context.values != "none" and critic.reads == "prefix" and critic.pads)

    def build(self) -> Pi05Policy:
        policy: Pi05Policy = super().build()
        policy.state_in_prompt = self.kind
        return policy

    def open_checkpoint(self, folder: Path) -> FlowCheckpoint:
        opened = super().open_checkpoint(folder)
        self.kind = read_state_kind(folder, read_config(folder, self.policy.name), self.config.state_in_prompt)
        return opened

    def wants_state(self) -> bool | None:
        if self.config.checkpoint is None:
            self.kind = self.config.state_in_prompt or ("exact" if self.env.state_dim else "none")
        if self.kind != "none" and self.env.state_dim == 0:
            raise MismatchError(
                f"state_in_prompt: {self.kind} needs a state, and this simulator has none; set state_in_prompt: none"
            )
        return self.kind != "none"

    def prompt_text(self, instruction: str) -> str:
        return prompt_text(instruction) if self.kind == "none" else state_text(instruction, range(10))

    def make_prompts(self, fit: FlowIOAdapter, **options: Any) -> Any:
        # a prompt with the state changes at every step, and is padded separately
        varies = fit.state is None and any(task.instruction_varies for task in self.env.tasks)
        return super().make_prompts(fit, full_width=self.pads or varies)

    def empty_network(self, checkpoint: FlowCheckpoint) -> PI0ForConditionalGeneration:
        return empty_adaptive(network_config(checkpoint.sizes, checkpoint.shape))

    def initialise_network(self, network: PI0ForConditionalGeneration, seed: int) -> None:
        initialise_adaptive(network, seed)

    def find_parts(self, network: Any) -> TrainedParts:
        return TrainedParts(vlm=network.model.vlm, language=network.model.vlm.language_model)

    def make_module(self, network: Any, fit: FlowIOAdapter, prompts: Any, heads: Heads) -> Pi0Module:
        module = Pi05Module(network, *heads)
        module.pads = self.pads
        return module

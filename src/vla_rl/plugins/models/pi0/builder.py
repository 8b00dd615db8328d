"""Builds the policy from a spec's config and a worker's context; refuses what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PI0ForConditionalGeneration

from vla_rl.core.contexts import ModelContext
from vla_rl.plugins.models.pi0.adaptive import Pi05Module, empty_adaptive, initialise_adaptive
from vla_rl.plugins.models.pi0.architecture import PROMPTS, PiSizes, network_config, read_shape
from vla_rl.plugins.models.pi0.config import Pi0Config, Pi05Config
from vla_rl.plugins.models.pi0.layout import open_names, public_name
from vla_rl.plugins.models.pi0.network import Pi0Module, empty_network, stays_float32
from vla_rl.plugins.models.pi0.policy import Pi0Policy, Pi05Policy
from vla_rl.plugins.models.pi0.prompts import PiPrompts, prompt_text, state_text
from vla_rl.plugins.models.pi0.statistics import check_stored_model, read_config, read_state_kind, read_statistics
from vla_rl.toolkit.models.checkpoints.files import read_sizes
from vla_rl.toolkit.models.checkpoints.fitting import MismatchError
from vla_rl.toolkit.models.checkpoints.lerobot import check_actions
from vla_rl.toolkit.models.flow.build import TINY, FlowBuilder, TrainedParts
from vla_rl.toolkit.models.flow.checkpoint import ARCHITECTURE, FlowCheckpoint, open_folder
from vla_rl.toolkit.models.flow.fit import FlowIOAdapter
from vla_rl.toolkit.models.flow.network import Heads, initialise_flow


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

"""Base of flow policies: from observations to the network's inputs, and from its actions to the simulator's units."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from vla_rl.core.capabilities import Compilable
from vla_rl.core.contexts import ModelContext
from vla_rl.core.hookspecs import VLAModel
from vla_rl.core.types import Observation
from vla_rl.toolkit.models.flow.config import FlowConfig
from vla_rl.toolkit.models.flow.fit import FlowIOAdapter
from vla_rl.toolkit.models.flow.network import BackboneFeatures, FlowModule
from vla_rl.toolkit.models.images import ImageProcessor
from vla_rl.toolkit.models.networks import as_tensor
from vla_rl.toolkit.models.prompts import PaddedPrompts
from vla_rl.toolkit.models.scaling import FeatureScaler, make_action_scaler
from vla_rl.toolkit.relative_actions import take_offsets


@frozen(kw_only=True)
class FlowParts:
    """Components from which `FlowBuilder` constructs a policy."""

    config: FlowConfig
    context: ModelContext
    fit: FlowIOAdapter
    module: FlowModule
    images: ImageProcessor
    prompts: PaddedPrompts
    device: torch.device


class FlowInputs(VLAModel, Compilable):
    """Inputs and outputs of a flow policy."""

    name: str
    """Name of the model, in messages and in the keys of random numbers."""
    module: FlowModule
    prompts: PaddedPrompts

    def __init__(self, parts: FlowParts) -> None:
        config, context, fit, module, device = parts.config, parts.context, parts.fit, parts.module, parts.device
        env = context.env
        self.module = module
        self.checkpoint = fit.checkpoint
        self.images = parts.images
        self.prompts = parts.prompts
        self.cameras_read = tuple(fit.cameras)
        self._actions = make_action_scaler(fit.checkpoint.statistics.action, config.gripper, device)
        self._state_scaler = None if fit.state is None else FeatureScaler(fit.state, device)
        bounds = (env.action_low, env.action_high)
        low, high = (torch.tensor(bound, dtype=torch.float32, device=device) for bound in bounds)
        self._low = low
        self._high = high
        self._cameras = fit.cameras
        self._chunk = context.chunk
        self._width = module.shape[1]
        self._references = fit.checkpoint.statistics.references or ()
        self._device = device
        self._train_prefix = not config.train_expert_only
        self._reuse = config.reuse_prefix
        self._dropouts = [part for part in module.modules() if isinstance(part, nn.Dropout) and part.p > 0]
        module.eval()  # checkpoints have no dropout; adapters use it in `imitation_loss` only

    def _encode_prompts(self, obs: Observation, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return prompts' token ids and mask (False: padding), [B, L]. `state` [B, S], normalised: for prompts."""
        return self.prompts.token_rows(obs.instructions)

    def _encode_inputs(self, inputs: Mapping[str, Tensor]) -> BackboneFeatures:
        """Run the vision-language model on `_build_inputs`, without gradients if it is not trained."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and self._train_prefix):
            return self.module.run_backbone(inputs["pixels"], inputs["ids"], inputs["mask"])

    def _encode_observation(
        self, obs: Observation, dropout: bool = False, seen: BackboneFeatures | None = None
    ) -> tuple[Any, Tensor]:
        """Return the prefix and the normalised, padded state [B, S]. Switches the adapters' dropout. `seen`: what was
        recorded while acting, so that the vision-language model is not run."""
        self._set_dropout(dropout)
        if seen is not None:
            state = self._normalise_state(self._read_state(obs), len(obs))
            return self.module.build_prefix(seen, state), state
        inputs = self._build_inputs(obs)
        return self.module.build_prefix(self._encode_inputs(inputs), inputs["state"]), inputs["state"]

    def _build_inputs(self, obs: Observation) -> dict[str, Tensor]:
        """Return the "pixels", the "ids" and "mask" of prompts, and the "state"."""
        cameras = [as_tensor(obs.images[name], self._device) for name in self._cameras]
        pixels, state = self._process_inputs(cameras, self._read_state(obs))
        ids, mask = self._encode_prompts(obs, state)
        return {"pixels": pixels, "ids": ids, "mask": mask, "state": state}

    def _read_state(self, obs: Observation) -> Tensor | None:
        """Return the recorded state; None where the policy takes none."""
        if self._state_scaler is None:
            return None
        if obs.state is None:
            raise ValueError(f"{self.name} was built with a state, and the observation has none")
        return as_tensor(obs.state, self._device)

    def _process_inputs(self, cameras: Sequence[Tensor], recorded: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the images and the recorded state as the network takes them; zeros without a state."""
        pixels = self.images.process_images(cameras)
        return pixels, self._normalise_state(recorded, len(pixels))

    def _normalise_state(self, recorded: Tensor | None, rows: int) -> Tensor:
        """Return the recorded state as the network takes it, [B, S]; zeros without a state."""
        width = self.checkpoint.shape.state_dim
        if recorded is None or self._state_scaler is None:
            return torch.zeros(rows, width, device=self._device)
        return self._state_scaler.normalise_feature(recorded, width)

    def _read_offsets(self, obs: Observation) -> Tensor | None:
        """Return what the network's actions are relative to, [B, 1, A]; None where all are absolute."""
        if not self._references:
            return None
        if obs.state is None:
            raise ValueError(f"{self.name} predicts actions relative to the state, and the observation has none")
        return as_tensor(take_offsets(obs.state, self._references), self._device)[:, None]

    def _restore_actions(self, x: Tensor, offset: Tensor | None) -> Tensor:
        """Return denoised chunks' actions [B, C, A] in the simulator's units. `offset`: of `_read_offsets`."""
        actions = self._actions.restore_units(x[:, : self._chunk])
        return (actions if offset is None else actions + offset).clamp(self._low, self._high)

    def _normalise_actions(self, actions: Tensor, offset: Tensor | None) -> Tensor:
        """Return actions [..., C, A] in the simulator's units as the network predicts them, padded to its width."""
        relative = actions if offset is None else actions - offset
        return self._actions.normalise_feature(relative, self._width)

    def _set_dropout(self, on: bool) -> None:
        for part in self._dropouts:
            part.train(on)

    regions: tuple[Callable[..., Any], ...] = (_process_inputs,)

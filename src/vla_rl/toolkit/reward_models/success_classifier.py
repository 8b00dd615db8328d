"""A small network that tells from camera images and the instruction whether a task is solved."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from vla_rl.core.errors import UserError
from vla_rl.core.paths import explain_path_errors, write_whole
from vla_rl.core.types import Observation
from vla_rl.toolkit.reward_models.folder import (
    CONFIG,
    KIND,
    VERSION,
    WEIGHTS,
    WHAT,
    ClassifierShape,
    check_new_folder,
    read_shape,
)

CHANNELS = (16, 32, 64)
GRID = 4
"""Side of the grid of features, over which the last convolution is averaged."""
WIDTH = 128


class SuccessClassifier(nn.Module):
    """Convolutions over each camera, scaled by instruction features; two layers over all; no batch statistics."""

    def __init__(self, shape: ClassifierShape) -> None:
        super().__init__()
        self.shape = shape
        self._position = {text: i for i, text in enumerate(shape.instructions)}
        self.encoders = nn.ModuleList(image_encoder() for _ in shape.cameras)
        features = len(shape.cameras) * CHANNELS[-1] * GRID**2
        self.joined = nn.Sequential(nn.Linear(features, WIDTH), nn.LayerNorm(WIDTH))
        self.instruction = nn.Embedding(len(shape.instructions), 2 * WIDTH)
        self.head = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1))

    def scale_images(self, obs: Observation) -> torch.Tensor:
        """Return all cameras as uint8 [B, cameras, 3, size, size] on the device; UserError for one that is missing."""
        device = self.instruction.weight.device
        size = (self.shape.image_size, self.shape.image_size)
        scaled = []
        for camera in self.shape.cameras:
            if camera not in obs.images:
                raise UserError(
                    f"the success classifier looks at camera {camera!r}, and the simulator has: "
                    f"{', '.join(obs.images) or 'none'}"
                )
            image = torch.as_tensor(obs.images[camera]).to(device).permute(0, 3, 1, 2)
            if image.shape[2:] != size:
                image = F.interpolate(image.float(), size, mode="area").round().to(torch.uint8)
            scaled.append(image)
        return torch.stack(scaled, 1)

    def instruction_ids(self, instructions: Sequence[str]) -> torch.Tensor:
        """Return places in the classifier's table, int64 [B]. Raises UserError for an instruction that is not there."""
        unknown = sorted(set(instructions) - self._position.keys())
        if unknown:
            raise UserError(
                f"the success classifier does not know the instruction {unknown[0]!r}; its recordings have: "
                f"{'; '.join(map(repr, self.shape.instructions))}"
            )
        ids = [self._position[text] for text in instructions]
        return torch.tensor(ids, dtype=torch.int64, device=self.instruction.weight.device)

    def forward(self, images: torch.Tensor, instruction_ids: torch.Tensor) -> torch.Tensor:
        """Return logits of success, float32 [B], for what `scale_images` and `instruction_ids` return."""
        x = images.float() / 127.5 - 1.0
        features = torch.cat([encoder(x[:, i]) for i, encoder in enumerate(self.encoders)], 1)
        scale, shift = self.instruction(instruction_ids).chunk(2, 1)
        logits: torch.Tensor = self.head(self.joined(features) * (1 + scale) + shift)[:, 0]
        return logits

    @torch.no_grad()
    def predict_success(self, obs: Observation) -> torch.Tensor:
        """Return the probability of success for each observation, float32 [B]."""
        return torch.sigmoid(self(self.scale_images(obs), self.instruction_ids(obs.instructions)))


def image_encoder() -> nn.Sequential:
    """Return convolutions from images [B, 3, S, S] to features [B, CHANNELS[-1] * GRID**2]."""
    layers: list[nn.Module] = []
    before = 3
    for channels in CHANNELS:
        layers += [nn.Conv2d(before, channels, 3, stride=2, padding=1), nn.GroupNorm(8, channels), nn.SiLU()]
        before = channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(GRID), nn.Flatten())


def save_classifier(model: SuccessClassifier, folder: Path) -> None:
    """Write the classifier's folder: `config.json` last, without which it is none. Raises UserError where it cannot be
    written, or something is there; then the folder is as before."""
    from safetensors.torch import save

    check_new_folder(folder)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    shape = model.shape
    config = {
        "kind": KIND,
        "version": VERSION,
        "cameras": shape.cameras,
        "instructions": shape.instructions,
        "image_size": shape.image_size,
        "fitted": dict(shape.fitted),
    }
    existed = folder.is_dir()
    try:
        with explain_path_errors(WHAT, folder):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / WEIGHTS).write_bytes(save(weights))
            write_whole(folder / CONFIG, json.dumps(config, indent=1, ensure_ascii=False))
    except BaseException:
        (folder / WEIGHTS).unlink(missing_ok=True)
        if not existed and folder.is_dir():
            folder.rmdir()
        raise


def load_classifier(folder: Path, device: str) -> SuccessClassifier:
    """Return the classifier in a folder, on a device. Raises UserError for a folder that is none."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    model = SuccessClassifier(read_shape(folder))
    try:
        model.load_state_dict(load_file(folder / WEIGHTS))
    except (SafetensorError, RuntimeError, OSError) as exc:
        raise UserError(f"{folder / WEIGHTS} cannot be read ({exc}); fit the classifier again") from exc
    return model.to(device).eval().requires_grad_(False)

"""LoRA adapters through peft: wraps the network, and writes it merged under its public names, or the adapter alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import torch
from attrs import frozen
from peft import PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from vla_rl.core.errors import CheckpointError
from vla_rl.plugins.models.openvla.adapter_config import AdapterSettings, read_adapter_config
from vla_rl.plugins.models.openvla.heads import public_network
from vla_rl.plugins.models.openvla.locate import ADAPTER_CONFIG, resolve_checkpoint
from vla_rl.plugins.models.openvla.modeling import OpenVLAForActionPrediction
from vla_rl.toolkit.models import adapters
from vla_rl.toolkit.models.adapters import (
    FROZEN_WEIGHTS,
    START,
    LoRAConfig,
    adapted_layers,
    check_adapter,
    keep_start,
    peft_config,
    seed_torch,
    trained_layers,
)
from vla_rl.toolkit.models.checkpoints.files import (
    WeightFiles,
    check_names,
    read_file,
    read_keys,
    save_tensors,
)
from vla_rl.toolkit.models.networks import shapes_of

ADAPTER, FINGERPRINT = "adapter_model.safetensors", "base_fingerprint.json"
PREFIX = "base_model.model."
HEAD = "language_model.lm_head.weight"


class AdapterBase(NamedTuple):
    """Weights to which an adapter belongs."""

    name: str
    """Name as in a spec: a folder, `builtin:NAME` or a hub name."""
    fingerprint: str
    frozen_weights: str
    """How the layers' weights were stored while the adapter was trained, as in a spec."""


@frozen(kw_only=True)
class Adapter:
    """LoRA adapter in peft's files."""

    folder: Path
    settings: AdapterSettings
    state: Mapping[str, Tensor]

    @property
    def base_fingerprint(self) -> str:
        return self.settings.base

    @property
    def frozen_weights(self) -> str:
        """How the base's weights were stored while the adapter was trained; bf16 where the folder does not say."""
        file = self.folder / FINGERPRINT
        return read_keys(file).get_text("frozen_weights", "bf16") if file.is_file() else "bf16"

    def check_storage(self, kind: str) -> None:
        """Raise CheckpointError where the spec would store the base in other bits than the adapter was trained on."""
        trained = self.frozen_weights
        if trained not in FROZEN_WEIGHTS:
            known = ", ".join(FROZEN_WEIGHTS)
            raise CheckpointError(f"{self.folder / FINGERPRINT}: frozen_weights is {trained!r}; known are {known}")
        if trained != "bf16" and kind not in (trained, "bf16"):
            raise CheckpointError(
                f"the adapter in {self.folder} was trained on weights in {trained}, and the spec asks for {kind}; "
                f"set model.frozen_weights: {trained}, or leave it out: they are then rounded as they were"
            )

    def base_folder(self) -> Path:
        try:
            return resolve_checkpoint(self.base_fingerprint)
        except CheckpointError as error:
            raise CheckpointError(
                f"{self.folder} holds an adapter, and its base {self.base_fingerprint!r} was not found; put it "
                f"there, or correct "
                f"base_model_name_or_path in {self.folder / ADAPTER_CONFIG}. {error}"
            ) from error

    def check_base(self, fingerprint: str) -> None:
        """Raise CheckpointError if the adapter was trained on other weights (a public adapter does not say which)."""
        file = self.folder / FINGERPRINT
        trained = read_keys(file).get_text("fingerprint") if file.is_file() else fingerprint
        if trained != fingerprint:
            raise CheckpointError(
                f"the adapter in {self.folder} belongs to other weights than {self.base_fingerprint!r} holds now "
                f"(fingerprint "
                f"{trained}, found {fingerprint}); give it the base it was trained on"
            )

    def merge_tensor(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor of the base with the adapter merged in."""
        stem = PREFIX + name.removesuffix(".weight")
        down, up = self.state.get(f"{stem}.lora_A.weight"), self.state.get(f"{stem}.lora_B.weight")
        if down is None or up is None:
            return tensor
        scale = self.settings.alpha / self.settings.rank
        return tensor.float() + scale * (up.float() @ down.float())

    def check_merges(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise CheckpointError unless every tensor is half of a pair that fits a weight of the base."""
        wanted: dict[str, tuple[int, ...]] = {}
        rank = self.settings.rank
        for key in self.state:
            name, _, half = key.removeprefix(PREFIX).rpartition(".lora_")
            shape = shapes.get(f"{name}.weight", (0, 0))
            if half in ("A.weight", "B.weight") and len(shape) == 2:
                wanted[f"{PREFIX}{name}.lora_A.weight"] = (rank, shape[1])
                wanted[f"{PREFIX}{name}.lora_B.weight"] = (shape[0], rank)
        check_names(wanted, shapes_of(self.state), self.folder / ADAPTER)

    @torch.no_grad()
    def copy_into(self, model: nn.Module, config: LoRAConfig) -> None:
        """Copy this adapter's weights into the model, to continue its training. Raise CheckpointError when the spec
        describes another one."""
        otherwise = "leave model.lora out to merge it into its base"
        check_adapter(self.folder, self.settings.rank, self.settings.alpha, config, otherwise)
        adapters = {n.replace(".default.", "."): p for n, p in model.named_parameters() if ".lora_" in n}
        check_names(shapes_of(adapters), shapes_of(self.state), self.folder / ADAPTER)
        for name, parameter in adapters.items():
            parameter.copy_(self.state[name])
        for layer in adapted_layers(model):
            keep_start(layer)


def compute_fingerprint(weights: WeightFiles) -> str:
    """Return a hash of names, shapes and the first row of every tensor: it identifies the base of adapters and reads
    only thousandths of the files."""
    digest = sha256()
    for path, names in sorted(weights.files.items()):
        with safe_open(path, "pt") as file:
            for name in sorted(names):
                row = file.get_slice(name)[:1].contiguous()
                digest.update(f"{name} {weights.shapes[name]} {row.dtype} ".encode())
                digest.update(row.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def read_adapter(folder: Path) -> Adapter | None:
    """Return the adapter in a folder, or None. Raise CheckpointError for an incomplete or unsupported one."""
    weights = folder / ADAPTER
    if not (folder / ADAPTER_CONFIG).is_file():
        return None
    if not weights.is_file():
        raise CheckpointError(f"{folder} is not a complete adapter: it has no {ADAPTER}")
    return Adapter(folder=folder, settings=read_adapter_config(folder), state=read_file(weights, load_file))


def save_adapter(model: nn.Module, folder: Path, base: AdapterBase) -> None:
    """Write peft's two files and the base's fingerprint."""
    assert isinstance(model, PeftModel)
    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    trained = {n: t.detach().cpu().contiguous() for n, t in state.items() if f".{START}." not in n}
    save_tensors(trained, folder / ADAPTER, {"format": "pt"})
    config = model.peft_config["default"]
    config.base_model_name_or_path = base.name
    config.save_pretrained(str(folder))
    record = {"base": base.name, "fingerprint": base.fingerprint, "frozen_weights": base.frozen_weights}
    (folder / FINGERPRINT).write_text(json.dumps(record) + "\n", encoding="utf-8")


def add_adapters(model: OpenVLAForActionPrediction, config: LoRAConfig, *, autocast: bool, seed: int) -> nn.Module:
    """Add adapters to every linear layer that is trained, except the head; everything else is frozen. They are float32,
    also where the model is not. Initialisation is a function of the seed; PyTorch's global generator is left as it
    was."""
    layers = [name for name in trained_layers(model) if f"{name}.weight" != HEAD]
    with seed_torch(seed):
        adapted = get_peft_model(model, peft_config(config, layers))
    if autocast:  # autocast casts by itself; peft would make, and keep, a float32 copy of every layer's input
        for part in adapted.modules():
            if isinstance(part, LoraLayer):
                part.cast_input_dtype_enabled = False
    return adapted


class MergedLoRAState(adapters.MergedState):
    """State of OpenVLA with adapters merged in, with all rows of the head, on the host."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        self._network = public_network(model)
        super().__init__(self._network, dtype)

    def outline_tensors(self) -> dict[str, Tensor]:
        """Return all tensors on the meta device."""
        shapes = {name: tensor.shape for name, tensor in self.tensors.items()}
        shapes[HEAD] = torch.Size([self._network.config.text_config.vocab_size, shapes[HEAD][1]])
        return {
            name: torch.empty(shapes[name], dtype=self._dtype or tensor.dtype, device="meta")
            for name, tensor in self.tensors.items()
        }

    def read_tensor(self, name: str) -> Tensor:
        tensor = self._network.whole_head() if name == HEAD else super().read_tensor(name)
        return tensor.to("cpu", self._dtype or tensor.dtype).contiguous()

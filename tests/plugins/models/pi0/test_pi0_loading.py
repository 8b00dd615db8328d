"""Large folders, and those that are not quite there: the hub's cache, shards, memory, downloads that broke off."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import noise
from pi0_cases import observation, policy
from safetensors.torch import load_file, save_file

from vla_rl.core.errors import CheckpointError
from vla_rl.plugins.models.pi0.architecture import FlowShape, PiSizes, network_config
from vla_rl.plugins.models.pi0.config import Pi0Config
from vla_rl.plugins.models.pi0.network import empty_network
from vla_rl.plugins.models.pi0.statistics import action_dim
from vla_rl.toolkit.models import networks
from vla_rl.toolkit.models.checkpoints.files import WANTED, WeightFiles

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    policy().save(folder)
    return folder


def copy(saved: Path, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for path in saved.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def shard(saved: Path, folder: Path, dtype: torch.dtype = torch.float32) -> list[Path]:
    """The same folder with its weights in two files; -> these."""
    copy(saved, folder)
    state = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    index = {name: f"model-0000{i % 2 + 1}-of-00002.safetensors" for i, name in enumerate(state)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    files = [folder / name for name in sorted(set(index.values()))]
    for file in files:
        save_file({name: tensor for name, tensor in state.items() if index[name] == file.name}, file)
    return files


def refused(checkpoint: Path | str, match: str) -> None:
    with pytest.raises(CheckpointError, match=re.compile(match, re.DOTALL)):
        policy(checkpoint=str(checkpoint))


def test_hub_names_without_network(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub import constants, snapshot_download

    offline: list[bool] = []

    def spy(*args: Any, **keys: Any) -> str:
        offline.append(keys["local_files_only"])
        return snapshot_download(*args, **keys)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", spy)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--acme--pi0-tiny"
    copy(saved, repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    obs = observation(2)
    wanted = policy(checkpoint=str(saved)).sample_chunk(obs, noise(2), False)
    for name in ("acme/pi0-tiny", f"acme/pi0-tiny@{COMMIT}"):
        assert action_dim(Pi0Config(checkpoint=name)) == 3
        assert torch.equal(policy(checkpoint=name).sample_chunk(obs, noise(2), False).actions, wanted.actions)
    offline.clear()
    assert action_dim(Pi0Config(checkpoint="acme/nothing")) is None
    assert offline == [True], "a spec is checked without network"
    refused("acme/nothing", "neither a folder.*hf download acme/nothing --local-dir FOLDER, then set model.checkpoint")


def test_what_is_fetched_from_a_repository() -> None:
    from huggingface_hub.utils import filter_repo_objects

    lerobot = ["config.json", "model.safetensors", "policy_preprocessor.json", "policy_preprocessor_step_5.safetensors"]
    openpi = ["assets/physical-intelligence/libero/norm_stats.json", "model-00001-of-00002.safetensors"]
    other = ["README.md", "modeling.py", "pytorch_model.bin", "params/ocdbt.process_0/d/1"]
    assert list(filter_repo_objects([*lerobot, *openpi, *other], allow_patterns=list(WANTED))) == lerobot + openpi


def test_shards_load_in_either_precision(saved: Path, tmp_path: Path) -> None:
    """And give each parameter its own: towers as asked for, what stays in float32 as the file has it."""
    shard(saved, tmp_path, torch.bfloat16)
    file = load_file(saved / "model.safetensors")
    tower = "model.paligemma_with_expert.gemma_expert.model.layers.0.mlp.up_proj.weight"
    wide, narrow = (policy(checkpoint=str(tmp_path), dtype=dtype).module.pi0 for dtype in ("float32", "bfloat16"))
    for network, dtype in ((wide, torch.float32), (narrow, torch.bfloat16)):
        assert torch.equal(network.model.dit.layers[0].mlp.up_proj.weight, file[tower].bfloat16().to(dtype))
        norm = network.model.dit.norm.weight
        assert norm.dtype == network.action_out_proj.weight.dtype == torch.float32
        assert torch.equal(network.action_out_proj.weight, file["model.action_out_proj.weight"].bfloat16().float())


def test_what_is_loaded_equals_what_was_built(saved: Path) -> None:
    """Also the parts that no file holds, such as the rotary frequencies, and what is frozen."""
    built, loaded = policy().module, policy(checkpoint=str(saved)).module
    for (name, a), (other, b) in zip(built.named_buffers(), loaded.named_buffers(), strict=True):
        assert name == other and torch.equal(a, b)
    for (name, a), (other, b) in zip(built.named_parameters(), loaded.named_parameters(), strict=True):
        assert name == other and a.requires_grad == b.requires_grad and torch.equal(a, b)


def test_half_downloaded_folders_are_named(saved: Path, tmp_path: Path) -> None:
    last = shard(saved, tmp_path)[1]
    content = last.read_bytes()
    last.rename(tmp_path / f"{last.name}.incomplete")
    refused(
        tmp_path, f"half-downloaded: 1 of 2 .*missing .{last.name}.*unfinished downloads are there: {last.name}.inc"
    )
    last.write_bytes(content[: len(content) // 2])
    refused(tmp_path, f"cannot read .*{last.name}.*cut off: fetch it again")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
    last.write_text(pointer)
    refused(tmp_path, f"{last.name} is a Git LFS pointer.*git lfs pull")
    last.write_bytes(content)
    (tmp_path / "policy_preprocessor_step_5_normalizer_processor.safetensors").write_text(pointer)
    refused(tmp_path, "normalizer_processor.safetensors is a Git LFS pointer")


def test_names_are_compared_before_anything_is_read(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = shard(saved, tmp_path)[0]
    state = load_file(file)
    gone = next(iter(state))
    state["model.extra.weight"] = state.pop(gone)
    save_file(state, file)
    monkeypatch.setattr(WeightFiles, "visit_tensors", None)
    refused(tmp_path, rf"missing \(1\): {gone.removeprefix('model.')}\n.*unexpected \(1\): extra.weight")


def test_memory_is_stated_before_loading(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "free_memory", lambda device: 1000)
    monkeypatch.setattr(WeightFiles, "visit_tensors", None)
    stated = r"does not fit on cpu: [\d,]+ weights as float32 need .*0.0 GiB are free; set model.dtype: bfloat16"
    refused(saved, stated)
    with pytest.raises(CheckpointError, match=f"preset tiny {stated}"):
        policy()


def test_memory_of_the_full_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "free_memory", lambda device: 10 * 2**30)
    with torch.device("meta"):
        network = empty_network(network_config(PiSizes(), FlowShape(horizon=50)))
    with pytest.raises(CheckpointError, match=r"3,501,372,176 weights as float32 need 13.0 GiB.*bfloat16 \(6.5 GiB\)"):
        networks.allocate_network(network, CPU, torch.float32, "pi0")


def test_loaded_weights_do_not_follow_the_file(saved: Path, tmp_path: Path) -> None:
    folder = copy(saved, tmp_path)
    weight = policy(checkpoint=str(folder)).module.pi0.model.dit.layers[0].mlp.up_proj.weight
    before = weight.clone()
    (folder / "model.safetensors").write_bytes(b"\1" * (folder / "model.safetensors").stat().st_size)
    assert torch.equal(weight, before)

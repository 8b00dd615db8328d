"""Large folders: shards, other precisions, the hub's cache, memory, adapters and their bases."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from model_cases import noise, reloading
from openvla_cases import CHUNK, ENV, empty, observation, policy
from safetensors.torch import load_file, save_file

from fork_server import ForkServer
from vla_rl.core.errors import CheckpointError
from vla_rl.plugins.models.openvla import checkpoint, openvla_oft
from vla_rl.plugins.models.openvla.architecture import preset_config
from vla_rl.plugins.models.openvla.checkpoint import save_checkpoint
from vla_rl.plugins.models.openvla.config import OpenVLAOFTConfig
from vla_rl.plugins.models.openvla.lora import MergedLoRAState
from vla_rl.plugins.models.openvla.modeling import hollow_model
from vla_rl.testing import check_model
from vla_rl.toolkit.models import networks
from vla_rl.toolkit.models.adapters import LoRAConfig
from vla_rl.toolkit.models.checkpoints.files import WeightFiles

LORA = LoRAConfig(rank=4)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    policy(cameras=("camera0",), use_proprio=False).save(folder)
    return folder


def copy(saved: Path, folder: Path, weights: bool = True) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for path in saved.iterdir():
        if weights or path.name != "model.safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    return folder


def shard(saved: Path, folder: Path, parts: int, dtype: torch.dtype = torch.float32) -> Path:
    """The same folder with its weights in several files, as large public checkpoints have them."""
    copy(saved, folder, weights=False)
    state = load_file(saved / "model.safetensors")
    names = [f"model-{i + 1:05}-of-{parts:05}.safetensors" for i in range(parts)]
    index = {name: names[i % parts] for i, name in enumerate(sorted(state))}
    for file in names:
        inside = {name: state[name].to(dtype) for name in state if index[name] == file}
        save_file(inside, folder / file, {"format": "pt"})
    total = sum(t.numel() * dtype.itemsize for t in state.values())
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    return folder


def greedy(checkpoint: Path | str, **config: Any) -> torch.Tensor:
    return policy(checkpoint=str(checkpoint), **config).sample_chunk(observation(3), noise(3), True).log_probs


# ------------------------------------------------------------------------------------------------- files of weights


def test_shards_are_the_same_weights(saved: Path, tmp_path: Path) -> None:
    assert torch.equal(greedy(shard(saved, tmp_path, 3)), greedy(saved))


def test_large_weights_are_saved_in_shards(saved: Path, tmp_path: Path) -> None:
    """An index, and files no larger than the limit but for a tensor that is."""
    model = policy(checkpoint=str(saved), lora=LORA)
    for folder, limit in (("one", 10**9), ("many", 200_000)):
        target = tmp_path / folder
        target.mkdir()
        (target / "model.safetensors").write_bytes(b"of an earlier save")
        save_checkpoint(model.module, model.config, model.prompts.tokenizer, target, shard_bytes=limit)
    one, many = tmp_path / "one", tmp_path / "many"
    assert not (one / "model.safetensors.index.json").exists()
    assert not (many / "model.safetensors").exists()
    index = json.loads((many / "model.safetensors.index.json").read_text())
    files = sorted(many.glob("model-*.safetensors"))
    assert [f.name for f in files] == [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    assert len(files) > 3
    shards = {f.name: load_file(f) for f in files}
    for state in shards.values():
        assert len(state) == 1 or sum(t.nbytes for t in state.values()) <= 200_000
    assert index["weight_map"] == {name: file for file, state in shards.items() for name in state}
    whole = load_file(one / "model.safetensors")
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in whole.values())
    together = {name: t for state in shards.values() for name, t in state.items()}
    assert list(whole) and whole.keys() == together.keys() == load_file(saved / "model.safetensors").keys()
    assert all(torch.equal(whole[name], together[name]) for name in whole)
    assert torch.equal(greedy(many), greedy(one))


def test_saving_makes_one_shard_at_a_time(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At full size the merged weights do not fit a second time."""
    model, events = policy(checkpoint=str(saved), lora=LORA), []
    read, write = MergedLoRAState.read_tensor, checkpoint.save_tensors
    monkeypatch.setattr(MergedLoRAState, "read_tensor", lambda self, name: (events.append("read"), read(self, name))[1])
    monkeypatch.setattr(
        checkpoint, "save_tensors", lambda *args, **keys: (events.append("write"), write(*args, **keys))
    )
    save_checkpoint(model.module, model.config, model.prompts.tokenizer, tmp_path, shard_bytes=200_000)
    assert events.count("write") > 3
    assert events.index("write") < len(events) // 2


def test_bfloat16_shards_load_in_either_precision(saved: Path, tmp_path: Path) -> None:
    shard(saved, tmp_path, 2, torch.bfloat16)
    wanted = load_file(saved / "model.safetensors")["projector.fc1.weight"].bfloat16()
    narrow, wide = (policy(checkpoint=str(tmp_path), dtype=dtype) for dtype in ("bfloat16", "float32"))
    assert torch.equal(narrow.module.vla.projector.fc1.weight, wanted)
    assert torch.equal(wide.module.vla.projector.fc1.weight, wanted.float())
    assert {p.dtype for p in narrow.module.parameters()} == {torch.bfloat16}


def test_what_is_loaded_equals_what_was_built(saved: Path) -> None:
    """Also the parts that no file holds, such as the rotary frequencies, and what is frozen."""
    built = policy(cameras=("camera0",), use_proprio=False).module
    loaded = policy(checkpoint=str(saved)).module
    for (name, a), (other, b) in zip(built.named_buffers(), loaded.named_buffers(), strict=True):
        assert name == other and torch.equal(a, b)
    for (name, a), (other, b) in zip(built.named_parameters(), loaded.named_parameters(), strict=True):
        assert name == other and a.requires_grad == b.requires_grad and torch.equal(a, b)
    assert not [name for name, t in (*loaded.named_parameters(), *loaded.named_buffers()) if t.is_meta]


def test_loaded_weights_do_not_follow_the_file(saved: Path, tmp_path: Path) -> None:
    folder = copy(saved, tmp_path)
    model = policy(checkpoint=str(folder))
    before = model.module.vla.projector.fc1.weight.clone()
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-40_000, os.SEEK_END)
        file.write(b"\1" * 40_000)
    assert torch.equal(model.module.vla.projector.fc1.weight, before)


def test_half_downloaded_folders_are_named(saved: Path, tmp_path: Path) -> None:
    shard(saved, tmp_path, 3)
    last = tmp_path / "model-00003-of-00003.safetensors"
    content = last.read_bytes()
    last.unlink()
    (tmp_path / "model-00003-of-00003.safetensors.incomplete").write_bytes(content[:1000])
    wanted = r"half-downloaded: 1 of 3 weight files are missing \(model-00003-of-00003.safetensors\)"
    with pytest.raises(CheckpointError, match=wanted + "; unfinished downloads are there: .*incomplete"):
        policy(checkpoint=str(tmp_path))
    last.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match="cannot read .*00003.*cut off: fetch it again"):
        policy(checkpoint=str(tmp_path))
    last.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    with pytest.raises(CheckpointError, match="00003.*is a Git LFS pointer.*git lfs pull"):
        policy(checkpoint=str(tmp_path))


def test_keys_of_shards_that_do_not_fit_are_listed_before_anything_is_read(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard(saved, tmp_path, 2)
    file = tmp_path / "model-00001-of-00002.safetensors"
    state = load_file(file)
    gone = next(iter(state))
    state["extra.weight"] = state.pop(gone)
    save_file(state, file)
    monkeypatch.setattr(WeightFiles, "visit_tensors", None)
    with pytest.raises(CheckpointError, match=rf"(?s)missing \(1\): {gone}.*unexpected \(1\): extra.weight"):
        policy(checkpoint=str(tmp_path))


def test_weights_in_pickles_are_refused(saved: Path, tmp_path: Path) -> None:
    copy(saved, tmp_path, weights=False)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no model.safetensors \(pytorch_model.bin is not read"):
        policy(checkpoint=str(tmp_path))


def test_memory_is_stated_before_loading(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "free_memory", lambda device: 1000)
    monkeypatch.setattr(WeightFiles, "visit_tensors", None)
    with pytest.raises(
        CheckpointError, match=r"does not fit on cpu: [\d,]+ weights as float32 need .* 0.0 GiB are free"
    ):
        policy(checkpoint=str(saved))


def test_memory_of_the_full_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "free_memory", lambda device: 20 * 2**30)
    with pytest.raises(CheckpointError, match=r"7,541,237,184 weights as float32 need 28.1 GiB.*bfloat16 \(14.0 GiB\)"):
        networks.check_memory(7_541_237_184, torch.float32, torch.device("cpu"), Path("x"))
    networks.check_memory(7_541_237_184, torch.bfloat16, torch.device("cpu"), Path("x"))


def test_python_code_of_a_folder_is_not_run(saved: Path, tmp_path: Path) -> None:
    copy(saved, tmp_path / "in")
    file = tmp_path / "in" / "config.json"
    raw = json.loads(file.read_text()) | {"auto_map": {"AutoConfig": "evil.Config", "AutoModelForVision2Seq": "evil.M"}}
    file.write_text(json.dumps(raw))
    (tmp_path / "in" / "evil.py").write_text("raise SystemExit('ran')")
    model = policy(checkpoint=str(tmp_path / "in"))
    model.save(tmp_path / "out")
    assert "auto_map" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_tokenizer_of_sentencepiece_alone(saved: Path, tmp_path: Path) -> None:
    copy(saved, tmp_path)
    (tmp_path / "tokenizer.json").rename(tmp_path / "tokenizer.model")
    remedy = (
        r"(?s)has its tokenizer as tokenizer.model alone.*write tokenizer.json next to it.*pip install sentencepiece"
    )
    with pytest.raises(CheckpointError, match=remedy):
        policy(checkpoint=str(tmp_path))


@pytest.mark.parametrize(("preset", "count"), [("small", 109_384_192), ("full", 7_541_237_184)])
def test_presets_that_measure_machines(preset: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    got = sum(p.numel() for p in hollow_model(preset_config(preset)).parameters())
    assert got == count
    monkeypatch.setattr(networks, "free_memory", lambda device: 0)
    with pytest.raises(CheckpointError, match=rf"preset {preset} does not fit on cpu: {got:,} weights"):
        policy(preset=preset)


# ----------------------------------------------------------------------------------------------------------- the hub


OFFLINE = """
import json, sys
from vla_rl.testing import synthetic
from vla_rl.core.contexts import ModelContext
from vla_rl.plugins.models.openvla import openvla_oft
from vla_rl.core.errors import CheckpointError
for name in sys.argv[1:]:
    config = openvla_oft.config(checkpoint=name)
    print(openvla_oft.action_dim(config), end=" ")
    try:
        model = openvla_oft.build(config, ModelContext(env=synthetic.env_info(bounds=((-1.0, 1.0),)), chunk=4))
        print(sum(p.numel() for p in model.module.parameters()))
    except CheckpointError as error:
        print(json.dumps(str(error)))
"""


def test_hub_names_without_network(saved: Path, tmp_path: Path, fork_server: ForkServer) -> None:
    cache, commit = tmp_path / "hub", "0123456789abcdef0123456789abcdef01234567"
    repository = cache / "models--acme--openvla-oft-tiny"
    copy(saved, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    half = cache / "models--acme--half" / "snapshots" / commit
    shard(saved, half, 2)
    (half / "model-00002-of-00002.safetensors").unlink()
    (half.parents[1] / "refs").mkdir()
    (half.parents[1] / "refs" / "main").write_text(commit)
    names = ["acme/openvla-oft-tiny", f"acme/openvla-oft-tiny@{commit}", "acme/half", "acme/nothing", "acme/x@v2"]
    env = os.environ | {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    done = fork_server.run_python("-c", OFFLINE, *names, env=env, check=True)
    lines = done.stdout.splitlines()
    count = sum(p.numel() for p in policy(checkpoint=str(saved)).module.parameters())
    assert lines[0] == lines[1] == f"3 {count}"
    assert lines[2].startswith("3 ") and "half-downloaded: 1 of 2 weight files are missing" in lines[2]
    number, text = lines[3].split(" ", 1)
    message = json.loads(text)
    assert number == "None"
    for part in (
        "'acme/nothing' is neither a folder",
        str(cache),
        "hf download acme/nothing --local-dir FOLDER",
        "set model.checkpoint: FOLDER",
        "models--acme--nothing",
    ):
        assert part in message
    assert "hf download acme/x --revision v2" in lines[4]


# ---------------------------------------------------------------------------------------------------------- adapters


def moved(saved: Path, seed: int = 0, **config: Any) -> Any:
    model = policy(checkpoint=str(saved), lora=LORA, **config)
    for name, p in model.module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1, generator=torch.Generator().manual_seed(seed))
    return model


def test_adapter_alone_keeps_to_the_contract(saved: Path) -> None:
    given = OpenVLAOFTConfig(checkpoint=str(saved), lora=LORA, save_lora="adapter")

    env = attrs.evolve(ENV, cameras={"camera0": (64, 64)})
    check_model(openvla_oft, given, env=env, chunk=CHUNK, atol=2e-5, reload=reloading(given))


def test_adapter_is_trained_on_or_merged(saved: Path, tmp_path: Path) -> None:
    model = moved(saved, save_lora="adapter")
    model.save(tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= {
        p.name for p in tmp_path.iterdir()
    }
    wanted = model.sample_chunk(observation(3), noise(3), True).log_probs
    assert torch.equal(greedy(tmp_path, lora=LORA), wanted)
    torch.testing.assert_close(greedy(tmp_path), wanted, rtol=0, atol=1e-5)
    assert not [n for n, _ in policy(checkpoint=str(tmp_path)).module.named_parameters() if "lora" in n]
    again = policy(checkpoint=str(tmp_path), lora=LORA, save_lora="adapter")
    again.save(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(saved)
    assert torch.equal(greedy(tmp_path / "again", lora=LORA), wanted)


def test_peft_reads_the_adapter(saved: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    model = moved(saved, save_lora="adapter")
    model.save(tmp_path)
    network = empty(model.config)
    networks.load_weights(network, load_file(saved / "model.safetensors"), saved)
    theirs = PeftModel.from_pretrained(network, str(tmp_path)).state_dict()
    own = {name: t for name, t in model.module.vla.state_dict().items() if "lora_" in name}
    assert own and all(torch.equal(theirs[name], tensor) for name, tensor in own.items())


def test_adapter_of_another_base_or_shape_is_refused(saved: Path, tmp_path: Path) -> None:
    base = copy(saved, tmp_path / "base")
    moved(base, save_lora="adapter").save(tmp_path / "adapter")
    with pytest.raises(
        CheckpointError, match=r"rank 4 and alpha 4, the spec asks for rank 8.*set model.lora: {rank: 4"
    ):
        policy(checkpoint=str(tmp_path / "adapter"), lora=LoRAConfig(rank=8))
    with pytest.raises(
        CheckpointError, match=r"adapter_model.safetensors does not fit.*\n  unexpected \(\d+\).*vision"
    ):
        policy(checkpoint=str(tmp_path / "adapter"), lora=LORA, freeze_vision=True)
    state = load_file(base / "model.safetensors")
    save_file({name: t + 0.01 for name, t in state.items()}, base / "model.safetensors")
    for lora in (None, LORA):
        with pytest.raises(CheckpointError, match="belongs to other weights than .*fingerprint"):
            policy(checkpoint=str(tmp_path / "adapter"), lora=lora)
    (tmp_path / "adapter" / "base_fingerprint.json").unlink()
    state["projector.fc1.weight"] = torch.zeros(3, 3)
    save_file(state, base / "model.safetensors")
    with pytest.raises(CheckpointError, match="projector.fc1.lora_A"):
        policy(checkpoint=str(tmp_path / "adapter"))
    for path in base.iterdir():
        path.unlink()
    base.rmdir()
    with pytest.raises(CheckpointError, match="holds an adapter, and its base .* was not found"):
        policy(checkpoint=str(tmp_path / "adapter"))


def test_other_kinds_of_adapter_are_refused(saved: Path, tmp_path: Path) -> None:
    moved(saved, save_lora="adapter").save(tmp_path)
    file = tmp_path / "adapter_config.json"
    raw = json.loads(file.read_text())
    for change, message in (({"use_dora": True}, "only plain LoRA.*use_dora"), ({"peft_type": "IA3"}, "this is IA3"),
                            ({"base_model_name_or_path": None}, "names no base")):  # fmt: skip
        file.write_text(json.dumps(raw | change))
        with pytest.raises(CheckpointError, match=message):
            policy(checkpoint=str(tmp_path))
    file.write_text(json.dumps(raw))
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="not a complete adapter: it has no adapter_model.safetensors"):
        policy(checkpoint=str(tmp_path))


def test_a_rank_stabilised_adapter_is_trained_on_with_its_own_scale(saved: Path, tmp_path: Path) -> None:
    """alpha / sqrt(rank) = 2, which rank 4 and alpha 8 give as well; alpha 4 would halve the update."""
    moved(saved, save_lora="adapter").save(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_rslora": True}))
    with pytest.raises(CheckpointError, match=r"set model.lora: {rank: 4, alpha: 8} to train it on"):
        policy(checkpoint=str(tmp_path), lora=LORA)
    trained_on = greedy(tmp_path, lora=LoRAConfig(rank=4, alpha=8.0))
    torch.testing.assert_close(trained_on, greedy(tmp_path), rtol=0, atol=1e-5)


@pytest.mark.parametrize("fields", [{"checkpoint": "x"}, {"preset": "fast", "lora": LORA}])
def test_adapter_needs_a_base(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="save_lora: adapter needs `lora`, and a `checkpoint`"):
        OpenVLAOFTConfig(save_lora="adapter", **fields)

"""Where checkpoints are, what their files hold, and what is said when they cannot be used."""

from __future__ import annotations

import json
import os
import pickle
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import frozen
from safetensors.torch import load_file

from fork_server import ForkServer
from vla_rl.core.errors import CheckpointError
from vla_rl.toolkit.models.checkpoints.files import (
    check_names,
    find_weights,
    read_file,
    read_json,
    read_pickled,
    read_sizes,
    read_tokenizer,
    resolve_checkpoint,
    save_tensors,
)
from vla_rl.toolkit.models.checkpoints.lerobot import read_statistics
from vla_rl.toolkit.models.prompts import train_tokenizer

WANTED = ("*.json",)
COMMIT = "0123456789abcdef0123456789abcdef01234567"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache of a machine without network; it holds one repository."""
    constants = pytest.importorskip("huggingface_hub.constants")
    hub = tmp_path / "hub"
    snapshot = hub / "models--acme--tiny" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return hub


# ------------------------------------------------------------------------------------------------------------- places


def test_importing_is_light(bare_fork_server: ForkServer) -> None:
    heavy = {"torch", "huggingface_hub", "safetensors", "transformers", "peft"}
    code = f"import sys, vla_rl.toolkit.models.checkpoints.files, vla_rl.toolkit.models.adapters; print(sorted({heavy} & set(sys.modules)))"
    done = bare_fork_server.run_python("-c", code, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_folders_and_what_ships_with_a_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own" / "table"
    own.mkdir(parents=True)
    assert resolve_checkpoint(str(own), WANTED) == own
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_checkpoint("~/own/table", WANTED) == own
    assert resolve_checkpoint("builtin:table", WANTED, tmp_path / "own") == own
    with pytest.raises(CheckpointError, match="no built-in checkpoint 'builtin:chair'; there are: builtin:table"):
        resolve_checkpoint("builtin:chair", WANTED, tmp_path / "own")
    for name in ("nowhere", "builtin:table", "a/b/c"):
        with pytest.raises(CheckpointError, match=f"'{name}' is not a folder"):
            resolve_checkpoint(name, WANTED)


def test_a_hub_name_is_taken_from_the_cache(cache: Path) -> None:
    folder = cache / "models--acme--tiny" / "snapshots" / COMMIT
    for name in ("acme/tiny", f"acme/tiny@{COMMIT}"):
        for download in (True, False):
            assert resolve_checkpoint(name, WANTED, download=download) == folder


@pytest.mark.parametrize("download", [True, False])
def test_a_hub_name_without_network_says_what_to_fetch_and_where_to_put_it(cache: Path, download: bool) -> None:
    with pytest.raises(CheckpointError) as caught:
        resolve_checkpoint("acme/nothing@v2", WANTED, download=download)
    for part in (
        "'acme/nothing@v2' is neither a folder",
        str(cache),
        "hf download acme/nothing --revision v2 --local-dir FOLDER, then set model.checkpoint: FOLDER",
        "models--acme--nothing of another machine's cache",
    ):
        assert part in str(caught.value)


def test_a_hub_name_where_the_hub_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match="'acme/tiny' is not a folder here; a hub name needs huggingface_hub"):
        resolve_checkpoint("acme/tiny", WANTED)


# -------------------------------------------------------------------------------------------------------------- files


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with pytest.raises(CheckpointError, match="not a complete checkpoint: it has no config.json$"):
        read_json(file)
    (tmp_path / "config.json.part").touch()
    with pytest.raises(CheckpointError, match=r"no config.json; unfinished downloads are there: config.json.part"):
        read_json(file)
    for text, message in (
        ("{", f"cannot read {file}: it is not JSON: .*it ends too early"),
        ("[]", f"{file} holds a list, a JSON object is expected"),
        ("", f"cannot read {file}: it is empty"),
        ('{"a": 1, "a": 2}', "has the key 'a' 2 times"),
        ("[" * 100_000, "nested too deeply"),
        (POINTER, f"{file} is a Git LFS pointer and not the file itself; run `git lfs pull`"),
    ):
        file.write_text(text)
        with pytest.raises(CheckpointError, match=message):
            read_json(file)
    file.write_text('{"a": 1}')
    assert read_json(file) == {"a": 1}
    with pytest.raises(CheckpointError, match=f"cannot read {file}: it has no 'b'"):
        read_file(file, lambda path: json.loads(path.read_text())["b"])


def test_weights_in_one_file_or_many(tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.numpy").save_file
    arrays = {name: np.full((i + 1, 2), i, np.float32) for i, name in enumerate("abc")}
    save_file({name: arrays[name] for name in "ab"}, tmp_path / "1.safetensors")
    save_file({"c": arrays["c"]}, tmp_path / "2.safetensors")
    index = {"weight_map": {"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    weights = find_weights(tmp_path, lambda names: {name: name.upper() for name in names if name != "b"})
    assert weights.shapes == {"A": (1, 2), "C": (3, 2)}
    got = {}
    weights.visit_tensors(lambda name, tensor: got.update({name: tensor.numpy()}))
    assert got.keys() == {"A", "C"} and all(np.array_equal(t, arrays[name.lower()]) for name, t in got.items())
    save_file(arrays, tmp_path / "model.safetensors")
    assert find_weights(tmp_path).shapes == {"a": (1, 2), "b": (2, 2), "c": (3, 2)}
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "2.safetensors").rename(tmp_path / "2.safetensors.incomplete")
    wanted = r"half-downloaded: 1 of 2 weight files are missing \(2.safetensors\); unfinished .*: 2.safetensors.inc"
    with pytest.raises(CheckpointError, match=wanted):
        find_weights(tmp_path)


def test_a_transposed_view_is_saved_as_it_is_or_refused(tmp_path: Path) -> None:
    """The NumPy writer of safetensors 0.8.0 stores its numbers in another order, without a word."""
    table = torch.arange(6.0).reshape(2, 3)
    with pytest.raises(ValueError, match="contiguous"):
        save_tensors({"table": table.T}, tmp_path / "view.safetensors")
    save_tensors({"table": table.T.contiguous()}, tmp_path / "copy.safetensors")
    assert torch.equal(load_file(tmp_path / "copy.safetensors")["table"], table.T)


def test_weights_that_cannot_be_read(tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.numpy").save_file
    file = tmp_path / "model.safetensors"
    with pytest.raises(CheckpointError, match=r"not a complete checkpoint: it has no model.safetensors$"):
        find_weights(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"\(pytorch_model.bin is not read; save it again as safetensors\)"):
        find_weights(tmp_path)
    save_file({"a": np.zeros(1000, np.float32)}, file)
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="cannot read .*model.safetensors.*cut off: fetch it again"):
        find_weights(tmp_path)
    file.write_text(POINTER)
    with pytest.raises(CheckpointError, match="model.safetensors is a Git LFS pointer"):
        find_weights(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    file.unlink()
    for content, message in (
        ({}, r"index\.json: 'weight_map' is missing"),
        ({"weight_map": ["a"]}, r"index\.json: 'weight_map' is a list, a JSON object is expected"),
        ({"weight_map": {"a": 1}}, r"index\.json: weight_map: 'a' is int 1, a text is expected"),
        ({"weight_map": {"a": "../a.safetensors"}}, r"names the file '\.\./a\.safetensors', which is not inside"),
        ({"weight_map": {"a": "/etc/a.safetensors"}}, r"names the file '/etc/a\.safetensors', which is not inside"),
    ):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=message):
            find_weights(tmp_path)


def test_the_command_for_weights_of_fsdps_processes_merges_them(tmp_path: Path, fork_server: ForkServer) -> None:
    """It is run as it stands in the message."""
    commands = pytest.importorskip("accelerate.commands.accelerate_cli")
    torch = pytest.importorskip("torch")
    from torch.distributed.checkpoint import FileSystemWriter, save

    folder = tmp_path / "my run"
    sharded = folder / "pytorch_model_fsdp_0"
    save({"model": {"a": torch.arange(6.0)}}, storage_writer=FileSystemWriter(sharded), no_dist=True)
    with pytest.raises(
        CheckpointError, match=r"in pytorch_model_fsdp_0 alone, as FSDP's .*, where accelerate is"
    ) as error:
        find_weights(folder)
    (command,) = [line.strip() for line in str(error.value).splitlines()[1:]]
    program, *arguments = shlex.split(command)
    assert program == "accelerate"
    code = f"import {commands.__name__} as cli; cli.main()"
    fork_server.run_python("-c", code, *arguments, timeout=120, check=True)
    assert find_weights(folder).shapes == {"a": (6,)}


class Program:
    """Runs when it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str, ...]]:
        return os.system, ("exit 0",)


def test_a_pickle_with_code_in_it_is_refused_without_advice_to_run_it(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    file = tmp_path / "part.pt"
    torch.save({"a": torch.ones(2), "n": [1, "x", None]}, file)
    assert read_pickled(file, ["a"])["n"] == [1, "x", None]
    with pytest.raises(CheckpointError, match=r"part\.pt is not a file of its kind: it has no optimizer, version"):
        read_pickled(file, ["a", "optimizer", "version"])
    for save in (
        lambda: torch.save({"a": Program()}, file),
        lambda: torch.save({"a": Program()}, file, _use_new_zipfile_serialization=False),
        lambda: file.write_bytes(pickle.dumps(Program(), 2)),
        lambda: file.write_bytes(pickle.dumps({"a": np.ones(2)}, 4)),
        lambda: torch.jit.script(torch.nn.Linear(1, 1)).save(str(file)),
    ):
        save()
        with pytest.raises(CheckpointError, match="it is a pickle that does not hold tensors alone") as caught:
            read_pickled(file)
        assert "weights_only" not in str(caught.value) and "with safetensors" in str(caught.value)
    torch.save({"a": Program()}, file)
    with pytest.raises(CheckpointError, match=r"but names (posix|nt)\.system"):
        read_pickled(file)
    torch.save([1], file)
    with pytest.raises(CheckpointError, match="holds a list, a dict is expected"):
        read_pickled(file)
    for content in (b"", b"hello world", file.read_bytes()[:200]):
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=f"cannot read {file}: "):
            read_pickled(file)


def test_names_and_shapes_that_do_not_fit_are_listed() -> None:
    own = {f"x{i}": (2,) for i in range(10)} | {"a": (3,), "same": (1, 2)}
    given = {"a": (4,), "b": (1,), "same": (1, 2)}
    check_names(own, dict(own), Path("here"))
    with pytest.raises(CheckpointError) as caught:
        check_names(own, given, Path("here"), "; start again")
    assert str(caught.value).splitlines() == [
        "here does not fit the model that is asked for; start again:",
        "  missing (10): x0, x1, x2, x3, x4, x5, x6, x7 and 2 more",
        "  unexpected (1): b",
        "  of another shape (1): a: (4,) instead of (3,)",
    ]


@frozen(kw_only=True)
class Sizes:
    depth: int = 2
    width: int = 8


def test_sizes_of_a_network_are_bounded(tmp_path: Path) -> None:
    file = tmp_path / "architecture.json"
    for content, message in (
        ({"depth": 10**9}, "'depth' is 1000000000, a whole number from 1 to 1,000 is expected"),
        ({"width": -1}, "'width' is -1, a whole number from 1 to 1,048,576 is expected"),
        ({"width": "8"}, "width: expected int"),
        ({"widht": 8}, "widht: unknown key; did you mean 'width'"),
    ):
        file.write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=message):
            read_sizes(file, Sizes)
    file.write_text('{"width": 16}')
    assert read_sizes(file, Sizes) == Sizes(width=16)


def test_lerobots_lists_are_checked_before_they_are_read(tmp_path: Path) -> None:
    step = {"registry_name": "normalizer_processor", "config": {}}
    for steps, raw, message in (
        ([3], {}, r"'steps\[0\]' is int 3, a JSON object is expected"),
        (7, {}, "'steps' is int 7, a list"),
        (
            [{**step, "state_file": "../other.safetensors"}],
            {},
            "names the file '../other.safetensors', which is not in",
        ),
        ([{**step, "state_file": "/etc/passwd"}], {}, "names the file '/etc/passwd', which is not inside"),
        ([{**step, "config": {"norm_map": [1]}}], {}, "'norm_map' is a list, a JSON object is expected"),
        ([step], {"output_features": 3}, "'output_features' is int 3, a JSON object is expected"),
    ):
        (tmp_path / "policy_preprocessor.json").write_text(json.dumps({"steps": steps}))
        with pytest.raises(CheckpointError, match=message):
            read_statistics(tmp_path, raw)


@pytest.mark.parametrize("used", [False, True])
def test_a_tokenizer_that_was_saved_after_use_cuts_and_pads_nothing(used: bool, tmp_path: Path) -> None:
    """transformers writes the truncation and padding of the last call into tokenizer.json."""
    from transformers import PreTrainedTokenizerFast

    long, short = "pick up the red cup and put it in the drawer", "pick up"
    made = train_tokenizer([long], lambda text: text, 300)
    saved = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>")
    expected = {text: saved(text)["input_ids"] for text in (long, short)}
    if used:
        saved(long, truncation=True, padding="max_length", max_length=8)
    saved.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    assert [content[part] is not None for part in ("truncation", "padding")] == [used, used]
    tokenizer = read_tokenizer(tmp_path / "tokenizer.json")
    assert {text: tokenizer.encode(text).ids for text in expected} == expected
    assert len(expected[long]) > 8 > len(expected[short])


def test_a_tokenizer_keeps_the_normaliser_of_its_file(tmp_path: Path) -> None:
    """transformers' LlamaTokenizer puts its own in place of it."""
    from tokenizers import normalizers

    made = train_tokenizer(["pick up the red cup"], lambda text: text, 300)
    made.normalizer = normalizers.Sequence([normalizers.Lowercase(), made.normalizer])
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = read_tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.encode("Pick UP the red cup").ids == made.encode("pick up the red cup").ids

"""wandb, mlflow and swanlab, each the real package where it is installed, without a network."""

from __future__ import annotations

import json
import re
import shutil
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from vla_rl.core.catalogue import build, load
from vla_rl.core.errors import PluginError
from vla_rl.core.installation import OWN_DIST
from vla_rl.core.requirements import install_command
from vla_rl.testing.events import METRICS, a_run, an_episode, an_evaluation
from vla_rl.toolkit.hooks.tracking import HELD

NAMES = ("wandb", "mlflow", "swanlab")
OFFLINE = {"wandb": {"mode": "offline"}, "mlflow": {}, "swanlab": {"mode": "offline"}}


def there(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name} is not installed: pip install -e '.[{name}]'")


@pytest.fixture(autouse=True)
def no_server(monkeypatch, tmp_path):
    for name in ("WANDB_MODE", "WANDB_API_KEY", "MLFLOW_TRACKING_URI", "SWANLAB_MODE", "SWANLAB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))


def train(name: str, folder: Path, first: int, last: int, finish: bool, **settings: Any) -> None:
    """Steps, an evaluation with a film, a checkpoint that is removed at once."""
    folder.mkdir(exist_ok=True)
    hook = build("hook", name, load("hook", name).config(artifacts="all", **OFFLINE[name] | settings))
    video = build("hook", "video", load("hook", "video").config(episodes=1))
    run = a_run(folder, first)
    hook.on_run_start(run)
    video.on_run_start(run)
    for step in range(first + 1, last + 1):
        hook.on_update_end(step, {**METRICS, "loss/policy": float(step), "policy/entropy": float("nan")})
    evaluation = an_evaluation(last, frames=(an_episode(success=True),))
    hook.on_eval_end(last, evaluation)
    video.on_eval_end(run, last, evaluation)
    saved = folder / "checkpoints" / f"step_{last:06d}"
    (saved / "model").mkdir(parents=True)
    (saved / "model" / "weights.bin").write_bytes(bytes(1000))
    hook.on_checkpoint(last, saved)
    shutil.rmtree(saved)
    if finish:
        hook.on_run_end()
    hook.on_close()


def killed_and_resumed(name: str, folder: Path) -> str:
    """-> the id of the run there."""
    train(name, folder, 0, 4, finish=False)
    sleep(1.1)  # their folders are named by whole seconds
    train(name, folder, 2, 5, finish=True)
    return str(json.loads((folder / "trackers.json").read_text())[name])


def test_wandb_takes_a_run_offline(tmp_path):
    there("wandb")
    run = killed_and_resumed("wandb", tmp_path / "run")
    folders = sorted((tmp_path / "run" / "wandb").glob(f"offline-run-*-{run}"))
    assert len(folders) == 2
    curve, artifacts, films = [], [], []
    for folder in folders:
        config = None
        for record in whole(folder / f"run-{run}.wandb"):
            kind = record.WhichOneof("record_type")
            if kind == "history":
                items = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
                if "loss/policy" in items:
                    curve.append((int(items["step"]), float(items["loss/policy"])))
                films += [key for key in items if key == "videos/ep0._type"]
            elif kind == "artifact":
                artifacts.append((record.artifact.name, sorted(record.artifact.aliases)))
            elif kind == "run" and config is None:
                config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
                assert record.run.run_id == run and record.run.project == "vla-rl"
        assert config is not None and config["env"] == {"type": "x"}
    assert curve == [(step, step) for step in (1, 2, 3, 4, 3, 4, 5)]
    assert len(films) == 2
    assert [aliases for _, aliases in artifacts] == [["latest", "step_000004"], ["latest", "step_000005"]]


def test_wandb_without_a_login_is_left_out(tmp_path, caplog):
    there("wandb")
    train("wandb", tmp_path / "run", 0, 2, finish=True, mode="online")
    assert "no user is logged in; try `wandb login`" in caplog.text and len(caplog.records) == 1


def whole(file: Path) -> list[Any]:
    """Their own process writes the file, and may still do so after the run has ended here."""
    until = monotonic() + 120
    while monotonic() < until:
        records = list(wandb_records(file))
        if records and records[-1].WhichOneof("record_type") == "exit":
            return records
        sleep(0.1)
    raise AssertionError(f"{file} has no end")


def wandb_records(file: Path) -> Iterator[Any]:
    """Yield the records of a log: blocks of 32 KiB with records of crc, length, type (full, first, middle, last),
    bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def test_mlflow_takes_a_run_into_a_database(tmp_path):
    there("mlflow")
    pytest.importorskip("sqlalchemy", reason="sqlalchemy is not installed: pip install -e '.[mlflow]'")
    from mlflow import MlflowClient

    run = killed_and_resumed("mlflow", tmp_path / "run")
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    found = client.get_run(run)
    assert found.info.status == "FINISHED" and found.info.run_name == "demo"
    assert found.data.params == {"seed": "0", "env.type": "x"}
    assert found.data.metrics["eval/success_rate"] == 0.75
    curve = [(metric.step, metric.value) for metric in client.get_metric_history(run, "loss/policy")]
    assert sorted(curve) == [(1, 1), (2, 2), (3, 3), (3, 3), (4, 4), (4, 4), (5, 5)]
    kept = tmp_path / "mlartifacts" / run / "artifacts"
    assert (kept / "spec.yaml").read_text() == "seed: 0\nenv:\n  type: x\n"
    assert {file.name for file in (kept / "videos").iterdir()} == {
        "step_000004_ep0_success.mp4",
        "step_000005_ep0_success.mp4",
    }
    assert (kept / "checkpoints" / "step_000005" / "model" / "weights.bin").stat().st_size == 1000


def test_swanlab_takes_a_run_offline(tmp_path):
    there("swanlab")
    run = killed_and_resumed("swanlab", tmp_path / "run")
    folders = sorted((tmp_path / "run" / "swanlog").glob(f"run-*-{run}"))
    assert len(folders) == 2
    for folder, step in zip(folders, (4, 5), strict=True):
        assert b"loss/policy" in (folder / f"run-{run}.swanlab").read_bytes()
        assert len(list((folder / "media").rglob("*.gif"))) == 1
        saved = folder / "files" / "checkpoints" / f"step_{step:06d}" / "model" / "weights.bin"
        assert saved.stat().st_size == 1000
        assert "type: x" in (folder / "files" / "config.yaml").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_what_is_missing_is_named_with_its_extra(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    store = f"vla_rl.plugins.hooks.trackers.{name}_store"
    monkeypatch.delitem(sys.modules, store, raising=False)
    plugin = load("hook", name)
    monkeypatch.setitem(vars(plugin), "build", f"{store}:make_tracker")  # not resolved yet
    with pytest.raises(PluginError, match=rf"needs '{name}'.*{re.escape(install_command(OWN_DIST, name))}"):
        build("hook", name, plugin.config())


@pytest.mark.parametrize("name", NAMES)
def test_the_folder_of_waiting_checkpoints_is_declared(name):
    plugin = load("hook", name)
    assert plugin.files(plugin.config()) == (f"{HELD}/{name}",)

"""`train.compile` and `rollout.compile`: what a worker compiles, what is refused, what a run reports."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted_runs import scripted_spec

from vla_rl.core.capabilities import Capturable, Compilable
from vla_rl.core.errors import UserError
from vla_rl.core.spec.spec import parse_spec
from vla_rl.plugins.engines.torch.engine import TorchEngine
from vla_rl.runtime.checks.no_effect import without_effect
from vla_rl.runtime.start import run
from vla_rl.runtime.workers import compilation
from vla_rl.runtime.workers.compilation import compilation_mode, compile_model
from vla_rl.toolkit.models.acting.compilation import CompiledBlocks

LEARN, ACT, BOTH = "learn", "act", "both"


def spec_of(train: str | None = None, rollout: str | None = None, sharding: str = "replicated") -> Any:
    raw = scripted_spec()
    raw["train"] = {**raw["train"], "compile": train, "sharding": sharding}
    raw["rollout"] = {**raw["rollout"], "compile": rollout}
    return parse_spec(raw)


@pytest.mark.parametrize(
    ("train", "rollout", "device", "role", "mode"),
    [
        (None, None, "cpu", BOTH, "off"),
        (None, None, "cuda:0", BOTH, None),
        ("blocks", None, "cpu", LEARN, "blocks"),
        ("blocks", None, "cpu", ACT, "off"),
        ("blocks", None, "cpu", BOTH, "blocks"),
        (None, "blocks", "cpu", BOTH, "blocks"),
        ("off", "blocks", "cpu", ACT, "blocks"),
        ("off", "blocks", "cpu", LEARN, "off"),
        ("blocks", "graphs", "cuda:0", BOTH, "graphs"),
        (None, "graphs", "cpu", LEARN, "off"),
        (None, "off", "cuda:0", ACT, "off"),
    ],
)
def test_mode_of_a_worker(train: str | None, rollout: str | None, device: str, role: Any, mode: str | None) -> None:
    assert compilation_mode(spec_of(train, rollout), device, role) == mode


@pytest.mark.parametrize(
    ("train", "rollout", "role", "sharding", "device", "words"),
    [
        ("off", "blocks", BOTH, "replicated", "cpu", "contradict each other"),
        ("blocks", "off", BOTH, "replicated", "cpu", "contradict each other"),
        (None, "graphs", ACT, "replicated", "cpu", "graphs needs CUDA, and the policy is on 'cpu'"),
        ("blocks", "graphs", BOTH, "full", "cuda:0", "gathers and frees them"),
    ],
)
def test_refused_settings(
    train: str | None, rollout: str | None, role: Any, sharding: str, device: str, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        compilation_mode(spec_of(train, rollout, sharding), device, role)


def test_a_sharded_model_is_compiled_where_the_spec_says_so() -> None:
    assert compilation_mode(spec_of(sharding="full"), "cuda:0", LEARN) == "off"
    assert compilation_mode(spec_of("blocks", sharding="full"), "cuda:0", LEARN) == "blocks"
    assert compilation_mode(spec_of("blocks", sharding="full"), "cpu", BOTH) == "blocks"


class Model:
    def __init__(self, blocks: Any = ()) -> None:
        self.module = torch.nn.Sequential(torch.nn.Linear(2, 2))
        self.blocks = blocks


class CompilableModel(Model, Compilable):
    """A model without a part that a graph could capture."""


class CapturableModel(Model, Capturable):
    def decide(self, inputs: Any) -> Any:
        return inputs


def test_a_model_without_layers_is_refused_where_it_is_asked_for() -> None:
    model: Any = Model()
    with pytest.raises(UserError, match="names no layers to compile"):
        compile_model(spec_of("blocks"), model, "cpu", LEARN)
    assert compile_model(spec_of(), model, "cuda:0", LEARN) is None


def test_graphs_need_a_captured_part_and_weights_that_stay() -> None:
    model: Any = CompilableModel((torch.nn.Linear,))
    with pytest.raises(UserError, match="no part that a CUDA graph could capture"):
        compile_model(spec_of(None, "graphs"), model, "cuda:0", ACT)
    model = CapturableModel((torch.nn.Linear,))
    with pytest.raises(UserError, match="offloads them"):
        compile_model(spec_of(None, "graphs"), model, "cuda:0", ACT, moves=True)


def test_a_policy_of_an_engine_is_not_compiled() -> None:
    raw = scripted_spec()
    raw["rollout"] = {**raw["rollout"], "compile": "blocks", "engine": {"type": "remote", "url": "ws://localhost:1"}}

    warnings = without_effect(parse_spec(raw), training=False, imitation=False)

    assert [path for path, _ in warnings] == [("rollout", "compile")]


def small_run(tmp_path: Path) -> tuple[Any, list[dict[str, Any]]]:
    spec: dict[str, Any] = {
        "name": "compiled",
        "seed": 0,
        "model": {"type": "openvla_oft", "preset": "fast"},
        "env": {"type": "tabletop", "num_envs": 2, "tasks": ["pick_red"], "max_steps": 8},
        "rollout": {"chunk": 4, "episodes": 2},
        "algorithm": {"type": "ppo"},
        "runtime": {"backend": "local"},
        "train": {"steps": 1, "lr": 1e-3, "micro_batch": 4, "compile": "blocks"},
        "eval": {"episodes_per_task": 1, "before": False},
        "hooks": [{"type": "jsonl"}],
    }
    results = run(parse_spec(spec), tmp_path / "run", False)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    return results, [line for line in lines if "policy/approx_kl" in line]


def test_a_run_reports_what_was_compiled(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(compilation, "CompiledBlocks", partial(CompiledBlocks, backend="aot_eager"))
    results, (step,) = small_run(tmp_path)

    assert step["compile/seconds"] > 0
    assert step["compile/recompilations"] >= 0
    assert abs(step["policy/approx_kl"]) < 1e-6
    assert not [note for note in results["notes"] if "eager" in note]


def test_a_run_continues_without_a_compiler_and_says_so(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(compilation, "CompiledBlocks", partial(CompiledBlocks, backend=broken))
    results, (step,) = small_run(tmp_path)

    (note,) = [note for note in results["notes"] if "eager" in note]
    assert "no C++ compiler" in note
    assert note in caplog.text
    assert step["compile/seconds"] == step["compile/recompilations"] == 0
    assert abs(step["policy/approx_kl"]) < 1e-6


def test_the_engine_acts_with_the_compiled_model() -> None:
    """The engine holds the model that was compiled, and no copy of it."""
    model: Any = CompilableModel((torch.nn.Linear,))
    model.statistics_name = None
    compiled = compile_model(spec_of("blocks"), model, "cpu", LEARN)
    assert compiled is not None
    assert compiled.blocks == [TorchEngine(model).model.module[0]]

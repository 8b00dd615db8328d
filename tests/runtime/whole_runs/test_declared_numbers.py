"""Numbers that a simulator and a model declare reach the loss with their own samples, however a run is arranged."""

from __future__ import annotations

from pathlib import Path

import attrs
import declared_numbers
import pytest
import torch
from scripted_runs import read_metrics, scripted_spec, weights_in

from vla_rl.core.contexts import EnvContext
from vla_rl.core.errors import PluginError, UserError
from vla_rl.core.spec.spec import parse_spec
from vla_rl.runtime.start import run

PLUGINS = [
    "vla_rl.testing.scripted",
    "vla_rl.testing.slot_placement",
    str(Path(declared_numbers.__file__).with_name("fragile.py")),
    declared_numbers.__file__,
]
RAY = {"backend": "ray"}
APART = {"type": "disaggregated", "share_devices": True}


def measured_spec(processes: bool = False, **changes):
    scene = {"type": "measured_processes", "num_envs": 4} if processes else {"type": "measured", "length_sigma": 0.4}
    base = {
        "plugins": PLUGINS,
        "env": {"num_envs": 8, **scene},
        "model": {"type": "doubting"},
        "algorithm": {"type": "checks_numbers"},
        "train": {"steps": 2},
    }
    for name, value in changes.items():
        base[name] = {**base.get(name, {}), **value} if isinstance(value, dict) else value
    return parse_spec(scripted_spec(**base))


@pytest.mark.parametrize(
    ("processes", "changes"),
    [
        pytest.param(False, {}, id="batched"),
        pytest.param(True, {}, id="processes"),
        pytest.param(
            False, {"asynchrony": {"streaming_update": True}, "train": {"global_batch": None}}, id="streaming"
        ),
        pytest.param(False, {"asynchrony": {"replay": {"uses": 2}}, "train": {"steps": 3}}, id="replay"),
        pytest.param(
            False, {"rollout": {"auto_reset": {"mode": "immediate", "steps": 8}, "episodes": None}}, id="auto_reset"
        ),
        pytest.param(
            True, {"asynchrony": {"max_lag": 1}, "runtime": RAY, "placement": APART}, id="asynchronous on Ray"
        ),
    ],
)
def test_numbers_reach_the_loss_with_their_samples(processes, changes, tmp_path):
    run(measured_spec(processes, **changes), tmp_path / "run", False)
    metrics = read_metrics(tmp_path / "run")
    assert [line["checked"] > 0 for line in metrics if "checked" in line] == [True] * changes.get("train", {}).get(
        "steps", 2
    )


def test_numbers_outlive_a_fault_and_are_there_where_episodes_are_recorded(tmp_path):
    fault = {"fault": "raise", "at_step": 38, "told": str(tmp_path / "told")}
    recorder = {"type": "lerobot", "rows": "steps", "folder": str(tmp_path / "data")}
    changes = {"env": {"num_envs": 2, **fault}, "hooks": [{"type": "jsonl"}, recorder]}
    results = run(measured_spec(True, **changes), tmp_path / "run", False)
    assert results["faults"] == 1
    assert (tmp_path / "data" / "meta" / "info.json").exists()


def test_a_resumed_run_that_reads_them_equals_a_whole_one(tmp_path):
    run(measured_spec(train={"steps": 4}), tmp_path / "whole", False)
    run(measured_spec(train={"steps": 2}), tmp_path / "cut", False)
    run(measured_spec(train={"steps": 4}), tmp_path / "cut", True)
    whole, cut = weights_in(tmp_path / "whole"), weights_in(tmp_path / "cut")
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


@pytest.mark.parametrize(
    ("processes", "changes", "message"),
    [
        (False, {"env": {"lacks": "sides"}}, r"env 'measured': sides is None, expected float32 \(8, 2, 2\)"),
        (
            False,
            {"env": {"undeclared": True}},
            r"chunk_step reports pushed, scene, sides in ChunkResult.extras; its info",
        ),
        (
            False,
            {"model": {"reports": False}},
            r"model 'doubting'.* declares the extra 'doubt' .* returned none in Chunk",
        ),
        (
            False,
            {"model": {"declares": "values"}},
            r"model 'doubting'.*: VLAModel.extras: 'values' cannot name a further",
        ),
        (False, {"model": {"declares": "pushed"}}, "the simulator and the model both declare pushed; rename one"),
        (
            False,
            {"algorithm": {"reads": "force"}},
            r"samples have no number 'force'; they have: pushed, sides, scene, doubt",
        ),
        (
            True,
            {"env": {"lacks": "sides"}},
            r"MeasuredProcess.step \(.*declared_numbers.py:\d+\) returned extras of the",
        ),
    ],
)
def test_numbers_that_are_not_as_declared_are_named(processes, changes, message, tmp_path):
    with pytest.raises((UserError, PluginError), match=message):
        run(measured_spec(processes, **changes), tmp_path / "run", False)


@pytest.mark.parametrize(
    ("extras", "message"),
    [
        ({"rewards": "C"}, "'rewards' cannot name a further number"),
        ({"lag": "C"}, "'lag' cannot name"),
        ({"force": "N C"}, "'force' has dimensions 'N C'; give numbers and letters of A, C"),
        ({"force": "3 C"}, "the chunk's actions C first"),
    ],
)
def test_declarations_of_a_simulator_are_checked(extras, message):
    info = declared_numbers.Measured(declared_numbers.MeasuredConfig(), EnvContext(num_envs=1, chunk=2, seed=0)).info
    with pytest.raises(ValueError, match=message):
        attrs.evolve(info, extras=extras)

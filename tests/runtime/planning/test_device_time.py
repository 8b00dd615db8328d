"""Estimated seconds of calls against those that H200s took."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from attrs import evolve

from reference_files import reference
from vla_rl.core.errors import UserError
from vla_rl.runtime.planning.device_time import call_seconds, optimizer_seconds
from vla_rl.runtime.planning.hardware import gpu_rates, read_hardware
from vla_rl.toolkit.models.operation_counter import Operation, OperationCounts

MEASURED = json.loads(reference("gpu_times.json").read_text())
"""Operators of the calls of full-size models, counted on the meta device, and the seconds of each call on the card:
docs/results.md and the first measurement of the same kind of card."""


def counts_of(call):
    operations = Counter({Operation(kind, flops, traffic): count for kind, flops, traffic, count in call["operations"]})
    return OperationCounts(operations=operations, module_calls=call["module_calls"])


def predicted(row, gpu):
    call = MEASURED["calls"][row["call"]]
    seconds = call_seconds(
        counts_of(call),
        gpu,
        row["compiled"],
        learns=call["learns"],
        selective=call["selective"],
        adapted_layers=call["adapted_layers"],
    ).total
    return seconds + (optimizer_seconds(call["trained_bytes"], gpu) if call["learns"] else 0.0)


def test_every_measured_call_is_met_within_a_quarter():
    gpu = gpu_rates("h200")
    errors = {
        f"{row['call']}, {row['compiled']}, {row['source']}": predicted(row, gpu) / row["seconds"] - 1
        for row in MEASURED["rows"]
    }
    assert len(errors) >= 78
    wrong = {name: f"{error:+.0%}" for name, error in errors.items() if abs(error) > 0.25}
    assert not wrong
    assert max(map(abs, errors.values())) < 0.18, "what docs/how-to/plan-a-run.md says"


def test_the_rows_are_all_of_the_measured_models_and_modes():
    names = {row["call"].split()[0] for row in MEASURED["rows"]}
    oft = {"", "_merged", "_sel", "_full", "_alltrained", "_kept", "_fp8", "_fp8_kept", "_nf4"}
    flow = {"pi0", "pi0_kept", "pi05", "pi05_k10", "pi05_fp8_k10"}
    assert names == {f"oft{kind}" for kind in oft} | flow | {"openvla"}
    assert {row["compiled"] for row in MEASURED["rows"]} == {"off", "blocks", "graphs"}


def test_a_slower_card_takes_longer_and_a_graph_launches_nothing():
    call = counts_of(MEASURED["calls"]["oft act 32"])
    seconds = {name: call_seconds(call, gpu_rates(name)) for name in ("h200", "h100", "a100", "4090")}
    assert [s.device for s in seconds.values()] == sorted(s.device for s in seconds.values())
    assert call_seconds(call, gpu_rates("h200"), "graphs").host == 0.0
    eager, blocks = (call_seconds(call, gpu_rates("h200"), mode) for mode in ("off", "blocks"))
    assert blocks.host < eager.host and blocks.device < eager.device


def test_published_rates_are_reckoned_at_what_the_measured_card_reached():
    published = evolve(gpu_rates("h200"), tflops=989.0, terabytes_per_s=4.8, measured=False)
    assert published.product_flops_per_s == pytest.approx(gpu_rates("h200").product_flops_per_s)
    assert published.traffic_bytes_per_s == pytest.approx(gpu_rates("h200").traffic_bytes_per_s)


def test_every_rate_has_a_source():
    data = read_hardware()
    assert {"h100", "h200", "a100", "4090"} <= data.gpus.keys()
    assert all(rates.source for rates in data.gpus.values())
    parts = [part for rates in data.simulators.values() for part in (rates.cpu, rates.gpu) if part is not None]
    assert parts and all(part.source for part in parts)


def test_rates_of_another_card_come_from_a_file(tmp_path):
    file = tmp_path / "card.yaml"
    file.write_text("tflops: 100\nterabytes_per_s: 1.0\ngib: 48\nlink_gb_per_s: 20\nmeasured: true\n")
    assert gpu_rates(str(file)).product_flops_per_s == 100e12
    file.write_text("tflops: 100\n")
    with pytest.raises(UserError, match="gib: required, but missing"):
        gpu_rates(str(file))
    with pytest.raises(UserError, match=r"no rates of a GPU 'h1000' are known; did you mean 'h100'"):
        gpu_rates("h1000")
    with pytest.raises(UserError, match="cannot be read"):
        gpu_rates(str(tmp_path / "none.yaml"))

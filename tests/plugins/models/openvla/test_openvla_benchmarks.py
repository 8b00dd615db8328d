"""The benchmarks of these models run, and the baseline of the learner step computes what ours does."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

FOLDER = Path(__file__).parents[4] / "benchmarks"


@pytest.fixture
def learner(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    import learner

    return learner


def test_both_sides_of_the_learner_step_compute_the_same(learner: ModuleType) -> None:
    ours, plain = learner.Learner("tiny", 2), learner.PlainLearner("tiny", 2)
    learner.check_equal(ours, plain)
    for side in (ours, plain):
        before = side.policy.module.vla.projector.fc1.weight.detach().clone()
        side.step()
        assert not torch.equal(side.policy.module.vla.projector.fc1.weight, before)
    with torch.no_grad():
        plain.policy.module.vla.get_output_embeddings().weight[600, 0] += 1
    with pytest.raises(AssertionError, match="log_probs differ"):
        learner.check_equal(ours, plain)


@pytest.mark.parametrize("name", ["pi05", "smolvla"])
def test_both_sides_of_the_learner_step_of_a_model_that_denoises(learner: ModuleType, name: str) -> None:
    ours, plain = (kind(name, 2) for kind in learner.sides_of(name).values())
    learner.check_equal(ours, plain)
    before = plain.probe.detach().clone()
    plain.step()
    assert not torch.equal(plain.probe, before)


def test_code_of_the_gpu_benchmark_runs_on_a_cpu(
    learner: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import gpu_openvla

    file = tmp_path / "figures.json"
    options = ["--size", "tiny", "--rank", "4", "--repeats", "1", "--recompute", "selective", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["gpu_openvla.py", *options])
    gpu_openvla.main()
    printed = capsys.readouterr().out
    for name in ("ceiling_tflops", "train_samples_per_s", "oft_decisions_per_s_64", "autoregressive_decisions_per_s_8"):
        assert name in printed and name in file.read_text()


def test_gpu_benchmark_says_what_it_lacks(learner: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_openvla

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "needs a CUDA device with 40 GiB free" in gpu_openvla.refuse("full")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Small")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (24 * 2**30, 24 * 2**30))
    assert "needs 40 GiB free on the device, Small has 24.0" in gpu_openvla.refuse("full")
    assert gpu_openvla.refuse("tiny") is None

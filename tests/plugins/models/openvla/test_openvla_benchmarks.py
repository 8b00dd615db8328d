"""The benchmarks of these models run, and the baseline of the learner step computes what ours does."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fork_server import ForkServer

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


@pytest.fixture
def run_gpu(fork_server: ForkServer) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return fork_server.run_python(FOLDER / "gpu.py", *arguments, env=os.environ | environment)

    return run


MODES = ("eager", "merged adapters", "merged, compiled blocks", "merged, CUDA graphs")
FIGURES = {
    ("card", "simulator", "control"): [
        "card: bfloat16 product of matrices",
        "card: copy, read and write",
        "card: from the host, pageable",
        "simulator: tabletop, 8 envs of 32 px",
        "control: runtime, 8 envs, beyond the simulator",
        "control: simulator, 8 envs",
    ],
    ("oft_act", "pi0"): [
        *(f"oft_act: decision, {mode}, batch {rows}" for mode in MODES for rows in (1, 2)),
        *(f"pi0: decision of 10 denoising steps, bf16, CUDA graphs, batch {n}" for n in (1, 2)),
        *(f"pi0: decision, {mode}, batch {n}" for mode in ("eager", "compiled blocks", "CUDA graphs") for n in (1, 2)),
        "pi0: learner step, compiled blocks, micro-batch 2",
        "pi0: learner step, prefix kept, compiled blocks, micro-batch 2",
    ],
}
"""Stages -> names of the figures that they measure, in order."""


@pytest.mark.parametrize("stages", FIGURES, ids=" ".join)
def test_code_of_the_gpu_benchmark_runs_on_a_cpu(stages: tuple[str, ...], tmp_path: Path, run_gpu) -> None:
    file = tmp_path / "figures.json"
    done = run_gpu("--tiny", "--only", *stages, "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(file.read_text())
    assert [figure["name"] for figure in figures] == FIGURES[stages]
    assert all(figure["value"] > 0 for figure in figures)
    units = {figure["unit"] for figure in figures if figure["name"].startswith(("oft_act", "simulator"))}
    assert units == {"chunks/s" if "oft_act" in stages else "env steps/s"}
    assert "CPU; PyTorch" in done.stdout and FIGURES[stages][-1].split(": ", 1)[1] in done.stdout


def test_gpu_benchmark_needs_cuda(tmp_path: Path, run_gpu) -> None:
    file = tmp_path / "figures.json"
    done = run_gpu("--only", "card", "--json", str(file), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert "PyTorch sees no CUDA device; --tiny runs the same code on the CPU" in done.stderr
    assert not file.exists()


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    import operators

    return operators


@pytest.mark.parametrize("case", ["oft_step", "pi0_decision"])
def test_eager_code_launches_no_more_operators_than_before(operators: ModuleType, case: str) -> None:
    assert 0.5 * operators.BEFORE[case] < operators.eager(case).total() <= operators.BEFORE[case]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["oft_step", "oft_merged", "pi0_decision", "ar_action"])
def test_compiled_code_launches_few_operators(operators: ModuleType, case: str) -> None:
    counts = operators.compiled(case)
    assert counts.total() - counts["nests"] <= operators.BARS[case] * operators.BEFORE[case]

"""A device without memory, as torch reports it: the run ends with an error that names keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from scripted_runs import scripted_spec

from vla_rl.core.errors import UserError
from vla_rl.core.spec.spec import parse_spec
from vla_rl.runtime.start import run
from vla_rl.runtime.workers.role_calls import full_device, is_full_device
from vla_rl.testing.linear import LinearModel
from vla_rl.testing.scripted import ScriptedEnv

NO_CONTEXT = "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call"


def test_both_errors_of_torch_are_recognised() -> None:
    assert is_full_device(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert is_full_device(RuntimeError(NO_CONTEXT))
    assert not is_full_device(RuntimeError("CUDA error: device-side assert triggered"))
    assert not is_full_device(MemoryError("out of memory"))


def no_scores(self: Any, obs: Any, chunk: Any) -> Any:
    raise RuntimeError(NO_CONTEXT)


def no_chunk(self: Any, obs: Any, noise: Any, greedy: Any) -> Any:
    raise RuntimeError(NO_CONTEXT)


def no_step(self: Any, actions: Any, active: Any, stop_at_end: Any) -> Any:
    raise RuntimeError(NO_CONTEXT)


@pytest.mark.parametrize(
    ("owner", "method", "failing", "message"),
    [
        (
            LinearModel,
            "chunk_log_probs",
            no_scores,
            r"(?s)worker 0 .* found its GPU full: .*\n  lower train.micro_batch",
        ),
        (LinearModel, "sample_chunk", no_chunk, r"(?s)found its GPU full: CUDA error.*vla-rl check"),
        (ScriptedEnv, "chunk_step", no_step, r"(?s)found its GPU full: CUDA error: out of memory\n  .*vla-rl check"),
    ],
)
def test_a_run_says_who_found_the_device_full(
    owner: Any, method: str, failing: Any, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(owner, method, failing)
    with pytest.raises(UserError, match=message):
        run(parse_spec(scripted_spec()), tmp_path / "run", resume=False)


def test_an_unknown_role_gets_all_advice() -> None:
    text = str(full_device(torch.OutOfMemoryError("CUDA out of memory."), "worker 1", "worker"))
    assert "train.micro_batch" in text and "env.num_envs" in text and "placement.offload" in text

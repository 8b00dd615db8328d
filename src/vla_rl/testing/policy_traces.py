"""Checks of `check_model` for side effects: no call of a policy changes weights or global generators."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import attrs
import torch
from torch import nn

from vla_rl.core.capabilities import HasCritic, HasReference
from vla_rl.core.contexts import Context
from vla_rl.testing.common.comparison import copy_weights, differing_weights
from vla_rl.testing.common.findings import Findings
from vla_rl.testing.common.generators import SEEDED, Ran, expect_untouched, run_from, seeded_generators
from vla_rl.testing.model_case import ModelCase

K = TypeVar("K", bound=Context)


def check_traces(case: ModelCase) -> None:
    """Findings on every method that computes, each called once."""
    chunk = case.draw_chunks()
    calls: dict[str, Callable[[], Any]] = {
        "sample_chunk": case.draw_chunks,
        "sample_chunk (greedy)": lambda: case.draw_chunks(greedy=True),
        "chunk_log_probs": lambda: case.model.chunk_log_probs(case.obs, chunk),
        "imitation_loss": lambda: case.model.imitation_loss(case.obs, chunk.actions),
    }
    model = case.model
    if isinstance(model, HasCritic) and model.critic is not None:
        calls["values"] = partial(model.values, case.obs)
    if isinstance(model, HasReference):
        calls["reference_log_probs"] = partial(model.reference_log_probs, case.obs, chunk)
    remedy = "only an optimiser may change them: policies in other processes would not know"
    for name, call in calls.items():
        flags = [p.requires_grad for p in model.module.parameters()]
        switches = (torch.is_grad_enabled(), torch.get_default_dtype())
        ran = check_call(case.f, model.module, name, call, remedy)
        same = flags == [p.requires_grad for p in model.module.parameters()]
        case.f.expect(same, name, "`requires_grad` that stays as it is", "a change", "put it back")
        same = switches == (torch.is_grad_enabled(), torch.get_default_dtype())
        expected, got = "torch's default dtype and grad mode left alone", "a change"
        case.f.expect(same, name, expected, got, "use the context managers")
        # dropout draws from torch's generator: that is not a mistake
        training = name == "imitation_loss"
        moved = seeded_generators(ran, run_from(12, call)) if training else ran.changed_generators
        expect_untouched(case.f, name, moved)


def check_call(f: Findings, module: nn.Module | None, where: str, call: Callable[[], Any], remedy: str) -> Ran:
    """Call, and record a finding where that changes weights or buffers."""
    weights = copy_weights(module)
    ran = run_from(11, call)
    changed = differing_weights(weights, copy_weights(module))
    got, expected = f"a change of {', '.join(changed[:4])}", "weights and buffers that stay as they are"
    f.expect(not changed, where, expected, got, remedy)
    return ran


def check_building(f: Findings, first: Ran, second: Ran) -> None:
    """Findings on a component with a `module` that was built twice by one seed, with other settings perhaps."""
    expect_untouched(f, "build", seeded_generators(first, second), "a seed that stays set in {}")
    differ = differing_weights(*(copy_weights(ran.result.module) for ran in (first, second)))
    expected = "the same weights in every process, whatever the global generators did before"
    f.expect(not differ, "build", expected, f"others in {', '.join(differ[:4])}", SEEDED)


def other_seed(context: K) -> K:
    """The context of another run: what `save` leaves out does not come back by the same seed."""
    return attrs.evolve(context, seed=context.seed + 1)

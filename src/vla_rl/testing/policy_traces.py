"""Checks of `check_model` for side effects: no call of a policy changes weights or global generators."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import attrs
import torch

from vla_rl.core.capabilities import HasCritic, HasReference
from vla_rl.core.contexts import Context
from vla_rl.testing.common.comparison import copy_weights, differing_weights
from vla_rl.testing.common.generators import OWN, SEEDED, Ran, changed_generators, run_from, seeded_generators
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
    for name, call in calls.items():
        _check_trace(case, name, call)


def _check_trace(case: ModelCase, where: str, call: Callable[[], Any]) -> None:
    module, f = case.model.module, case.f
    weights = copy_weights(module)
    flags = [p.requires_grad for p in module.parameters()]
    switches = (torch.is_grad_enabled(), torch.get_default_dtype())
    ran = run_from(11, call)
    changed = differing_weights(weights, module.state_dict())
    remedy = "only an optimiser may change them: policies in other processes would not know"
    got, expected = f"a change of {', '.join(changed[:4])}", "weights and buffers that stay as they are"
    f.expect(not changed, where, expected, got, remedy)
    same = flags == [p.requires_grad for p in module.parameters()]
    f.expect(same, where, "`requires_grad` that stays as it is", "a change", "put it back")
    same = switches == (torch.is_grad_enabled(), torch.get_default_dtype())
    f.expect(same, where, "torch's default dtype and grad mode left alone", "a change", "use the context managers")
    if where == "imitation_loss":  # dropout draws from torch's generator: that is not a mistake
        moved = seeded_generators(ran, run_from(12, call))
    else:
        moved = changed_generators(ran.start, ran.end)
    expected = "the global random generators left alone"
    f.expect(not moved, where, expected, f"a change of {' and '.join(moved)}'s", OWN)


def check_building(case: ModelCase, first: Ran, second: Ran) -> None:
    """Findings on a model that was built twice by one seed; `second` may have another temperature."""
    moved = seeded_generators(first, second)
    expected = "the global random generators left alone"
    case.f.expect(not moved, "build", expected, f"a seed that stays set in {' and '.join(moved)}", OWN)
    one, other = (ran.result.module.state_dict() for ran in (first, second))
    differ = differing_weights(one, other)
    expected = "the same weights in every process, whatever the global generators did before"
    case.f.expect(not differ, "build", expected, f"others in {', '.join(differ[:4])}", SEEDED)


def other_seed(context: K) -> K:
    """The context of another run: what `save` leaves out does not come back by the same seed."""
    return attrs.evolve(context, seed=context.seed + 1)

"""Checks of `check_model` and `check_engine` that need actions alone."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from vla_rl.core.capabilities import ContinuesChunks
from vla_rl.core.types import UnexecutedActions, to_numpy
from vla_rl.testing.common.generators import expect_untouched, run_from
from vla_rl.testing.model_case import ActingCase


def check_acting(case: ActingCase) -> None:
    """Record findings on the actions of an engine: types, shapes, bounds, repeatability, and rows that know nothing of
    each other. It may ignore `noise`."""
    for where, greedy in (("act", False), ("act (greedy)", True)):
        ran = run_from(11, partial(case.draw_chunks, greedy))
        chunk = ran.result
        if not case.is_array(chunk.actions, (case.row_count, case.chunk, case.env.action_dim), f"{where}: actions"):
            return
        case.within_bounds(chunk.actions, where)
        expect_untouched(case.f, where, ran.changed_generators)
        what, remedy = "the same chunk from the same noise", "draw from `noise` only"
        case.expect_near(case.draw_chunks(greedy).actions, chunk.actions, where, what, remedy)
        order = list(range(case.row_count))[::-1]
        turned = case.choose_chunks(case.obs.take(np.array(order)), case.make_noise(order), greedy)
        what, remedy = "a row's chunk wherever it stands in the batch", "use no statistics of the batch"
        case.expect_near(to_numpy(turned.actions)[order], chunk.actions, where, what, remedy)


def check_continuing(case: ActingCase, component: object) -> None:
    """Record findings on the `continue_chunk` of a model or an engine that has it."""
    if not isinstance(component, ContinuesChunks):
        return
    where, shape = "continue_chunk", (case.row_count, case.chunk, case.env.action_dim)
    with case.f.section(where):
        actions = to_numpy(case.draw_chunks().actions)
        # a rest of another length, and another delay, for each row
        starts = [row % case.chunk for row in range(case.row_count)]
        previous = [
            UnexecutedActions(actions=actions[row, start:].copy(), delay=row % (case.chunk - start + 1))
            for row, start in enumerate(starts)
        ]
        for greedy in (False, True):
            continued = component.continue_chunk(case.obs, case.make_noise(), greedy, previous)
            if not case.is_array(continued, shape, where):
                return
            case.within_bounds(continued, where)
            graph = isinstance(continued, torch.Tensor) and continued.requires_grad
            case.f.expect(not graph, where, "no gradient", "a graph", "decorate it with torch.no_grad()")
            again = component.continue_chunk(case.obs, case.make_noise(), greedy, previous)
            case.expect_near(again, continued, where, "the same actions from the same noise", "draw from `noise` only")
        order = list(range(case.row_count))[::-1]
        turned = component.continue_chunk(
            case.obs.take(np.array(order)), case.make_noise(order), True, [previous[row] for row in order]
        )
        what, remedy = "a row's actions wherever it stands in the batch", "use each row's own previous actions"
        case.expect_near(to_numpy(turned)[order], continued, where, what, remedy, KERNELS)


KERNELS = 10.0
"""Times `atol`: batches in another order may run other kernels."""

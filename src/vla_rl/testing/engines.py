"""`check_engine`: does an engine keep to the contract of `PolicyEngine`?"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import attrs
import torch

from vla_rl.core.capabilities import HasCritic
from vla_rl.core.contexts import EngineContext
from vla_rl.core.declarations import EnginePlugin
from vla_rl.core.hookspecs import PolicyEngine, VLAModel
from vla_rl.core.manager import wrap
from vla_rl.core.types import Chunk, EnvInfo
from vla_rl.testing import synthetic
from vla_rl.testing.common.comparison import same_data
from vla_rl.testing.common.findings import CheckFailed, Findings, build_component
from vla_rl.testing.model_case import KERNELS, EngineCase, check_acting, check_continuing, check_unchanged
from vla_rl.testing.policy_traces import check_call

WARM_UP = "run batches alone there, without a gradient and without an optimiser"


def check_engine(
    engine: PolicyEngine | EnginePlugin,
    config: Any = None,
    *,
    model: VLAModel | None = None,
    model_config: Any = None,
    env: EnvInfo | None = None,
    chunk: int = 2,
    rows: int = 4,
    device: str = "cpu",
    atol: float = 1e-5,
) -> None:
    """Act, continue chunks, sleep, wake up and load weights, and compare the engine with the model that it acts for.
    Raises CheckFailed with all findings.

    Args:
        engine: a component, or an `EnginePlugin` that is built with `config` for `env`, `chunk`, `device` and `model`.
        model: model whose weights the engine acts with; None for an engine with its own policy.
        model_config: settings of the model, as `EngineContext.model_config`.
        rows: batch size of the checks.   atol: tolerance of log-probs and actions; raise it below fp32.
    The weights of `model` are the same afterwards.
    """
    env = synthetic.env_info() if env is None else env
    seated = None if model is None else wrap("model", model, type(model).__name__)
    make_model = None if seated is None else lambda: seated
    context = EngineContext(env=env, chunk=chunk, device=device, model_config=model_config, make_model=make_model)
    if isinstance(engine, EnginePlugin) and engine.own_policy == (model is not None):
        advice = "give no model" if engine.own_policy else "give the model that it acts for"
        raise CheckFailed("check_engine", (f"own_policy is {engine.own_policy}; {advice}",))
    component, name = build_component("engine", engine, config, context)
    f = Findings(f"check_engine of {name}")
    obs = synthetic.observation(env, rows)
    case = EngineCase(engine=component, f=f, env=env, chunk=chunk, obs=obs, atol=atol)
    with f.section("warm_up"):
        _check_warm_up(case, seated)
    with f.section("act"):
        check_acting(case)
    check_continuing(case, component)
    with f.section("sleep and wake_up"):
        _check_sleep(case)
    if seated is not None:
        with f.section("log_probs"):
            _check_against_model(case, seated, "act")
        with f.section("load"):
            _check_loading(case, seated)
    with f.section("observation"):
        check_unchanged(f, obs, synthetic.observation(env, rows))
    with f.section("close"):
        component.close()
        component.close()
    f.close()


def _check_warm_up(case: EngineCase, model: VLAModel | None) -> None:
    """Check that an engine acts as before after it warmed up, with the weights that the model had."""
    sizes = [1, case.row_count]
    module = None if model is None else model.module
    check_call(case.f, module, "warm_up", partial(case.engine.warm_up, sizes), WARM_UP)
    before = case.draw_chunks(greedy=True).actions
    case.engine.warm_up(sizes)
    after = case.draw_chunks(greedy=True).actions
    case.expect_near(after, before, "warm_up", "the same chunk after a further call", WARM_UP, KERNELS)


def _check_sleep(case: EngineCase) -> None:
    """Check that an engine acts after it slept as before."""
    case.engine.wake_up()
    before = case.draw_chunks(greedy=True).actions
    for _ in range(2):
        case.engine.sleep()
        case.engine.wake_up()
        after, remedy = case.draw_chunks(greedy=True).actions, "bring back what `sleep` gave away"
        case.expect_near(after, before, "wake_up", "the same chunk as before `sleep`", remedy)


def _check_against_model(case: EngineCase, model: VLAModel, where: str) -> bool:
    """Compare what the engine does for several observations with the model that it acts for. Return whether it does
    the same; the first finding ends the comparison."""
    strangers = synthetic.observation(case.env, case.row_count, seed=1)
    others = attrs.evolve(strangers, instructions=case.obs.instructions)
    checks = (_check_log_probs, _check_greedy, _check_values)
    return all(check(attrs.evolve(case, obs=obs), model, where) for obs in (case.obs, others) for check in checks)


def _check_log_probs(case: EngineCase, model: VLAModel, where: str) -> bool:
    """Compare log-probs of chunks, sampled and greedy, with those that the model recomputes."""
    what, remedy = "log_probs equal to those of the model's chunk_log_probs", "sample from the model's distribution"
    for greedy in (False, True):
        chunk = case.draw_chunks(greedy)
        given = chunk.log_probs is not None
        if not case.f.expect(given, where, "log_probs", "None", "return those that were sampled"):
            return False
        if not case.expect_near(chunk.log_probs, _score_chunk(model, case, chunk), where, what, remedy):
            return False
    return True


def _check_greedy(case: EngineCase, model: VLAModel, where: str) -> bool:
    """Compare how likely greedy chunks are with the model's, and sampled ones with greedy ones."""
    sampled, greedy = case.draw_chunks(), case.draw_chunks(greedy=True)
    of_model = [model.sample_chunk(case.obs, case.make_noise(), flag) for flag in (False, True)]
    likelihood = _score_chunk(model, case, greedy).sum((1, 2))
    what, remedy = "greedy chunks as likely as the model's", "take the mode where `greedy` is True"
    best = _score_chunk(model, case, of_model[1]).sum((1, 2))
    if not case.expect_near(likelihood, best, where, what, remedy, KERNELS):
        return False
    random = not same_data(of_model[0].actions, of_model[1].actions)
    holds = not random or not same_data(sampled.actions, greedy.actions)
    return case.f.expect(holds, where, "sampled actions that differ from greedy ones", "the same", "draw from `noise`")


def _check_values(case: EngineCase, model: VLAModel, where: str) -> bool:
    """Compare values, also those of chunks, where the model has some."""
    if not isinstance(model, HasCritic) or model.critic is None:
        return True
    expected = model.values(case.obs)
    what, remedy = "the model's values of these observations", "compute them with the newest weights"
    if not case.expect_near(case.engine.values(case.obs), expected, f"values ({where})", what, remedy, KERNELS):
        return False
    values, where = case.draw_chunks().values, f"{where}: values"
    if not case.f.expect(values is not None, where, "an array, as the model has a critic", "None", remedy):
        return False
    return case.is_array(values, tuple(expected.shape), where) and case.expect_near(
        values, expected, where, what, remedy, KERNELS
    )


def _check_loading(case: EngineCase, model: VLAModel) -> None:
    """Load other weights, sleep and wake up, and put the first ones back."""
    first = [(name, tensor.detach().clone()) for name, tensor in model.weights()]
    draws = torch.Generator().manual_seed(0)
    moved = [(name, t + (0.05 * torch.randn(t.shape, generator=draws)).to(t)) for name, t in first]
    before = case.draw_chunks().log_probs
    try:
        model.load_weights(moved)
        _load_weights(case, moved)
        after = case.draw_chunks().log_probs
        differs = before is None or after is None or not same_data(before, after)
        case.f.expect(differs, "load", "other log_probs with other weights", "the same", "act with the loaded weights")
        if _check_against_model(case, model, "load"):
            case.engine.sleep()
            case.engine.wake_up()
            _check_against_model(case, model, "wake_up after load")
    finally:
        model.load_weights(first)
        _load_weights(case, first)


def _load_weights(case: EngineCase, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Load weights as a run does: pairs come once, and their tensors are gone after the call."""
    passed = [(name, tensor.clone()) for name, tensor in weights]
    case.engine.load(pair for pair in passed)
    for _, tensor in passed:
        tensor.zero_()


def _score_chunk(model: VLAModel, case: EngineCase, chunk: Chunk) -> torch.Tensor:
    with torch.no_grad():
        return model.chunk_log_probs(case.obs, chunk).log_probs

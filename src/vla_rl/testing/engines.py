"""`check_engine`: does an engine keep to the contract of `PolicyEngine`?"""

from __future__ import annotations

from typing import Any

import torch

from vla_rl.core.hookspecs import PolicyEngine, VLAModel
from vla_rl.core.manager import wrap
from vla_rl.core.types import Context, EnvInfo, Plugin
from vla_rl.testing import synthetic
from vla_rl.testing.acting import check_acting, check_continuing
from vla_rl.testing.common.findings import CheckFailed, Findings, built
from vla_rl.testing.model_case import EngineCase


def check_engine(
    engine: PolicyEngine | Plugin,
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
    """Act, continue chunks and load weights, and compare the engine with the model that it acts for. Raises CheckFailed
    with all findings.

    Args:
        engine: a component, or a `Plugin` that is built with `config` for `env`, `chunk`, `device` and `model`.
        model: model whose weights the engine acts with; None for an engine with a policy of its own.
        model_config: settings of the model, as `Context.model_config`.
        rows: batch size of the checks.   atol: tolerance of log-probs and actions; raise it below fp32.
    The weights of `model` are the same afterwards.
    """
    env = synthetic.env_info() if env is None else env
    seated = None if model is None else wrap("model", model, type(model).__name__)
    make_model = None if seated is None else lambda: seated
    context = Context(env=env, chunk=chunk, device=device, model_config=model_config, make_model=make_model)
    if isinstance(engine, Plugin) and engine.own_policy == (model is not None):
        advice = "give no model" if engine.own_policy else "give the model that it acts for"
        raise CheckFailed("check_engine", (f"own_policy is {engine.own_policy}; {advice}",))
    component, name = built("engine", engine, config, context)
    f = Findings(f"check_engine of {name}")
    obs = synthetic.observation(env, rows)
    case = EngineCase(engine=component, f=f, env=env, chunk=chunk, obs=obs, atol=atol)
    with f.section("warm_up"):
        component.warm_up([1, rows])
    with f.section("act"):
        check_acting(case)
    check_continuing(case, component.continue_chunk if component.continues else None)
    if seated is not None:
        with f.section("log_probs"):
            _scores(case, seated, "act")
        with f.section("load"):
            _loading(case, seated)
    with f.section("close"):
        component.close()
        component.close()
    f.close()


def _scores(case: EngineCase, model: VLAModel, where: str) -> None:
    """Compare log-probs of sampled chunks with those that the model recomputes."""
    chunk = case.sample()
    if not case.f.expect(chunk.log_probs is not None, where, "log_probs", "None", "return those that were sampled"):
        return
    with torch.no_grad():
        scores = model.chunk_log_probs(case.obs, chunk)
    what = "log_probs equal to those of the model's chunk_log_probs"
    case.near(chunk.log_probs, scores.log_probs, where, what, "sample from the model's distribution")


def _loading(case: EngineCase, model: VLAModel) -> None:
    """Load other weights, and put the first ones back."""
    first = [(name, tensor.detach().clone()) for name, tensor in model.weights()]
    draws = torch.Generator().manual_seed(0)
    moved = [(name, t + (0.05 * torch.randn(t.shape, generator=draws)).to(t)) for name, t in first]
    before = case.sample().log_probs
    try:
        model.load_weights(moved)
        case.engine.load(moved)
        after = case.sample().log_probs
        differs = before is None or after is None or not torch.equal(torch.as_tensor(before), torch.as_tensor(after))
        case.f.expect(differs, "load", "other log_probs with other weights", "the same", "act with the loaded weights")
        _scores(case, model, "load")
    finally:
        model.load_weights(first)
        case.engine.load(first)

"""The algorithm of a spec, and what it wants of a critic."""

from __future__ import annotations

from vla_rl.core.catalogue import build, hook_modules
from vla_rl.core.hookspecs import Algorithm
from vla_rl.core.manager import wrap
from vla_rl.core.metric_names import guard
from vla_rl.core.spec.spec import Spec
from vla_rl.core.types import Context, ValueGranularity


def build_algorithm(spec: Spec, device: str = "cpu") -> Algorithm:
    context = Context(seed=spec.seed, device=device, chunk=spec.rollout.chunk)
    component: Algorithm = build("algorithm", spec.algorithm.type, spec.algorithm.config, context, spec.plugins)
    return wrap("algorithm", component, spec.algorithm.type, [guard(spec.algorithm.type), *hook_modules(spec.plugins)])


def values_for(algorithm: Algorithm) -> ValueGranularity:
    if "values" not in algorithm.needs:
        return "none"
    return "action" if algorithm.value_granularity == "action" else "chunk"

"""Construction of a run's model, and of the engine that acts with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vla_rl.core.catalogue import build, load
from vla_rl.core.contexts import EngineContext, ModelContext, Role
from vla_rl.core.hookspecs import Algorithm, PolicyEngine, VLAModel
from vla_rl.core.manager import Named, wrap
from vla_rl.core.spec.spec import Spec, has_own_policy, suites_of
from vla_rl.core.types import EnvInfo
from vla_rl.runtime.checks.run import check_critic, check_reference
from vla_rl.runtime.placement.components import values_for
from vla_rl.runtime.workers.precision import Autocast
from vla_rl.toolkit.models.instructions import saved_suffix, with_suffix

Scaling = Mapping[str, Any] | None


def build_model(
    spec: Spec,
    info: EnvInfo,
    device: str,
    scaling: Scaling,
    algorithm: Algorithm,
    wrappers: Named,
    role: Role,
    *,
    imitation: bool = False,
) -> VLAModel:
    """Build the spec's model with its wrappers, and the `instruction_suffix` of its checkpoint or its trainer.

    Raises UserError where it lacks the critic or the reference policy that the algorithm needs, unless nothing can
    train the model.

    Args:
        info: description of the simulator.
        scaling: as in `ModelContext`.
        role: as in `PolicyContext`.
        imitation: True for `vla-rl sft`, where the trainer of `imitation` may choose the suffix.
    """
    shared = _policy_arguments(spec, info, device, role)
    context = ModelContext(**shared, values=values_for(algorithm), scaling=scaling)
    component = build("model", spec.model.type, spec.model.config, context, spec.plugins)
    plugin = load("model", spec.model.type, spec.plugins)
    learns = plugin.no_rl is None or plugin.no_rl(spec.model.config) is None
    if learns and context.values != "none":
        check_critic(component, spec)
    narrow = [("train.precision", Autocast(device))] if spec.train.precision == "bf16" else []
    component.instruction_suffix = _instruction_suffix(spec, imitation)
    model = wrap(
        "model",
        component,
        spec.model.type,
        [*wrappers, *narrow],
        {"obs": lambda obs: with_suffix(obs, component.instruction_suffix)},
    )
    if learns and algorithm.needs.reference:
        check_reference(model, spec)
    return model


def _instruction_suffix(spec: Spec, imitation: bool) -> str:
    if imitation and spec.imitation is not None:
        chosen = load("trainer", spec.imitation.trainer.type, spec.plugins).instruction_suffix
        if chosen:
            return chosen
    return saved_suffix(getattr(spec.model.config, "checkpoint", None))


def build_engine(
    spec: Spec, info: EnvInfo, device: str, make_model: Callable[[], VLAModel], wrappers: Named, role: Role
) -> PolicyEngine:
    """Build the spec's `rollout.engine` with its wrappers.

    Args:
        make_model: returns the run's model in this process. Not called by engines with their own policy.
        role: as in `PolicyContext`.
    """
    part = spec.rollout.engine
    own_policy = has_own_policy(spec)
    context = EngineContext(
        **_policy_arguments(spec, info, device, role),
        model_config=None if own_policy else spec.model.config,
        make_model=None if own_policy else make_model,
    )
    engine = build("engine", part.type, part.config, context, spec.plugins)
    return wrap("engine", engine, part.type, wrappers)


def _policy_arguments(spec: Spec, info: EnvInfo, device: str, role: Role) -> dict[str, Any]:
    """Return the attributes of `PolicyContext`."""
    return {
        "seed": spec.seed,
        "device": device,
        "chunk": spec.rollout.chunk,
        "env": info,
        "temperature": spec.rollout.temperature,
        "suites": suites_of(spec),
        "role": role,
    }


def policy_name(spec: Spec) -> str:
    """Return the name of the policy that acts, for messages: of the model, or of an engine with its own policy."""
    return f"engine {spec.rollout.engine.type!r}" if has_own_policy(spec) else f"model {spec.model.type!r}"

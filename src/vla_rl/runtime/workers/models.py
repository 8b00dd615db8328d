"""Construction of a run's model, and of the engine that acts with it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch
from attrs import evolve

from vla_rl.core.catalogue import build, hook_modules, load
from vla_rl.core.contexts import EngineContext, ModelContext, Role
from vla_rl.core.errors import UserError
from vla_rl.core.hookspecs import Algorithm, PolicyEngine, VLAModel
from vla_rl.core.manager import Named, hookimpl, wrap
from vla_rl.core.spec.sections import ConventionsSpec
from vla_rl.core.spec.spec import Spec, has_own_policy, suites_of
from vla_rl.core.types import Chunk, EnvInfo, Scores
from vla_rl.runtime.checks.run import check_critic, check_reference
from vla_rl.runtime.placement.components import build_algorithm, values_for
from vla_rl.runtime.workers.compilation import compile_model
from vla_rl.toolkit.models.conventions import Converter
from vla_rl.toolkit.models.instructions import saved_suffix, with_suffix
from vla_rl.toolkit.models.meta_device import device_autocast

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

    Raises UserError where it lacks a critic or reference policy that the algorithm needs, unless nothing can train it.

    Args:
        info: description of the simulator.
        scaling: as in `ModelContext`.
        role: as in `PolicyContext`.
        imitation: True for `vla-rl sft`, where the trainer of `imitation` may choose the suffix.
    """
    plain = spec.conventions == ConventionsSpec()
    converter = Converter(spec.conventions)
    if not plain and scaling is not None:
        raise UserError(
            "imitation.statistics: data measures what `conventions` would then convert; leave one of them out"
        )
    shared = _policy_arguments(spec, converter.convert_info(info), device, role)
    context = ModelContext(**shared, values=values_for(algorithm), scaling=scaling)
    component: VLAModel = build("model", spec.model.type, spec.model.config, context, spec.plugins)
    plugin = load("model", spec.model.type, spec.plugins)
    learns = plugin.no_rl is None or plugin.no_rl(spec.model.config) is None
    if learns and context.values != "none":
        check_critic(component, spec)
    narrow = [("train.precision", Autocast(device))] if spec.train.precision == "bf16" else []
    component.instruction_suffix = _instruction_suffix(spec, imitation)
    conversions = {} if plain else converter.arguments
    convert = conversions.get("obs", lambda obs: obs)
    model = wrap(
        "model",
        component,
        spec.model.type,
        [*([] if plain else [("conventions", converter)]), *wrappers, *narrow],
        conversions | {"obs": lambda obs: with_suffix(convert(obs), component.instruction_suffix)},
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
    engine: PolicyEngine = build("engine", part.type, part.config, context, spec.plugins)
    return wrap("engine", engine, part.type, wrappers)


def build_actor(spec: Spec, info: EnvInfo, device: str, scaling: Mapping[str, Any] | None = None) -> PolicyEngine:
    """Build the engine of a policy that acts without a run. Arguments as of `build_model`."""
    algorithm = build_algorithm(spec, device)
    wrappers = hook_modules(spec.plugins)

    def make_model() -> VLAModel:
        model = build_model(spec, info, device, scaling, algorithm, wrappers, "act")
        compile_model(spec, model, device, "act")
        return model

    return build_engine(spec, info, device, make_model, wrappers, "act")


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


class Autocast:
    """Mixed precision (Micikevicius et al. 2018) around a model's calls: bfloat16 inside, float32 results. Acting and
    learning use the same wrapper, so that recomputed log-probs equal the recorded ones."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device).type

    @hookimpl(wraps="model")
    def sample_chunk(self) -> Generator[None, Chunk, Chunk]:
        with device_autocast(self.device):
            chunk = yield
        return evolve(chunk, log_probs=_to_float(chunk.log_probs), values=_to_float(chunk.values))

    @hookimpl(wraps="model")
    def chunk_log_probs(self) -> Generator[None, Scores, Scores]:
        with device_autocast(self.device):
            scores = yield
        return Scores(
            log_probs=_to_float(scores.log_probs), entropy=_to_float(scores.entropy), values=_to_float(scores.values)
        )

    @hookimpl(wraps="model")
    def values(self) -> Generator[None, torch.Tensor, torch.Tensor]:
        with device_autocast(self.device):
            result = yield
        return result.float()

    reference_log_probs = imitation_loss = imitation_losses = imitation_terms = policy_features = values


def _to_float(tensor: Any) -> Any:
    return None if tensor is None else tensor.float()

"""Construction of a run's model, for a worker that acts and learns or for a process that only acts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from vla_rl.core.catalogue import build, load
from vla_rl.core.errors import CheckpointError
from vla_rl.core.hookspecs import ActingModel, Algorithm, VLAModel
from vla_rl.core.manager import Named, wrap
from vla_rl.core.spec.spec import Spec
from vla_rl.core.types import Context, EnvInfo
from vla_rl.runtime.checks.run import check_critic, check_reference
from vla_rl.runtime.placement.components import values_for
from vla_rl.runtime.workers.precision import Autocast
from vla_rl.toolkit.models.checkpoints import read_pickled

Scaling = Mapping[str, Any] | None


def build_model(
    spec: Spec, info: EnvInfo, device: str, scaling: Scaling, algorithm: Algorithm, wrappers: Named
) -> ActingModel:
    """Build the spec's model with its wrappers. It is a `VLAModel` (`trainable`) unless its plugin says `acts_only`.

    Raises UserError where it lacks the critic or the reference policy that the algorithm needs, unless nothing can
    train the model.

    Args:
        info: description of the simulator.
        scaling: as in `Context`.
    """
    context = Context(
        seed=spec.seed,
        device=device,
        chunk=spec.rollout.chunk,
        env=info,
        temperature=spec.rollout.temperature,
        values=values_for(algorithm),
        scaling=scaling,
    )
    component: ActingModel = build("model", spec.model.type, spec.model.config, context, spec.plugins)
    plugin = load("model", spec.model.type, spec.plugins)
    learns = not plugin.acts_only and (plugin.no_rl is None or plugin.no_rl(spec.model.config) is None)
    if learns and context.values != "none":
        check_critic(trainable(component), spec)
    narrow = [("train.precision", Autocast(device))] if spec.train.precision == "bf16" else []
    model = wrap("model", component, spec.model.type, [*wrappers, *narrow])
    if learns and algorithm.needs.reference:
        check_reference(trainable(model), spec, info)
    return model


def trainable(model: ActingModel) -> VLAModel:
    """Return a model as a `VLAModel`. A cast, since wrapped models are proxies: `check_spec` has refused to train a
    model that only acts.
    """
    return cast(VLAModel, model)


def load_trained(model: VLAModel, trainer: Path) -> None:
    """Load the exact weights of a checkpoint's trainer folder into a model. Raises CheckpointError where they belong to
    another model.
    """
    state = read_pickled(trainer / "learner.pt", ("weights",), mmap=True)
    try:
        model.load_weights(state["weights"].items())
    except (KeyError, RuntimeError, AttributeError) as exc:
        raise CheckpointError(f"{trainer / 'learner.pt'} holds the weights of another model: {exc}") from exc

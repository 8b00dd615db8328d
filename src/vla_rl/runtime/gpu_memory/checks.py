"""Checks of the memory on GPUs: predicted from the spec and the plan before anything is built."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from attrs import frozen

from vla_rl.core.errors import SpecError, UserError
from vla_rl.core.plan import Cluster, MeasureFirst, Plan
from vla_rl.core.spec.source import format_problems
from vla_rl.core.spec.spec import Spec, has_own_policy
from vla_rl.core.types import EnvInfo
from vla_rl.runtime.gpu_memory.model_memory import measure_model
from vla_rl.runtime.placement.assignments import Assignment, assign_workers
from vla_rl.runtime.placement.hardware import machine_resources
from vla_rl.runtime.planning.device_memory import GIB, ModelMemory, check_device_memory
from vla_rl.runtime.planning.known_sizes import known_info, of_public_size
from vla_rl.runtime.planning.plan import plan_for

logger = logging.getLogger(__name__)


@frozen(kw_only=True)
class Prediction:
    """Model's memory, if it can be known before a simulator is built."""

    memory: ModelMemory | None = None
    info: EnvInfo | None = None
    guesses: tuple[str, ...] = ()
    """What is assumed, in words."""
    reason: str = ""
    """Why nothing is known."""


NOT_PREDICTED = Prediction()


def predict_model_memory(spec: Spec) -> Prediction:
    """Count the memory of the spec's model for its simulator, by what is known of both before they are built."""
    if has_own_policy(spec):
        return Prediction(reason="the engine acts with its own policy")
    guesses: list[str] = []
    try:
        sized = of_public_size(spec, guesses)
        info = known_info(sized, guesses)
        return Prediction(memory=measure_model(sized, info), info=info, guesses=tuple(guesses))
    except UserError as exc:
        return Prediction(reason=f"{exc}; a run checks it before it builds the model")
    except Exception as exc:  # of any plugin: what a run needs shows when it starts
        logger.debug("memory of model %r", spec.model.type, exc_info=True)
        return Prediction(reason=f"{type(exc).__name__}: {exc}")


def on_gpus(plan: Plan) -> bool:
    """Return whether a policy or a learner of the plan is on a GPU."""
    return any(plan.slots[i].device.startswith("cuda") for role in ("policy", "learner") for i in plan.hosting(role))


def predicted_memory(spec: Spec, plan: Plan, cluster: Cluster) -> str:
    """Return a line about the fullest GPU; "" without GPUs. Raises UserError where a GPU needs more than it has."""
    if not on_gpus(plan):
        return ""
    prediction = predict_model_memory(spec)
    if prediction.memory is None or prediction.info is None:
        return f"memory of GPUs: not checked ({prediction.reason})"
    info = prediction.info
    assignments = assign_workers(plan, spec.env.num_envs, one_process=spec.runtime.backend == "local")
    capacity = cluster.gpu_memory
    devices = check_device_memory(
        spec,
        plan,
        assignments,
        capacity,
        prediction.memory,
        lambda changed: measure_model(of_public_size(changed, []), info),
    )
    assumed = f" (assumed: {'; '.join(prediction.guesses)})" if prediction.guesses else ""
    if not devices:
        return ""
    size, phases = devices[0].peak
    known = "" if capacity is None else f" of {capacity / GIB:.1f}"
    phase = " and ".join(dict.fromkeys(phases.values()))
    return f"memory of GPUs: {size / GIB:.1f}{known} GiB on the fullest, in its {phase}{assumed}"


def check_gpu_memory(spec: Spec, cluster: Cluster | None) -> str:
    """Predict the memory of GPUs for a spec that `check_spec` has accepted. Return a line about it, which is empty
    without GPUs. Raises SpecError where the run would not fit.

    Args:
        cluster: as in `check_spec`.
    """
    if spec.runtime.address is not None and cluster is None:
        return ""
    machine = cluster or machine_resources()
    try:
        return predicted_memory(spec, plan_for(spec, machine), machine)
    except MeasureFirst:
        return ""
    except UserError as exc:
        raise SpecError(format_problems([(("train", "micro_batch"), str(exc))], spec.source)) from exc


def check_before_building(
    spec: Spec, plan: Plan, assignments: Sequence[Assignment], info: EnvInfo, capacity: int | None
) -> None:
    """Raise UserError where a model would not fit on a GPU. The driver calls this once the simulators are there and
    before models are built. A model that cannot be predicted is not refused."""
    if capacity is None or has_own_policy(spec) or not on_gpus(plan):
        return
    try:
        memory = measure_model(spec, info)
    except Exception:  # of any plugin: what is wrong shows when the model is built
        logger.debug("memory of model %r", spec.model.type, exc_info=True)
        return
    check_device_memory(spec, plan, assignments, capacity, memory, lambda changed: measure_model(changed, info))

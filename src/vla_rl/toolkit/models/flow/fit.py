"""Inputs and outputs on which a flow-matching model, a simulator and a spec agree."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from attrs import evolve, frozen

from vla_rl.core.contexts import ModelContext
from vla_rl.core.types import EnvInfo
from vla_rl.toolkit.feature_names import check_order
from vla_rl.toolkit.models.checkpoints.fitting import (
    MismatchError,
    check_action_dim,
    check_action_range,
    check_horizon,
    check_state_dim,
    choose_cameras,
    choose_references,
    require_state,
)
from vla_rl.toolkit.models.checkpoints.lerobot import FeatureScale, Statistics, rescale_config
from vla_rl.toolkit.models.flow.checkpoint import FlowCheckpoint
from vla_rl.toolkit.models.flow.config import FlowConfig
from vla_rl.toolkit.relative_actions import References

logger = logging.getLogger(__name__)


@frozen(kw_only=True)
class FlowIOAdapter:
    """Inputs and outputs on which model, simulator and spec agree."""

    checkpoint: FlowCheckpoint
    cameras: tuple[str, ...]
    state: FeatureScale | None
    """Normalisation of the state; None: the model sees no state."""


def fit_preset(
    name: str, config: FlowConfig, env: EnvInfo, checkpoint: FlowCheckpoint, uses_state: bool
) -> FlowIOAdapter:
    """Adapt a network with random weights to the simulator."""
    scales = checkpoint.statistics
    if scales.references is None:
        scales = evolve(scales, references=choose_references(config, env))
        if scales.references:  # the state is thought to have the range of the actions
            logger.warning(
                "model.preset of %s with model.actions relative to the state: nothing says how large these differences "
                "are, so they are scaled by the simulator's bounds of absolute actions, which may be far wider; set "
                "imitation.statistics: data, or take a checkpoint",
                name,
            )
            spans = [high - low for low, high in zip(env.action_low, env.action_high, strict=True)]
            ends = [
                (float(low), float(high)) if place is None else (-float(span), float(span))
                for low, high, span, place in zip(
                    env.action_low, env.action_high, spans, scales.references, strict=True
                )
            ]
            scales = evolve(scales, action=evolve(scales.action, values=tuple(zip(*ends, strict=True))))
    return FlowIOAdapter(
        checkpoint=evolve(checkpoint, statistics=scales),
        cameras=_fit_cameras(name, config, env, None),
        state=scales.state if uses_state else None,
    )


def fit_checkpoint(
    name: str,
    config: FlowConfig,
    context: ModelContext,
    checkpoint: FlowCheckpoint,
    use_state: bool | None,
    *,
    blind: str,
    measured: Statistics | None,
) -> FlowIOAdapter:
    """Match checkpoint, spec and simulator. Raise MismatchError if they are incompatible.

    Args:
        use_state: None: as the checkpoint was trained.
        blind: what a spec says for a model that shall see no state.
        measured: statistics of the demonstrations, if the run scales by them.
    """
    env = context.env
    if measured is not None:  # lerobot's files hold the checkpoint's statistics: rewrite them
        settings = {**checkpoint.shape.to_lerobot(), **checkpoint.raw} if checkpoint.raw else {}
        checkpoint = evolve(checkpoint, statistics=measured, raw=rescale_config(settings, measured), processors={})
    scales, shape = checkpoint.statistics, checkpoint.shape
    if measured is None:
        scales = evolve(scales, references=choose_references(config, env, scales.references, str(checkpoint.folder)))
        checkpoint = evolve(checkpoint, statistics=scales)
    where = f"{checkpoint.folder} was trained"
    check_action_dim(where, scales.action.dim, env)
    trained = checkpoint.raw.get("action_feature_names")
    if isinstance(trained, list) and all(isinstance(name, str) for name in trained):
        check_order(
            "action",
            f"checkpoint {checkpoint.folder}",
            trained,
            "the simulator or data",
            env.action_names,
            MismatchError,
        )
    source = f"statistics of {'the demonstrations' if measured is not None else checkpoint.folder}"
    bounds = list(zip(env.action_low, env.action_high, strict=True))
    ranges = scales.action.usual_ranges()
    if ranges:  # of differences to the state nothing follows for the simulator's range
        references = scales.references or (None,) * len(ranges)
        ranges = [
            usual if place is None else bound for usual, bound, place in zip(ranges, bounds, references, strict=True)
        ]
    setting = f"model.gripper: {'libero' if config.gripper == 'as_is' else config.gripper}"
    check_action_range(source, ranges, env, gripper=setting, converts=config.gripper != "as_is")
    check_horizon(checkpoint.folder, shape.horizon, context.chunk)
    for part, scale, width in (("actions", scales.action, shape.action_dim), ("state", scales.state, shape.state_dim)):
        if scale is not None and scale.dim > width:
            raise MismatchError(f"{checkpoint.folder}: statistics of {scale.dim} {part}, the network takes {width}")
    if use_state is None and scales.state is not None and env.state_dim == 0:
        raise MismatchError(
            f"{where} on a {scales.state.dim}-dimensional state, and this simulator has none; "
            f"{blind} feeds none instead"
        )
    state = None
    if uses_state(use_state, env) and not (use_state is None and scales.state is None):
        state = scales.state
        if state is None:
            raise MismatchError(f"{where} without a state; set {blind}")
        check_state_dim(where, state.dim, env)
    return FlowIOAdapter(checkpoint=checkpoint, cameras=_fit_cameras(name, config, env, checkpoint), state=state)


def demonstration_statistics(
    context: ModelContext, quantiles: bool = False, by_step: bool = False
) -> Statistics | None:
    """Return the demonstrations' statistics if the run normalises by them: z-scores, or 1st to 99th percentile.

    Args:
        by_step: scale relative actions by their range at each step of a chunk, as GR00T N1.7 does.
    """
    scaling = context.scaling
    if scaling is None:
        return None
    mode, low, high = ("QUANTILES", "q01", "q99") if quantiles else ("MEAN_STD", "mean", "std")
    scales = {
        name: FeatureScale(mode=mode, values=(tuple(part[low]), tuple(part[high])), dim=len(part[low]))
        for name, part in scaling.items()
        if name in ("action", "state")
    }
    references = tuple(None if place < 0 else int(place) for place in scaling["action"].get("relative_to", ()))
    if by_step and references:
        scales["action"] = _scale_by_step(scales["action"], scaling["action_steps"], references)
    return Statistics(action=scales["action"], state=scales.get("state"), references=references)


def _scale_by_step(action: FeatureScale, ranges: Mapping[str, Sequence[float]], references: References) -> FeatureScale:
    """Return a scale of relative numbers by their range at each step; absolute ones are scaled alike at all steps.

    Args:
        ranges: "min" and "max" of H steps of D numbers, in one list each.
    """
    steps = len(ranges["min"]) // action.dim

    def choose_numbers(end: int, name: str) -> tuple[tuple[float, ...], ...]:
        rows = [ranges[name][step * action.dim : (step + 1) * action.dim] for step in range(steps)]
        alike = action.values[end]
        return tuple(
            tuple(
                float(pooled if place is None else at_step)
                for pooled, at_step, place in zip(alike, row, references, strict=True)
            )
            for row in rows
        )

    low, high = choose_numbers(0, "min"), choose_numbers(1, "max")
    widest = tuple(map(min, zip(*low, strict=True))), tuple(map(max, zip(*high, strict=True)))
    return evolve(action, values=widest, by_step=(low, high))


def uses_state(use_state: bool | None, env: EnvInfo) -> bool:
    if use_state:
        require_state(env, "use_state")
    return env.state_dim > 0 if use_state is None else use_state


def _fit_cameras(name: str, config: FlowConfig, env: EnvInfo, checkpoint: FlowCheckpoint | None) -> tuple[str, ...]:
    trained = () if checkpoint is None else checkpoint.image_names
    chosen = choose_cameras(name, env, config.cameras, trained, tuple(env.cameras))
    if config.cameras is None and trained and len(trained) != len(chosen):
        raise MismatchError(
            f"the checkpoint was trained with {len(trained)} cameras ({', '.join(trained)}), the simulator has "
            f"{len(chosen)} ({', '.join(chosen)}); name those it shall see in model.cameras, in the order of its images"
        )
    if checkpoint is not None and len(chosen) > checkpoint.slots:
        raise MismatchError(
            f"the checkpoint takes {checkpoint.slots} cameras, the policy would see {len(chosen)} "
            f"({', '.join(chosen)}); name the right ones in model.cameras"
        )
    return chosen

"""What an algorithm needs of a run, checked before anything starts."""

from __future__ import annotations

from vla_rl.core.errors import UserError
from vla_rl.core.hookspecs import Algorithm
from vla_rl.core.spec import Spec

SUPPORTED_NEEDS = frozenset({"values", "fresh-values", "groups", "reference", "frames"})


def check_needs(algorithm: Algorithm, spec: Spec) -> None:
    """Raise UserError for what the algorithm needs and the spec or this runtime does not provide."""
    name = spec.algorithm.type
    unknown = algorithm.needs - SUPPORTED_NEEDS
    if unknown:
        raise UserError(
            f"algorithm {name!r} needs {', '.join(sorted(unknown))}, which this runtime does not provide; "
            f"it provides: {', '.join(sorted(SUPPORTED_NEEDS))}"
        )
    if "groups" in algorithm.needs and (spec.rollout.group_size < 2 or spec.rollout.auto_reset != "off"):
        raise UserError(
            f"algorithm {name!r} compares trajectories of a group: it needs rollout.group_size >= 2 (got "
            f"{spec.rollout.group_size}) and rollout.auto_reset: off (got {spec.rollout.auto_reset})"
        )
    if "frames" in algorithm.needs and spec.rollout.auto_reset != "off":
        raise UserError(
            f"algorithm {name!r} looks at the frames of whole trajectories: it needs rollout.auto_reset: off "
            f"(got {spec.rollout.auto_reset})"
        )
    if "values" not in algorithm.needs:
        keys = {"value_lr": spec.train.value_lr, "critic_warmup_steps": spec.train.critic_warmup_steps}
        for key in (key for key, value in keys.items() if value):
            raise UserError(f"train.{key}: {keys[key]} is for a critic, and algorithm {name!r} has none; remove it")
    if spec.rollout.resample is not None and "groups" not in algorithm.needs:
        raise UserError(f"rollout.resample replaces groups that are filtered; algorithm {name!r} has none")

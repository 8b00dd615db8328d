"""The algorithm of a spec, and what it needs of a run, checked before anything starts."""

from __future__ import annotations

from vla_rl.core.errors import PluginError, SpecError
from vla_rl.core.hookspecs import Algorithm, SimEnv
from vla_rl.core.spec.source import Item, located
from vla_rl.core.spec.spec import Spec

SUPPORTED_NEEDS = frozenset({"values", "fresh-values", "groups", "reference", "frames"})


def check_needs(algorithm: Algorithm, spec: Spec) -> None:
    """Raise SpecError for what the algorithm needs and the spec or this runtime does not provide."""
    found = needs(algorithm, spec)
    if found:
        raise SpecError(located(found, spec.source))


def needs(algorithm: Algorithm, spec: Spec) -> list[Item]:
    """What the algorithm needs and does not get."""
    name, rollout = spec.algorithm.type, spec.rollout
    found: list[Item] = []
    unknown = algorithm.needs - SUPPORTED_NEEDS
    if unknown:
        text = (
            f"algorithm {name!r} needs {', '.join(sorted(unknown))}, which this runtime does not provide; "
            f"it provides: {', '.join(sorted(SUPPORTED_NEEDS))}"
        )
        found.append((("algorithm",), text))
    if "groups" in algorithm.needs and (rollout.group_size < 2 or rollout.auto_reset != "off"):
        text = (
            f"algorithm {name!r} compares trajectories of a group: it needs rollout.group_size >= 2 (got "
            f"{rollout.group_size}) and rollout.auto_reset: off (got {rollout.auto_reset})"
        )
        found.append((("rollout", "group_size"), text))
    if "frames" in algorithm.needs and rollout.auto_reset != "off":
        text = (
            f"algorithm {name!r} looks at the frames of whole trajectories: it needs rollout.auto_reset: off "
            f"(got {rollout.auto_reset})"
        )
        found.append((("rollout", "auto_reset"), text))
    if "values" not in algorithm.needs:
        keys = {"value_lr": spec.train.value_lr, "critic_warmup_steps": spec.train.critic_warmup_steps}
        text = "{} is for a critic, and algorithm {!r} has none; remove it"
        found += [(("train", key), text.format(value, name)) for key, value in keys.items() if value]
    if rollout.resample is not None and "groups" not in algorithm.needs:
        text = f"it replaces groups that are filtered; algorithm {name!r} has none"
        found.append((("rollout", "resample"), text))
    return found


def check_offload(env: SimEnv, name: str) -> None:
    """Raise PluginError for a simulator that cannot leave its device."""
    if type(env).snapshot is SimEnv.snapshot or type(env).restore is SimEnv.restore:
        raise PluginError(
            f"env {name!r} cannot be offloaded: it has no snapshot and restore; leave out placement.offload.sim, or "
            f"give simulators devices of their own (placement: disaggregated)"
        )

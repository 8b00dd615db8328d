"""Settings of simulator lanes and of the policies' dynamic batching."""

from __future__ import annotations

from math import inf
from typing import Any, Literal

from attrs import field, frozen
from attrs import validators as v

from vla_rl.core.plan import Batching, DoesNotFit, Job
from vla_rl.toolkit.placement.checks import check_lanes

Lanes = Literal["stages", "envs"] | int


def valid_lanes(instance: Any, attribute: Any, value: Lanes) -> None:
    """Validate a number of envs (attrs validator)."""
    if isinstance(value, int) and value < 1:
        raise ValueError(f"a lane of {value} envs; give 1 or more, envs (a lane each) or stages")


def valid_seconds(instance: Any, attribute: Any, value: float | None) -> None:
    """Validate a number of seconds, or None (attrs validator)."""
    if value is not None and not 0 <= value < inf:
        raise ValueError(f"a wait of {value} seconds; give 0 or more, or null")


@frozen(kw_only=True)
class BatchingSettings:
    """Dynamic batching of a policy: when it infers."""

    max_batch: int | None = field(default=None, validator=v.optional(v.ge(1)))
    """Most envs in one inference; null: all that the policy acts for."""
    max_wait_s: float | None = field(default=0.0, validator=valid_seconds)
    """Seconds that the oldest request waits for a fuller batch; 0: infer with whatever waits; null: wait for the whole
    batch."""


def plan_lanes(
    job: Job, sims: int, policies: int, stages: int, lanes: Lanes, batching: BatchingSettings | None
) -> dict[str, Any]:
    """Return `stages`, `concurrent_lanes` and `batching` of a plan with this many sim and policy workers. Raise
    DoesNotFit."""
    concurrent = lanes != "stages"
    if concurrent:
        check_lanes(job, sims, 1)
        envs, of_lane = job.num_envs // sims, 1 if lanes == "envs" else int(lanes)
        if envs % of_lane:
            raise DoesNotFit(
                f"the {envs} envs of a sim worker cannot be divided into lanes of {of_lane}; set placement.lanes to a "
                f"number that divides {envs}, or to envs"
            )
        stages = envs // of_lane
    waits = 0.0 if concurrent and sims * stages > policies else None
    chosen = (
        Batching(max_wait_s=waits)
        if batching is None
        else Batching(max_batch=batching.max_batch, max_wait_s=batching.max_wait_s)
    )
    return {"stages": stages, "concurrent_lanes": concurrent, "batching": chosen}

"""Selection of the trajectories to train on, and the end of a run whose filters keep nothing."""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING

import attrs

from vla_rl.core import samples
from vla_rl.core.errors import UserError
from vla_rl.core.fields import ROLLOUT, arrange_fields, list_arrays
from vla_rl.core.hookspecs import Algorithm
from vla_rl.core.samples import by_action, by_chunk
from vla_rl.core.spec.spec import Spec
from vla_rl.core.types import ActionSource, Array, Rollout

if TYPE_CHECKING:
    import torch


class Selection:
    """Chooses the trajectories to train on, and ends a run whose filters keep nothing."""

    def __init__(self, spec: Spec):
        self.spec = spec
        self.skipped: deque[Counter[tuple[int, int]]] = deque()
        """Per skipped rollout in a row (nothing left to train on): the number of groups by (successes, members)."""
        self.without_samples = 0
        """Rollouts in succession in which an operator took over before the policy's first action in every episode."""

    def choose_columns(self, rollout: Rollout, keep: torch.Tensor, metrics: dict[str, float]) -> Array:
        """Return the columns that the algorithm keeps (bool [N]), int64 [K] ascending. Add metrics to `metrics`."""
        columns: Array = keep.nonzero().flatten().numpy()
        num_kept_groups = groups_in(rollout, keep)
        metrics["rollout/kept"] = len(columns) / len(keep)
        metrics["groups/kept"] = float(num_kept_groups)
        metrics["groups/filtered"] = float(len(rollout.groups.unique()) - num_kept_groups)
        self.without_samples = 0 if rollout.samples.any() else self.without_samples + 1
        if len(columns):
            self.skipped.clear()
        else:
            members = [rollout.success[rollout.groups == group] for group in rollout.groups.unique()]
            self.skipped.append(Counter((int(success.sum()), len(success)) for success in members))
        return columns

    def check_progress(self) -> None:
        """Raise UserError if `train.max_skipped` rollouts in succession had nothing to train on."""
        limit = self.spec.train.max_skipped
        if len(self.skipped) < limit:
            return
        if self.without_samples >= limit:
            raise UserError(
                f"in {limit} training steps in a row (train.max_skipped) an operator took over before the policy's "
                f"first action in every episode, so algorithm {self.spec.algorithm.type!r} had nothing to train "
                "on: let the policy act first, or train on what people do (vla-rl sft with a recording of it)"
            )
        total = sum(self.skipped, start=Counter[tuple[int, int]]())
        lines = "\n".join(f"  {wins} of {size} succeeded: {n} groups" for (wins, size), n in sorted(total.items()))
        failing = sum(n for (wins, _), n in total.items() if wins == 0)
        advice = (
            "most groups fail as a whole: start from a better policy (`bc_warmup:`, or a checkpoint trained for this "
            "task), make the task easier or the step limit longer, or raise rollout.temperature"
            if failing * 2 >= total.total()
            else "most groups differ too little: raise rollout.group_size or rollout.temperature, take harder states"
        )
        raise UserError(
            f"the filters of algorithm {self.spec.algorithm.type!r} left nothing to train on in {limit} training steps "
            f"in a row (train.max_skipped):\n{lines}\n  {advice}; widen the filters, or give rollout.resample"
        )


def select_trajectories(rollout: Rollout, algorithm: Algorithm) -> tuple[Rollout, torch.Tensor]:
    """Return (rollout with the algorithm's rewards, ending at takeovers unless it learns from them; kept, bool [N])."""
    if not algorithm.needs.takeovers:
        rollout = end_at_takeovers(rollout)
    rollout = algorithm.shape_rewards(rollout)
    return rollout, algorithm.select(rollout) & rollout.samples.any(0)


def groups_in(rollout: Rollout, keep: torch.Tensor) -> int:
    """Return the number of groups with a trajectory in `keep` (bool [N])."""
    return len(rollout.groups[keep].unique())


def take_columns(rollout: Rollout, columns: Array) -> Rollout:
    """Return the rollout cut to these trajectories. `episodes` stays complete, for the record."""
    import torch

    index = torch.from_numpy(columns)
    changes = arrange_fields(Rollout, samples.take_columns(list_arrays(rollout, ROLLOUT), index))
    changes["tasks"] = tuple(rollout.tasks[i] for i in columns) if rollout.tasks else ()
    changes["findings"] = {name: tensor[index] for name, tensor in rollout.findings.items()}
    return attrs.evolve(rollout, **changes)


def end_at_takeovers(rollout: Rollout) -> Rollout:
    """Return the rollout with every episode cut before the first action that the policy did not choose: for a policy
    gradient, a takeover is a terminal state without further reward. Neither later actions nor what came of them are the
    policy's. Trainers that learn from other people's actions use the whole rollout instead.

    The last action before a takeover is `terminated`; from there to the end of the episode nothing is valid and rewards
    are 0. A column whose first episode had a takeover did not succeed. A chunk in which the policy is taken over counts
    up to that action. Without takeovers the rollout is returned unchanged.
    """
    if rollout.source is None:
        return rollout
    import torch

    valid = by_action(rollout.valid)
    ended = by_action(rollout.terminated | rollout.truncated)
    taken = by_action(rollout.source != ActionSource.POLICY) & valid
    after = torch.zeros_like(valid)
    """Actions from a takeover to the end of its episode, bool [T * C, N]."""
    helped = torch.zeros_like(valid[0])
    first_helped = torch.zeros_like(valid[0])
    in_first = torch.ones_like(valid[0])
    for t in range(len(valid)):
        helped = helped | taken[t]
        after[t] = helped
        first_helped |= helped & in_first
        in_first &= ~ended[t]
        helped = helped & ~ended[t]
    last = torch.zeros_like(valid)
    """Last actions before a takeover."""
    follows = torch.zeros_like(valid[0])
    for t in reversed(range(len(valid))):
        last[t] = valid[t] & ~after[t] & ~ended[t] & follows
        follows = torch.where(valid[t], after[t], follows)
    kept = by_chunk(valid & ~after, rollout.valid.shape[-1])
    return rollout.evolve(
        valid=kept,
        rewards=torch.where(kept, rollout.rewards, torch.zeros(())),
        terminated=(rollout.terminated & kept) | by_chunk(last, kept.shape[-1]),
        truncated=rollout.truncated & kept,
        success=rollout.success & ~first_helped,
        source=None,
        executed_actions=None,
    )

"""Size and staleness of a run, resolved once from its spec and used wherever groups, tickets or lag are counted."""

from __future__ import annotations

from attrs import frozen

from vla_rl.core.spec.spec import Spec


@frozen(kw_only=True)
class RunShape:
    """Size of a training step, and how stale its data may be."""

    envs: int
    """Simulator instances of the run."""
    chunk: int
    """Actions of a chunk."""
    group_size: int
    """Trajectories that start from one state."""
    groups_per_step: int
    """Groups that a training step takes from the rollouts."""
    resampled_groups: int
    """Further groups that a step may roll out in place of filtered ones, at most."""
    max_lag: int
    """Training steps that a chunk may be old when it is first trained on (elsewhere: staleness, off-policyness)."""
    pinned_lag: int
    """How many training steps older the weights that act in a ticket are than its step: `asynchrony.max_lag` where
    weights are pinned, or `rollout.lag`. 0: the newest weights act."""
    streaming: bool
    """Learners begin with a step's groups before all of them are there."""
    uses: int
    """Training steps that use a group, on average; above 1 there is a replay buffer."""
    replayed_groups: int
    """Groups in the replay buffer, at most."""
    added_groups: int
    """Groups that parts of the training step collect in addition to the rollout."""

    @property
    def tickets_per_step(self) -> int:
        return self.groups_per_step * self.group_size

    @property
    def has_overlap(self) -> bool:
        """Whether rollouts continue while the learners train."""
        return self.max_lag > 0

    @property
    def has_replay(self) -> bool:
        """Whether groups are trained on more than once."""
        return self.uses > 1

    @property
    def groups_held(self) -> int:
        """Most groups that the learners store or receive at once: those of the running step (with what filters may drop
        and what its parts collect), those of later steps, and the replay buffer."""
        ahead = (self.max_lag + 1) * self.groups_per_step + self.resampled_groups
        return ahead + self.added_groups + self.replayed_groups

    @classmethod
    def from_spec(cls, spec: Spec) -> RunShape:
        """Resolve a spec."""
        envs, rollout, asynchrony = spec.env.num_envs, spec.rollout, spec.asynchrony
        groups = (rollout.episodes or envs) // rollout.group_size
        resample = rollout.resample
        replay = asynchrony.replay
        return cls(
            envs=envs,
            chunk=rollout.chunk,
            group_size=rollout.group_size,
            groups_per_step=groups,
            resampled_groups=0 if resample is None else -(-resample.max_rounds * envs // rollout.group_size),
            max_lag=asynchrony.max_lag,
            pinned_lag=rollout.lag or asynchrony.pinned_lag,
            streaming=asynchrony.streaming_update,
            uses=1 if replay is None else replay.uses,
            replayed_groups=0 if replay is None else replay.capacity or (replay.uses - 1) * groups,
            added_groups=spec.added_groups(groups),
        )

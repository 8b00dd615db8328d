"""Host memory of trajectories that wait to be trained on, computed before the first one is rolled out."""

from __future__ import annotations

from collections import Counter

from attrs import evolve

from vla_rl.core.errors import UserError
from vla_rl.core.plan import Cluster, Plan
from vla_rl.core.run.shape import RunShape
from vla_rl.core.spec.spec import Spec
from vla_rl.core.types import EnvInfo


def waiting_bytes(spec: Spec, trajectory: float, max_lag: int) -> float:
    """Return the host memory of the most trajectories that learners hold at once. `trajectory`: bytes of one."""
    ahead = evolve(spec, asynchrony=evolve(spec.asynchrony, max_lag=max_lag))
    shape = RunShape.from_spec(ahead)
    return shape.groups_held * shape.group_size * trajectory


def trajectory_bytes(spec: Spec, info: EnvInfo, sample: int) -> int:
    """Return the bytes of a ticket to its limit: chunk steps of `sample` bytes each, and the last observation."""
    rollout = spec.rollout
    limit = rollout.steps or rollout.max_steps or max(task.max_steps for task in info.tasks)
    images = sum(3 * height * width for height, width in info.cameras.values())
    return -(-limit // rollout.chunk) * sample + images + 4 * info.state_dim


def check_memory(spec: Spec, plan: Plan, cluster: Cluster, info: EnvInfo, sample: int) -> None:
    """UserError where the most trajectories of learners do not fit into host memory. `sample`: a chunk step's bytes."""
    shape = RunShape.from_spec(spec)
    trajectories = shape.groups_held * shape.group_size
    one = trajectory_bytes(spec, info, sample)
    learners = plan.hosting("learner")
    memory = {node.name: node.memory for node in cluster.nodes}
    for name, count in Counter(plan.slots[index].node for index in learners).items():
        here = -(-count // len(memory)) if name is None else count
        needed = trajectories * one * here // len(learners)
        available = max(memory.values()) if name is None else memory[name]
        if needed > available:
            where = "" if name is None else f" on node {name!r}"
            episodes = "rollout.episodes"
            if spec.rollout.episodes is None:
                episodes = "rollout.auto_reset.steps or env.num_envs"
            keys = [] if spec.asynchrony.replay is None else ["asynchrony.replay.capacity or uses"]
            keys += ["asynchrony.max_lag"] if spec.asynchrony.max_lag else []
            raise UserError(
                f"{trajectories} trajectories may be on the learners at once, {one / 2**20:.1f} MiB each: "
                f"{needed / 2**30:.1f} GiB of host memory{where}, and there are {available / 2**30:.1f} GiB; lower "
                f"{', '.join([*keys, episodes])}, or the pixels of cameras"
            )

"""`metaworld`: the fifty tasks of Meta-World on MuJoCo. Settings only, light to import; see
docs/simulators/metaworld.md."""

from __future__ import annotations

from typing import Any, Literal

from attrs import field, frozen, validators

from vla_rl.core.types import Context, EnvInfo, Plugin, TaskInfo
from vla_rl.plugins.envs.metaworld.checks import known_benchmark, known_cameras, one_choice_of_tasks, preflight
from vla_rl.plugins.envs.metaworld.tasks import BENCHMARKS, INSTRUCTIONS
from vla_rl.toolkit.envs.settings import Processes

ACTION_DIM, STATE_DIM = 4, 4


@frozen(kw_only=True)
class MetaWorldConfig:
    """Spec keys of the simulator `metaworld`."""

    benchmark: str | None = field(default=None, validator=known_benchmark)
    """Benchmark: MT10, MT25 or MT50, which name their tasks; or MT1 with one of `tasks`."""
    tasks: tuple[str, ...] | None = field(default=None, validator=one_choice_of_tasks)
    """Task names, such as push-v3, instead of a benchmark."""
    cameras: dict[str, int] = field(factory=lambda: {"corner2": 224}, validator=known_cameras)
    """Cameras: name -> height and width in pixels (8 to 1024), in the order in which a model sees them."""
    fast_render: bool = False
    """Leave out shadows, reflections and multisampling: about ten times as fast, with other pixels."""
    reward: Literal["sparse", "dense"] = "sparse"
    """Reward. `sparse`: 1 at an action after which the task is solved, else 0. `dense`: Meta-World's own, 0 to 10 per
    action."""
    max_steps: int = field(default=500, validator=[validators.ge(1), validators.le(10_000_000)])
    """Step limit of every task, 1 to 10,000,000 actions; 500 as in the benchmarks."""
    train_states: int = field(default=200, validator=[validators.ge(1), validators.le(9000)])
    """Number of initial states per task in the train split, 1 to 9000."""
    keep_tasks: int = field(default=4, validator=validators.ge(1))
    """Number of tasks whose simulators an env instance keeps built, 1 or more: about 70 MB each with `fast_render`, 140
    MB without. Others are built again when needed, in half a second."""
    processes: Processes = field(factory=Processes)
    """Processes of the env instances."""


def build(config: MetaWorldConfig, context: Context) -> Any:
    from vla_rl.plugins.envs.metaworld.single_env import make_env

    return make_env(config, context)


def env_info(config: MetaWorldConfig) -> EnvInfo:
    """Return the description of the simulator."""
    names = BENCHMARKS.get(config.benchmark or "", config.tasks or ())
    note = "fast_render: no shadows, reflections or multisampling, so other pixels than the official simulator's"
    return EnvInfo(
        cameras={name: (size, size) for name, size in config.cameras.items()},
        state_dim=STATE_DIM,
        action_low=(-1.0,) * ACTION_DIM,
        action_high=(1.0,) * ACTION_DIM,
        tasks=tuple(TaskInfo(name=n, instruction=INSTRUCTIONS[n], max_steps=config.max_steps) for n in names),
        notes=(note,) if config.fast_render else (),
    )


plugin = Plugin(
    config=MetaWorldConfig,
    build=build,
    env_info=env_info,
    summary="Meta-World: fifty manipulation tasks with a Sawyer arm, MuJoCo",
    extra="metaworld",
    env_memory=800_000_000,
    preflight=preflight,
    action_dim=lambda config: 4,
    expert=True,
)

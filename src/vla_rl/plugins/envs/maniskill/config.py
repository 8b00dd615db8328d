"""Settings of `maniskill`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from attrs import field, frozen, validators

from vla_rl.toolkit.envs.settings import SharedProcesses, check_camera_size


def chosen_tasks(config: Any) -> tuple[str, ...]:
    return config.tasks or (config.task,)


def check_tasks(instance: Any, attribute: Any, tasks: tuple[str, ...]) -> None:
    if bool(tasks) == bool(instance.task):
        raise ValueError("give either task, such as PickCube-v1, or tasks, a list of them")
    if len(set(tasks)) < len(tasks):
        raise ValueError(f"a task is named twice: {', '.join(tasks)}")


def check_instructions(instance: Any, attribute: Any, instructions: Mapping[str, str]) -> None:
    tasks = chosen_tasks(instance)
    for name, text in instructions.items():
        if name not in tasks:
            raise ValueError(f"instructions has {name!r}, which is none of the tasks: {', '.join(tasks)}")
        if not text.strip():
            raise ValueError(f"the instruction of {name} is empty")


def check_cameras(instance: Any, attribute: Any, cameras: Mapping[str, int | None]) -> None:
    if not cameras:
        raise ValueError("name at least one camera, such as {base_camera: 224}")
    for name, size in cameras.items():
        if size is not None:
            check_camera_size(name, size)


@frozen(kw_only=True)
class ManiSkillConfig:
    """Spec keys of the simulator `maniskill`."""

    task: str | None = None
    """Task as ManiSkill registers it, such as PickCube-v1. Give either `task` or `tasks`."""
    tasks: tuple[str, ...] = field(default=(), validator=check_tasks)
    """Several tasks whose robots have the same actions and joints; with the CPU backend only."""
    instructions: dict[str, str] = field(factory=dict, validator=check_instructions)
    """Instructions: task -> the policy's instruction, for tasks that docs/simulators/maniskill.md does not list, or to
    reword those."""
    imports: tuple[str, ...] = ()
    """Modules whose import registers tasks, such as rlinf.envs.maniskill.tasks.put_on_in_scene_multi of RLinf's
    repository; importable by the interpreter of the simulators."""
    kwargs: dict[str, Any] = field(factory=dict)
    """Further arguments of the tasks' class, such as {obj_set: train} of that module."""
    cameras: dict[str, int | None] = field(factory=lambda: {"base_camera": 224}, validator=check_cameras)
    """Cameras: name -> height and width in pixels (8 to 1024; null: the task's own resolution), in the order in which a
    model sees them; every task has to have them."""
    control_mode: str = "pd_ee_delta_pose"
    """Controller, which defines an action: pd_ee_delta_pose (change of the hand's pose, and the gripper),
    pd_ee_delta_pos, or another that the robot offers."""
    reward: Literal["sparse", "dense"] = "sparse"
    """Reward. `sparse`: 1 at an action after which the task is solved, else 0. `dense`: ManiSkill's normalized_dense,
    up to 1."""
    backend: Literal["cpu", "gpu", "auto"] = "auto"
    """Backend. `cpu`: one simulator per env instance. `gpu`: one batched simulator whose tensors stay on the device;
    needs a GPU. `auto`: gpu if the device of the sim worker is one."""
    max_steps: int | None = field(
        default=None, validator=validators.optional(validators.and_(validators.ge(1), validators.le(10_000_000)))
    )
    """Step limit of every task, 1 to 10,000,000 actions; null: ManiSkill's own."""
    train_states: int = field(default=1000, validator=[validators.ge(1), validators.le(900_000)])
    """Number of initial states per task in the train split, 1 to 900,000."""
    eval_states: int = field(default=100, validator=[validators.ge(1), validators.le(1000)])
    """Number of initial states per task in the eval split, 1 to 1000."""
    show_goals: bool = True
    """Draw goal markers that ManiSkill hides from cameras (PickCube's green sphere): without them a policy cannot know
    where to go. false: the pixels of ManiSkill's own benchmarks."""
    fast_render: bool = False
    """Draw simplified meshes: several times as fast where a CPU draws, but pixels differ slightly, so not for reported
    results. For `backend: cpu` only."""
    goals_in_state: bool = False
    """Append the goal's position (x, y and z in metres) to the state, as ManiSkill's own visual baselines do: one
    camera hardly shows how far away a green sphere in the air is. Zeros for tasks whose observations have no goal."""
    robot: str | None = None
    """Robot to use instead of the tasks' own, by ManiSkill's name: panda_wristcam is a Panda arm with a `hand_camera`;
    null: the tasks' own."""
    processes: SharedProcesses = field(factory=SharedProcesses)
    """Processes of the env instances, with `backend: cpu`."""

    @property
    def independent_envs(self) -> bool:
        """Whether env instances can step one by one (lanes of single envs): it needs `backend: cpu`, since a GPU
        simulates all instances as one batch."""
        return self.backend == "cpu" and self.processes.apart is not False

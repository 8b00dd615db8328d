"""Keys of the spec."""

from __future__ import annotations

from typing import Literal

from attrs import field, frozen, validators

from vla_rl.plugins.envs.maniskill import checks
from vla_rl.toolkit.envs.settings import SharedProcesses


@frozen(kw_only=True)
class ManiSkillConfig:
    task: str | None = None
    """A task as ManiSkill registers it, such as PickCube-v1; or give `tasks`."""
    tasks: tuple[str, ...] = field(default=(), validator=checks.one_or_more)
    """Several tasks whose robots have the same actions and joints; on processors only."""
    instructions: dict[str, str] = field(factory=dict, validator=checks.known_instructions)
    """Task -> what the policy is told, for tasks that docs/simulators/maniskill.md does not list, or in other words."""
    cameras: dict[str, int] = field(factory=lambda: {"base_camera": 224}, validator=checks.some_cameras)
    """Camera -> height and width in pixels, in the order in which a model sees them; every task has to have them."""
    control_mode: str = "pd_ee_delta_pose"
    """What an action is: pd_ee_delta_pose (change of the hand's pose, and the gripper), pd_ee_delta_pos, or another
    that the robot offers."""
    reward: Literal["sparse", "dense"] = "sparse"
    """sparse: 1 at an action after which the task is solved, else 0. dense: ManiSkill's normalized_dense, up to 1."""
    backend: Literal["cpu", "gpu", "auto"] = "auto"
    """cpu: a simulator for each row. gpu: one batched simulator whose tensors stay on the device; only a GPU can.
    auto: gpu where the rows' device is one."""
    max_steps: int | None = field(
        default=None, validator=validators.optional(validators.and_(validators.ge(1), validators.le(10_000_000)))
    )
    """Step limit of every task; null: ManiSkill's."""
    train_states: int = field(default=1000, validator=[validators.ge(1), validators.le(900_000)])
    """Initial states per task in the train split."""
    show_goals: bool = True
    """Draw goals that ManiSkill hides from cameras (PickCube's green sphere): a policy without them cannot know where
    to go. false: the pixels of ManiSkill's own benchmarks."""
    fast_render: bool = False
    """Draw simplified meshes: several times as fast where a processor draws, and slightly other pixels, so not for
    reported results."""
    goals_in_state: bool = False
    """The state ends with the place of the goal, x, y and z in metres, as in the observations of ManiSkill's own visual
    baselines: how far away a green sphere in the air is, one camera hardly shows. 0 for tasks whose observations have
    none."""
    robot: str | None = None
    """In place of the tasks' own, by ManiSkill's name: panda_wristcam is a Panda arm with a `hand_camera`."""
    processes: SharedProcesses = field(factory=SharedProcesses)
    """Processes of the rows, with `backend: cpu`."""
    rows_apart = property(checks.rows_apart)

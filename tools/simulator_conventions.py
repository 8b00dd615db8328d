"""Measures the conventions of simulators: of the package itself, and of what our plugin makes of it.

A `Player` drives either of the two; `Truth` reads poses and drawings from the physics engine. The same functions
measure both, so a difference between their texts is a conversion of the plugin.
"""

# ruff: noqa: SLF001 - cameras of scenes have no public names

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

os.environ.setdefault("MUJOCO_GL", "egl")

Array = npt.NDArray[Any]
SIZE = 64
"""Side of images in pixels."""
MOVES = 3
"""Actions of a trial."""
CLOSE = 2e-3
"""Largest difference of numbers that count as the same: observations may be one sub-step old."""
FLIPS: Mapping[str, Callable[[Array], Array]] = {
    "": lambda image: image,
    "upside down, mirrored": lambda image: image[::-1],
    "mirrored": lambda image: image[:, ::-1],
    "upside down": lambda image: image[::-1, ::-1],
}
"""How an image differs from what the camera sees -> what undoes it."""


class Step(NamedTuple):
    """Result of an action."""

    reward: float
    terminated: bool
    truncated: bool
    success: bool | None
    """None: nothing says so."""
    success_type: str
    """Type of the entry that says so."""


class Truth(ABC):
    """What the physics engine knows, whoever drives it."""

    @abstractmethod
    def read_hand(self) -> tuple[Array, Array]:
        """Return position [m] and quaternion (w x y z) of the hand in the world."""

    @abstractmethod
    def read_opening(self) -> float:
        """Return how far the gripper is open; larger is wider."""

    @abstractmethod
    def read_numbers(self) -> Mapping[str, Array]:
        """Return what a state may consist of: name -> numbers."""

    @abstractmethod
    def read_things(self) -> Array:
        """Return the positions of movable things, float64 [things, 3], in metres."""

    @abstractmethod
    def read_camera(self) -> str:
        """Return where the camera hangs [m] and how many degrees high it sees."""

    @abstractmethod
    def compare_drawing(self, image: Array) -> tuple[str, bool]:
        """Return how an image differs from what the camera sees (a key of FLIPS), and whether the camera itself hangs
        upside down."""


class Player(ABC):
    """A simulator that is driven one action at a time."""

    low: Array
    high: Array
    gripper: int
    """Index of the gripper's number in an action, -1 at most."""
    still: Array
    """Action that leaves the robot where it is."""
    truth: Truth

    @abstractmethod
    def reset(self, seed: int) -> None:
        """Start an episode."""

    @abstractmethod
    def step(self, action: Array) -> Step: ...

    @abstractmethod
    def draw_image(self) -> Array: ...

    @abstractmethod
    def solve_task(self) -> Step:
        """Play an episode up to its success, and return the step that reports it."""

    def read_state(self) -> Array | None:
        """Return the state that a policy sees; None: a package that leaves it to its user."""
        return None

    def read_sentence(self) -> str:
        """Return what a policy is told to do, and where that is written."""
        return "none"

    @abstractmethod
    def list_cameras(self) -> str:
        """Return the names of the cameras that an observation has by default, in their order."""

    def close(self) -> None:  # noqa: B027 - optional
        """Free the simulator."""


# ---------------------------------------------------------------------------------------------------- truths


class MujocoTruth(Truth):
    """MuJoCo's model and data."""

    def __init__(self, model: Any, data: Any, camera: str, hand: tuple[str, str], fingers: Sequence[str]) -> None:
        """
        Args:
            hand: site or body of the hand's position, and body of its rotation.
            fingers: joints whose positions add up to the opening, or two bodies whose distance is.
        """
        self.model, self.data, self._camera, self._hand, self._fingers = model, data, camera, hand, fingers

    def read_hand(self) -> tuple[Array, Array]:
        import mujoco

        place, turned = self._hand
        is_site = mujoco.mj_name2id(self.model, mujoco.mjtObj.mjOBJ_SITE, place) >= 0
        position = (self.data.site(place) if is_site else self.data.body(place)).xpos
        return position.copy(), self.data.body(turned).xquat.copy()

    def read_opening(self) -> float:
        import mujoco

        if mujoco.mj_name2id(self.model, mujoco.mjtObj.mjOBJ_JOINT, self._fingers[0]) < 0:
            one, other = (self.data.body(name).xpos for name in self._fingers)
            return float(np.linalg.norm(one - other))
        return float(sum(abs(self.data.joint(name).qpos[0]) for name in self._fingers))

    def read_numbers(self) -> Mapping[str, Array]:
        numbers = name_rotations(*self.read_hand())
        joints = [self.data.joint(i) for i in range(self.model.njnt) if self.model.jnt_type[i] != 0]
        positions = np.array([joint.qpos[0] for joint in joints])
        speeds = np.array([joint.qvel[0] for joint in joints])
        fingers = [name for name in self._fingers if name in {joint.name for joint in joints}]
        numbers |= {"7 joint angles": positions[:7], "7 joint speeds": speeds[:7]}
        if fingers:
            numbers["2 finger joints"] = np.array([self.data.joint(name).qpos[0] for name in fingers])
        return numbers

    def read_things(self) -> Array:
        free = np.flatnonzero(self.model.jnt_type == 0)
        starts = self.model.jnt_qposadr[free]
        return np.array([self.data.qpos[start : start + 3].copy() for start in starts]).reshape(-1, 3)

    def read_camera(self) -> str:
        height = self.model.cam(self._camera).fovy[0]
        return describe_camera(self._camera, self.data.cam(self._camera).xpos, height)

    def compare_drawing(self, image: Array) -> tuple[str, bool]:
        import mujoco

        renderer = mujoco.Renderer(self.model, *image.shape[:2])
        try:
            renderer.update_scene(self.data, self._camera)
            drawn = renderer.render().astype(np.float64)
        finally:
            renderer.close()
        differences = {name: np.abs(undo(image) - drawn).mean() for name, undo in FLIPS.items()}
        upward = self.data.cam(self._camera).xmat.reshape(3, 3)[2, 1]
        return min(differences, key=lambda name: differences[name]), bool(upward < 0)


class SapienTruth(Truth):
    """PickCube of ManiSkill: its red cube shows which way an image is turned."""

    camera = "base_camera"

    def __init__(self, env: Callable[[], Any]) -> None:
        self._find_env = env

    def read_hand(self) -> tuple[Array, Array]:
        pose = self._find_env().agent.tcp_pose.raw_pose[0].double().numpy()
        return pose[:3].copy(), pose[3:].copy()

    def read_opening(self) -> float:
        return float(self._find_env().agent.robot.get_qpos()[0, -2:].sum())

    def read_numbers(self) -> Mapping[str, Array]:
        env = self._find_env()
        joints = env.agent.robot.get_qpos()[0].double().numpy()
        return name_rotations(*self.read_hand()) | {"7 joint angles": joints[:7], "2 finger joints": joints[7:]}

    def read_things(self) -> Array:
        return self._find_env().cube.pose.p.double().numpy().reshape(-1, 3).copy()

    def read_camera(self) -> str:
        parameters = self._find_env()._sensors[self.camera].get_params()
        outside, inside = (parameters[name][0].double().numpy() for name in ("extrinsic_cv", "intrinsic_cv"))
        height = np.degrees(2 * np.arctan(inside[1, 2] / inside[1, 1]))
        return describe_camera(self.camera, -outside[:3, :3].T @ outside[:3, 3], height)

    def compare_drawing(self, image: Array) -> tuple[str, bool]:
        env = self._find_env()
        parameters = env._sensors[self.camera].get_params()
        outside, inside = (parameters[name][0].double().numpy() for name in ("extrinsic_cv", "intrinsic_cv"))
        seen = inside @ (outside @ np.append(self.read_things()[0], 1.0))
        x, y = (seen[:2] / seen[2]).astype(int)
        redness = {name: float(undo(image)[y, x] @ np.array([1.0, -0.5, -0.5])) for name, undo in FLIPS.items()}
        return max(redness, key=lambda name: redness[name]), bool(-outside[1, 2] < 0)


def describe_camera(name: str, position: Array, height: float) -> str:
    """Return a camera's name, its place [m] and how many degrees high it sees."""
    place = ", ".join(f"{round(float(number), 3) + 0.0:g}" for number in position)
    return f"{name} at {place} m, {height:.0f} degrees high"


def name_rotations(position: Array, quaternion: Array) -> dict[str, Array]:
    """Return the pose of a hand in the forms that states have. A quaternion and its negative are one rotation, and two
    rotation vectors: the simulator's sign counts."""
    angle = 2 * np.arccos(np.clip(quaternion[0], -1, 1))
    return {
        "position": position,
        "rotation vector": quaternion[1:] / np.linalg.norm(quaternion[1:]) * angle,
        "quaternion x y z w": quaternion[[1, 2, 3, 0]],
        "quaternion w x y z": quaternion,
        "Euler angles": find_rotation(quaternion).as_euler("xyz"),
    }


def find_rotation(quaternion: Array) -> Any:
    """Return SciPy's rotation of a quaternion w x y z."""
    from scipy.spatial.transform import Rotation

    return Rotation.from_quat(quaternion[[1, 2, 3, 0]])


# -------------------------------------------------------------------------------------------------- measures


def measure_images(player: Player) -> str:
    """Return how an image lies compared with what the camera sees."""
    player.reset(0)
    flip, hangs = player.truth.compare_drawing(player.draw_image())
    turned = ("upside down" in flip) != hangs
    mirrored = "mirrored" in flip
    return ", ".join(filter(None, ["upside down" if turned else "upright", "mirrored" if mirrored else ""]))


def measure_camera(player: Player) -> str:
    """Return where the first camera hangs."""
    player.reset(0)
    return player.truth.read_camera()


def measure_gripper(player: Player) -> str:
    """Return which end of the range closes, and whether a third of the way does the same."""
    openings = {}
    low, high = player.low[player.gripper], player.high[player.gripper]
    middle = (low + high) / 2
    for value in (low, high, middle + (high - middle) / 3, middle + (low - middle) / 3):
        player.reset(0)
        for first, count in ((low, MOVES), (high, MOVES), (value, 2)):
            action = player.still.copy()
            action[player.gripper] = first
            for _ in range(count):
                player.step(action)
        openings[float(value)] = player.truth.read_opening()
    ends = sorted([float(low), float(high)], key=lambda value: openings[value])
    weak = [openings[float(middle + (end - middle) / 3)] for end in (low, high)]
    alike = all(np.isclose(a, openings[float(b)], atol=2e-4) for a, b in zip(weak, (low, high), strict=True))
    return f"{ends[0]:g} closes, {ends[1]:g} opens, {'the sign decides' if alike else 'the size counts'}"


def measure_moves(player: Player) -> str:
    """Return where the hand goes with the first three numbers of an action, as axes of the world and centimetres."""
    axes, lengths = [], []
    for number in range(min(3, len(player.low) - 1)):
        way = move_hand(player, number)[0]
        axes.append(name_axis(way))
        lengths.append(f"{np.abs(way).max() * 100:.0f}")
    return f"{', '.join(axes)} of the world; {MOVES} actions of 1: {', '.join(lengths)} cm"


def measure_turns(player: Player) -> str:
    """Return about which axes the hand turns with the numbers of an action from the fourth to the sixth."""
    turns = []
    for number in range(3, 6):
        _, before, after = move_hand(player, number)
        turns.append((find_rotation(after) * find_rotation(before).inv()).as_rotvec())
    if max(np.abs(turn).max() for turn in turns) < 1e-3:
        return "ignored"
    return f"about {', '.join(name_axis(turn) for turn in turns)} of the world"


def move_hand(player: Player, number: int) -> tuple[Array, Array, Array]:
    """Return the way of the hand [m] with 1 in one place of some actions, and its rotation before and after."""
    player.reset(0)
    for _ in range(MOVES):
        player.step(player.still)
    position, before = player.truth.read_hand()
    action = player.still.copy()
    action[number] = 1.0
    for _ in range(MOVES):
        player.step(action)
    end, after = player.truth.read_hand()
    return end - position, before, after


def name_axis(vector: Array) -> str:
    at = int(np.abs(vector).argmax())
    return f"{'+' if vector[at] > 0 else '-'}{'xyz'[at]}"


def measure_state(player: Player) -> str:
    """Return what the numbers of the state are, in their order."""
    player.reset(0)
    for _ in range(MOVES):
        player.step(player.still)
    state = player.read_state()
    if state is None:
        return "left to its user"
    candidates, parts, at = player.truth.read_numbers(), [], 0
    while at < len(state):
        fitting = [
            name
            for name, numbers in candidates.items()
            if len(numbers) <= len(state) - at and np.allclose(state[at : at + len(numbers)], numbers, atol=CLOSE)
        ]
        best = max(fitting, key=lambda name: len(candidates[name]), default="")
        parts.append(best or "1 other")
        at += len(candidates[best]) if best else 1
    return f"{len(state)}: {', '.join(parts)}"


def measure_seed(player: Player) -> str:
    """Return whether a seed (a plugin's state id) gives the same scene again, and another one another scene."""
    scenes = []
    for seed in (0, 0, 1, 0):
        player.reset(seed)
        scenes.append(player.truth.read_things())
    if np.array_equal(scenes[0], scenes[1]) and np.array_equal(scenes[0], scenes[3]):
        return "the scene" if not np.array_equal(scenes[0], scenes[2]) else "nothing"
    return "not the scene"


def measure_settling(player: Player) -> str:
    """Return after how many idle actions all things move by less than half a millimetre in an action."""
    player.reset(0)
    before, last = player.truth.read_things(), 0
    for number in range(1, 16):
        player.step(player.still)
        now = player.truth.read_things()
        if len(now) and np.abs(now - before).max() > 5e-4:
            last = number
        before = now
    return f"{last} actions" if last else "none"


def measure_limit(player: Player, most: int) -> str:
    """Return how an episode ends in which nothing happens."""
    player.reset(0)
    for number in range(1, most + 1):
        try:
            step = player.step(player.still)
        except ValueError:
            return f"ValueError at action {number}"
        if step.terminated or step.truncated:
            return f"{'terminated' if step.terminated else 'truncated'} after {number} actions"
    return f"no end within {most} actions"


def measure_success(player: Player) -> str:
    """Return what the action reports that solves a task."""
    step = player.solve_task()
    end = "terminated" if step.terminated else "truncated" if step.truncated else "continues"
    return f"{end}, reward {step.reward:.3g}, {step.success_type}"


def measure_replay(player: Player) -> str:
    """Return whether an episode from the same seed (a plugin's state id) is the same, whatever went before."""
    ends = []
    for seed in (0, 1, 0):
        player.reset(seed)
        action = player.still.copy()
        action[:2] = 1.0
        for _ in range(MOVES):
            player.step(action)
        parts = [*player.truth.read_hand(), player.truth.read_things()]
        ends.append(np.concatenate([part.ravel() for part in parts]))
    same = ends[0].shape == ends[2].shape and np.array_equal(ends[0], ends[2])
    return "the same episode" if same else "another episode"


@contextmanager
def keep_quiet() -> Iterator[None]:
    """Drop what packages print."""
    with redirect_stdout(StringIO()):
        yield

"""The tabletop simulator: N envs at once in plain torch, on any device, without GL.

The table is the square [-1, 1] x [-1, 1]; x points right and y up. Objects 0-2 are what the task chooses from (three
blocks to pick from, or three plates to put on, of different colours); object 3 is a distractor plate (`pick`) or the
block in the gripper (`put`). Scenes are drawn once for each split.

An action is (right, up, grip) in [-1, 1]: the gripper moves by `SPEED` times the first two, then closes where the
third is above 0 and opens otherwise. Closing catches the nearest block within `TOLERANCE`; a block falls at the second
consecutive step that opens.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from attrs import frozen

from vla_rl.core.capabilities import Offloadable
from vla_rl.core.contexts import EnvContext
from vla_rl.core.hookspecs import SimEnv
from vla_rl.core.randomness import generator
from vla_rl.core.types import Array, ArrayOrTensor, ChunkResult, Observation, ResetState
from vla_rl.plugins.envs.tabletop.config import TabletopConfig, describe_env
from vla_rl.plugins.envs.tabletop.render import Renderer
from vla_rl.plugins.envs.tabletop.tasks import COLOURS, TASKS

SPEED = 0.16
"""Table units per step at full speed."""
LEVELS = 2
"""Number of speed levels of the expert: its speeds are multiples of 1 / LEVELS."""
TOLERANCE = 0.16
"""Distance from the gripper, in x and in y, within which a block is caught."""
ON_PLATE = 0.2
"""Largest distance of a block on the plate from the plate's centre, in x and in y."""
LIMIT = 0.95
"""Bound of the gripper's position: it stays within [-LIMIT, LIMIT]."""


class Tabletop(SimEnv, Offloadable[Mapping[str, Any]]):
    """Tabletop tasks: pick the block, or put the block on the plate, of the colour that the instruction names."""

    def __init__(self, config: TabletopConfig, context: EnvContext):
        self.num_envs = context.num_envs
        self.device = torch.device(context.device)
        self._chunk = context.chunk
        task_names = config.tasks or tuple(task.name for task in TASKS)
        self._tasks = frozenset(i for i, task in enumerate(TASKS) if task.name in task_names)
        self.info = describe_env(config)
        self._render = Renderer(config.image_size, context.device)
        self._task = np.full(self.num_envs, min(self._tasks))
        self._state = {
            "gripper": torch.zeros(self.num_envs, 2),
            "closed": torch.zeros(self.num_envs, dtype=torch.bool),
            "held": torch.full((self.num_envs,), -1),
            "position": torch.zeros(self.num_envs, THINGS, 2),
            "colour": torch.zeros(self.num_envs, THINGS, dtype=torch.int64),
            "is_plate": torch.zeros(self.num_envs, THINGS, dtype=torch.bool),
            "target": torch.zeros(self.num_envs, dtype=torch.int64),
            "puts": torch.zeros(self.num_envs, dtype=torch.bool),
            "ended": torch.zeros(self.num_envs, dtype=torch.bool),
            "rewarded": torch.zeros(self.num_envs, dtype=torch.bool),
        }
        self._state = {name: tensor.to(self.device) for name, tensor in self._state.items()}

    def reset_states(self, split: str) -> tuple[ResetState, ...]:
        """Return the split's states of the configured tasks. Raise ValueError for a split other than train and eval."""
        if split not in SPLITS:
            raise ValueError(f"tabletop has no split {split!r}; splits: {', '.join(SPLITS)}")
        first, count = SPLITS[split]
        every = ((first + i, i % len(TASKS)) for i in range(count))
        return tuple(ResetState(id=i, task=TASKS[task].name) for i, task in every if task in self._tasks)

    def reset(self, env_ids: ArrayOrTensor, state_ids: ArrayOrTensor, seed: ArrayOrTensor) -> Observation:
        """Start episodes. Only the state id matters: `seed` is unused, since nothing is random during an episode."""
        indices = torch.as_tensor(env_ids, dtype=torch.int64).cpu()
        ids = torch.as_tensor(state_ids, dtype=torch.int64).cpu().numpy()
        if indices.shape != ids.shape or indices.ndim != 1:
            raise ValueError(f"reset needs as many envs as state ids, got {tuple(indices.shape)} and {ids.shape}")
        for split, (first, count) in SPLITS.items():
            chosen = (ids >= first) & (ids < first + count)
            if chosen.any():
                self.place_scenes(indices[torch.from_numpy(chosen)], split_scenes(split), ids[chosen] - first)
            ids = np.where(chosen, -1, ids)
        if (ids >= 0).any():
            raise ValueError(f"tabletop has no state {int(ids[ids >= 0][0])}; see reset_states for those there are")
        return self.observe_envs(indices)

    def place_scenes(self, env_ids: torch.Tensor, scenes: TabletopScenes, which: Any) -> None:
        """Put envs `env_ids` (int64 [R]) into the scenes `which` (int64 [R]) of a table of scenes."""
        state, indices = self._state, env_ids.to(self.device)

        def put_values(name: str, values: Any) -> None:
            state[name][indices] = torch.as_tensor(values[which]).to(self.device)

        self._task[env_ids.numpy()] = scenes.task[which]
        put_values("gripper", scenes.gripper)
        put_values("position", scenes.position)
        put_values("colour", scenes.colour)
        put_values("is_plate", scenes.is_plate)
        put_values("target", scenes.target)
        put_values("puts", scenes.starts_held)
        put_values("closed", scenes.starts_held)
        put_values("held", np.where(scenes.starts_held, THINGS - 1, -1))
        state["ended"][indices] = False
        state["rewarded"][indices] = False

    def move_gripper(self, gripper: torch.Tensor, closed: torch.Tensor | None = None) -> None:
        """Move the grippers (float32 [N, 2]) with what they hold, and open or close them."""
        self._state["gripper"] = gripper.clamp(-LIMIT, LIMIT).to(self.device)
        if closed is not None:
            self._state["closed"] = closed.to(self.device)
        self._carry_objects(torch.ones_like(self._state["closed"]))

    def observe_envs(self, env_ids: torch.Tensor | None = None) -> Observation:
        """Render all envs, or those numbered int64 [R]."""
        names = ("gripper", "closed", "position", "colour", "is_plate", "held")
        index = slice(None) if env_ids is None else env_ids.to(self.device)
        gripper, closed, position, colour, is_plate, held = (self._state[name][index] for name in names)
        overhead, wrist = self._render(gripper, closed, position, colour, is_plate)
        flags = torch.stack([closed, held >= 0], dim=1).to(torch.float32) * 2 - 1
        task = self._task if env_ids is None else self._task[env_ids.numpy()]
        return Observation(
            images={"overhead": overhead, "wrist": wrist},
            instructions=tuple(TASKS[i].instruction for i in task),
            state=torch.cat([gripper, flags], dim=1),
        )

    def chunk_step(self, actions: ArrayOrTensor, active: ArrayOrTensor, stop_at_end: bool) -> ChunkResult:
        moves = torch.as_tensor(actions, dtype=torch.float32).to(self.device)
        running = torch.as_tensor(active, dtype=torch.bool).to(self.device)
        if moves.ndim != 3 or moves.shape[::2] != (self.num_envs, 3) or running.shape != (self.num_envs,):
            raise ValueError(
                f"tabletop needs actions [{self.num_envs}, C, 3] and active [{self.num_envs}], "
                f"got {list(moves.shape)} and {list(running.shape)}"
            )
        state = self._state
        steps = []
        for action in moves.unbind(1):
            self._step_envs(action, running)
            success = self._find_success()
            over = success | self._find_failure()
            terminated = running & over & ~state["ended"]
            reward = running & success & ~state["rewarded"]
            state["ended"] = torch.where(running, over, state["ended"])
            state["rewarded"] = state["rewarded"] | reward
            steps.append((reward.to(torch.float32), terminated, running, success & running))
            if stop_at_end:
                running = running & ~terminated
        rewards, terminated, executed, succeeded = (torch.stack(parts, dim=1) for parts in zip(*steps, strict=True))
        return ChunkResult(
            obs=self.observe_envs(),
            rewards=rewards,
            terminated=terminated,
            truncated=torch.zeros_like(terminated),
            executed=executed,
            success=self._find_success(),
            succeeded=succeeded,
        )

    def expert_chunk(self) -> torch.Tensor:
        """Return the expert's next chunk: straight to the named object at full speed, then grasp or release."""
        state = self._state
        goal = state["position"][torch.arange(self.num_envs, device=self.device), state["target"]]
        gripper, actions = state["gripper"], []
        for _ in range(self._chunk):
            move = _quantise_move(goal - gripper)
            gripper = gripper + SPEED * move
            arrived = (_quantise_move(goal - gripper) == 0).all(1)
            grip = torch.where(arrived ^ state["puts"], 1.0, -1.0)
            actions.append(torch.cat([move, grip[:, None]], dim=1))
        return torch.stack(actions, dim=1)

    def snapshot(self) -> Mapping[str, Any]:
        """Return everything that `restore` needs; tensors are copies in host memory."""
        return {"task": self._task.copy(), **{name: tensor.cpu().clone() for name, tensor in self._state.items()}}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        self._task = snapshot["task"].copy()
        self._state = {name: snapshot[name].clone().to(self.device) for name in self._state}

    def _step_envs(self, action: torch.Tensor, running: torch.Tensor) -> None:
        state = self._state
        moved = (state["gripper"] + SPEED * action[:, :2]).clamp(-LIMIT, LIMIT)
        state["gripper"] = torch.where(running[:, None], moved, state["gripper"])
        was_closed = state["closed"]
        state["closed"] = torch.where(running, action[:, 2] > 0, was_closed)
        self._carry_objects(running)
        distance = (state["position"] - state["gripper"][:, None]).abs().amax(-1)
        distance = torch.where(state["is_plate"] | (distance > TOLERANCE), torch.inf, distance)
        nearest, block = distance.min(1)
        caught = torch.where(state["closed"] & (nearest < torch.inf), block, -1)
        still_held = torch.where(state["closed"] | was_closed, state["held"], -1)
        held = torch.where(state["held"] >= 0, still_held, caught)
        state["held"] = torch.where(running, held, state["held"])
        self._carry_objects(running)

    def _carry_objects(self, running: torch.Tensor) -> None:
        """Move held objects to where the gripper is."""
        state = self._state
        carried = (torch.arange(THINGS, device=self.device) == state["held"][:, None]) & running[:, None]
        state["position"] = torch.where(carried[..., None], state["gripper"][:, None], state["position"])

    def _find_success(self) -> torch.Tensor:
        state = self._state
        target = state["target"][:, None]
        goal = state["position"].gather(1, target[..., None].expand(-1, 1, 2))[:, 0]
        placed = (state["position"][:, -1] - goal).abs().amax(-1) <= ON_PLATE
        return torch.where(state["puts"], placed & (state["held"] < 0), state["held"] == state["target"])

    def _find_failure(self) -> torch.Tensor:
        """Return bool [N]: the wrong block is in the gripper, or the block was released elsewhere than on the plate."""
        state = self._state
        wrong = (state["held"] >= 0) & (state["held"] != state["target"])
        return torch.where(state["puts"], state["held"] < 0, wrong) & ~self._find_success()


def _quantise_move(way: torch.Tensor) -> torch.Tensor:
    """Return the expert's next move over a remaining distance [N, 2]."""
    return (way / SPEED * LEVELS).round().clamp(-LEVELS, LEVELS) / LEVELS


SPLITS = {"train": (0, 24_000), "eval": (1_000_000, 800)}
"""Split -> (first state id, number of states). State i of a split has task i modulo the number of tasks."""
THINGS = 4
REACH = 0.8
"""Bound of object positions: they are within [-REACH, REACH]."""
START = 0.35
"""Bound of the gripper's start: it is within [-START, START]."""
GAP = 0.42
"""Least distance between two objects, and between an object and the start of the gripper (Chebyshev)."""
_TRIES = 8
_BLOCK = 2000


@frozen(kw_only=True, eq=False)
class TabletopScenes:
    """A table of S scenes as NumPy arrays."""

    task: Array
    """int64 [S]: index into `TASKS`."""
    gripper: Array
    """float32 [S, 2]: position of the gripper."""
    position: Array
    """float32 [S, 4, 2]: positions of the objects."""
    colour: Array
    """int64 [S, 4]: index into `COLOURS`."""
    is_plate: Array
    """bool [S, 4]: plate, else block."""
    target: Array
    """int64 [S]: object that the instruction names."""
    starts_held: Array
    """bool [S]: object 3 starts in the gripper."""

    def __len__(self) -> int:
        return len(self.task)


def draw_scenes(rng: np.random.Generator, count: int) -> TabletopScenes:
    """Draw scenes, tasks in turn; the same generator state gives the same scenes."""
    task = np.arange(count) % len(TASKS)
    starts_held = np.array([t.verb == "put" for t in TASKS])[task]
    gripper, position = _draw_positions(rng, count, starts_held)
    palette = np.argsort(rng.random((count, len(COLOURS))), axis=1)[:, : THINGS - 1]
    target = rng.integers(THINGS - 1, size=count)
    target_colour = np.array([t.colour for t in TASKS])[task]
    rows = np.arange(count)
    # The wanted colour takes the target's place; where it was drawn elsewhere, the two swap.
    present = palette == target_colour[:, None]
    palette = np.where(present, palette[rows, target][:, None], palette)
    palette[rows, target] = target_colour
    extra = rng.integers(len(COLOURS), size=count)
    colour = np.concatenate([palette, extra[:, None]], axis=1)
    is_plate = np.repeat(starts_held[:, None], THINGS, axis=1)
    is_plate[:, -1] = ~starts_held
    return TabletopScenes(
        task=task,
        gripper=gripper,
        position=position,
        colour=colour,
        is_plate=is_plate,
        target=target,
        starts_held=starts_held,
    )


@cache
def split_scenes(split: str) -> TabletopScenes:
    """Return all scenes of a split, which depend on its name alone. The arrays are shared: do not write to them."""
    return draw_scenes(generator(0, f"tabletop/{split}"), SPLITS[split][1])


def _draw_positions(rng: np.random.Generator, count: int, starts_held: Array) -> tuple[Array, Array]:
    """Return positions of the gripper [S, 2] and of objects [S, 4, 2], none closer than GAP."""
    gripper = np.empty((count, 2), np.float32)
    position = np.empty((count, THINGS, 2), np.float32)
    left = np.arange(count)
    while len(left):
        block, left = left[:_BLOCK], left[_BLOCK:]
        starts = rng.uniform(-START, START, (len(block), _TRIES, 1, 2))
        things = rng.uniform(-REACH, REACH, (len(block), _TRIES, THINGS, 2))
        held = starts_held[block, None, None]
        things[:, :, -1] = np.where(held, starts[:, :, 0], things[:, :, -1])
        points = np.concatenate([starts, things], axis=2)
        distance = np.abs(points[:, :, :, None] - points[:, :, None]).max(-1)
        distance += np.eye(THINGS + 1) * 9
        distance[:, :, 0, -1] += 9 * held[..., 0]  # the gripper is where the block it holds is
        distance[:, :, -1, 0] += 9 * held[..., 0]
        fits = distance.min((2, 3)) >= GAP
        first, has_fit = fits.argmax(1), fits.any(1)
        gripper[block[has_fit]] = starts[has_fit, first[has_fit], 0]
        position[block[has_fit]] = things[has_fit, first[has_fit]]
        left = np.concatenate([left, block[~has_fit]])
    return gripper, position

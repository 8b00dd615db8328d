"""Absolute targets of joints against differences to the state, on an arm that has to be driven by its joints.

    OMP_NUM_THREADS=1 python benchmarks/relative_actions.py [--seeds 0 1 2] [--episodes 1000] [--json FILE]

The tabletop simulator behind an arm of two joints: an action is a target of each joint and of the gripper, the state
holds the joints, and the expert's actions are recorded once. `pi0` (preset: tiny) clones them from the same random
weights, with the same samples and steps, with `model.actions: absolute` and with `{relative_to: state}`. Greedy success
on the evaluation states, with 95 % intervals.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import attrs
import torch
import yaml

from vla_rl.core.contexts import EnvContext
from vla_rl.core.declarations import EnvPlugin
from vla_rl.core.spec.spec import parse_spec
from vla_rl.core.types import ArrayOrTensor, ChunkResult, Observation
from vla_rl.plugins.envs.tabletop.config import TabletopConfig
from vla_rl.plugins.envs.tabletop.simulator import LIMIT, SPEED, Tabletop
from vla_rl.runtime.start import clone

LINK = 1.6
"""Length of both links, in table units."""
BASE = -1.9
"""Height of the arm's base below the table's centre."""
CASES: dict[str, Any] = {"absolute": "absolute", "relative": {"relative_to": "state"}}


def solve_joints(position: torch.Tensor) -> torch.Tensor:
    """Return the angles [..., 2] of shoulder and elbow at which the gripper is at a position [..., 2] of the table."""
    right, up = position[..., 0], position[..., 1] - BASE
    bend = torch.arccos(((right**2 + up**2) / (2 * LINK**2) - 1).clamp(-1, 1))
    return torch.stack([torch.atan2(up, right) - bend / 2, bend], dim=-1)


def place_gripper(joints: torch.Tensor) -> torch.Tensor:
    """Return the position [..., 2] of the gripper for angles [..., 2]."""
    first, second = joints[..., 0], joints[..., 0] + joints[..., 1]
    return torch.stack([LINK * (first.cos() + second.cos()), BASE + LINK * (first.sin() + second.sin())], dim=-1)


class JointedTabletop(Tabletop):
    """The tabletop, driven by targets of an arm's joints. An arm too slow for a target goes as far as it can."""

    def __init__(self, config: TabletopConfig, context: EnvContext) -> None:
        super().__init__(config, context)
        side = torch.linspace(-LIMIT, LIMIT, 41)
        reached = solve_joints(torch.cartesian_prod(side, side))
        low, high = (bound.tolist() for bound in (reached.amin(0), reached.amax(0)))
        self.info = attrs.evolve(
            self.info,
            action_low=(*low, -1.0),
            action_high=(*high, 1.0),
            action_names=("shoulder", "elbow", "gripper"),
            state_names=("shoulder", "elbow", "gripper", "holds"),
        )

    def observe_envs(self, env_ids: torch.Tensor | None = None) -> Observation:
        obs = super().observe_envs(env_ids)
        state = torch.as_tensor(obs.state)
        return attrs.evolve(obs, state=torch.cat([solve_joints(state[:, :2]), state[:, 2:]], dim=1))

    def chunk_step(self, actions: ArrayOrTensor, active: ArrayOrTensor, stop_at_end: bool) -> ChunkResult:
        targets = torch.as_tensor(actions, dtype=torch.float32).to(self.device)
        position, moves = self._state["gripper"], []
        for target in targets.unbind(1):
            move = ((place_gripper(target[:, :2]) - position) / SPEED).clamp(-1, 1)
            position = (position + SPEED * move).clamp(-LIMIT, LIMIT)
            moves.append(torch.cat([move, target[:, 2:]], dim=1))
        return super().chunk_step(torch.stack(moves, dim=1), active, stop_at_end)

    def expert_chunk(self) -> torch.Tensor:
        position, targets = self._state["gripper"], []
        for move in super().expert_chunk().unbind(1):
            position = (position + SPEED * move[:, :2]).clamp(-LIMIT, LIMIT)
            targets.append(torch.cat([solve_joints(position), move[:, 2:]], dim=1))
        return torch.stack(targets, dim=1)


vla_rl_plugins = {
    "env": {
        "jointed": EnvPlugin(
            config=TabletopConfig, build=JointedTabletop, summary="the tabletop, by an arm's joints", expert=True
        )
    }
}


def spec_of(options: argparse.Namespace, seed: int = 0, actions: Any = None, folder: str = "/none") -> dict[str, Any]:
    data = {"type": "lerobot", "folder": folder}
    return {
        "name": "relative-actions",
        "seed": seed,
        "plugins": [str(Path(__file__).resolve())],
        "model": {
            "type": "pi0",
            "preset": "tiny",
            "cameras": ["wrist"],
            "train_expert_only": False,
            "actions": actions,
        },
        "env": {"type": "jointed", "num_envs": 64, "tasks": options.tasks},
        "rollout": {"chunk": 4, "episodes": 64, "group_size": 2},
        "imitation": {
            "data": data,
            "statistics": "data",
            "steps": options.steps,
            "batch": 32,
            "lr": 1e-3,
            "lr_schedule": "cosine",
            "eval_every": options.steps // 4,
        },
        "algorithm": {"type": "grpo"},
        "train": {"steps": 1, "lr": 1e-3, "micro_batch": 32},
        "eval": {"before": False, "episodes_per_task": options.evaluations // len(options.tasks)},
        "hooks": [{"type": "jsonl"}],
        "runtime": {"backend": "local"},
    }


def record_expert(options: argparse.Namespace, folder: Path) -> None:
    """Record the expert's episodes as a data set in lerobot's format."""
    spec = folder.with_suffix(".yaml")
    spec.write_text(yaml.safe_dump(spec_of(options)))
    tool = Path(__file__).resolve().parents[1] / "tools" / "record_expert.py"
    settings = ["--episodes", str(options.episodes), "--noise", str(options.noise)]
    command = [sys.executable, str(tool), str(spec), str(folder), *settings]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)


def cloned(options: argparse.Namespace, seed: int, actions: Any, data: Path, folder: Path) -> list[dict[str, float]]:
    """Return success with its interval at each evaluation."""
    clone(parse_spec(spec_of(options, seed, actions, str(data))), folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = ("success_rate", "success_low", "success_high", "episodes")
    return [{name: line[f"eval/{name}"] for name in names} for line in lines if "eval/success_rate" in line]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--episodes", type=int, default=1000, help="demonstrations")
    parser.add_argument("--noise", type=float, default=0.03, help="of the demonstrations, in radians")
    parser.add_argument("--steps", type=int, default=600, help="optimiser steps")
    parser.add_argument("--tasks", nargs="+", default=["pick_red", "put_red"])
    parser.add_argument("--evaluations", type=int, default=200, help="evaluation episodes")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "expert"
        record_expert(options, data)
        for seed in options.seeds:
            for case, actions in CASES.items():
                found = cloned(options, seed, actions, data, Path(scratch) / f"{case}-{seed}")
                rows.append({"case": case, "seed": seed, "evaluations": found})
                last = found[-1]
                rates = " ".join(f"{100 * point['success_rate']:5.1f}" for point in found)
                interval = f"[{100 * last['success_low']:.1f}, {100 * last['success_high']:.1f}]"
                print(f"seed {seed}  {case}: {rates} % {interval} of {last['episodes']:.0f}", flush=True)
                if options.json:
                    options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

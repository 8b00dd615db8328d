"""Make the base checkpoint of the quickstart: a tiny OpenVLA-OFT that clones the tabletop's scripted expert and is
stopped at about half success, so that reinforcement learning has something to improve.

Every update sees fresh scenes: an endless stream separate from the simulator's own splits, with the gripper at the
start, on its way, near the goal or anywhere, labelled by the expert (DAgger's idea: Ross et al. 2011). Three phases:
  1. see: a linear probe on each projected patch names the thing with its centre in it and where. This trains the
     vision transformers and the projector; from actions alone a network this small learns to see very slowly;
  2. find: a second probe reads from the Llama's hidden states which way the named thing is. This binds words to places;
  3. act: imitation of the expert's chunks, until the first evaluation at or above `--stop`.
The probes stay on as auxiliary losses and are thrown away at the end.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from figures import report
from vla_rl.core.contexts import EnvContext, ModelContext
from vla_rl.core.randomness import Noise, generator
from vla_rl.core.types import Observation
from vla_rl.plugins.envs.tabletop import plugin as tabletop
from vla_rl.plugins.envs.tabletop.config import TabletopConfig
from vla_rl.plugins.envs.tabletop.render import WRIST_VIEW
from vla_rl.plugins.envs.tabletop.simulator import THINGS, Tabletop, draw_scenes
from vla_rl.plugins.envs.tabletop.tasks import COLOURS, TASKS
from vla_rl.plugins.models.openvla import openvla_oft

ROOT = Path(__file__).parents[1]
OUT = ROOT / "src/vla_rl/plugins/models/openvla/checkpoints/tabletop"
CHUNK, CHUNKS, GRID = 4, 4, 4
KINDS = 2 * len(COLOURS)
"""Kinds of things: a block and a plate of each colour."""


class Stream:
    """Training states without end: `next()` puts all rows of the simulator into new ones."""

    def __init__(self, env: Tabletop, seed: int, alone: float, puts: float):
        self.env, self._alone, self._puts = env, alone, puts
        self._rng = generator(seed, "base checkpoint")
        self._torch = torch.Generator().manual_seed(seed)
        self._draws = self._batches()

    def next(self) -> Observation:
        scenes, which = next(self._draws)
        env, rows = self.env, self.env.num_envs
        env.place_scenes(torch.arange(rows), scenes, which)
        now = env.snapshot()
        start, goal = now["gripper"], now["position"][torch.arange(rows), now["target"]]
        choice, way = torch.rand(2, rows, 1, generator=self._torch)
        jitter = torch.randn(rows, 2, generator=self._torch)
        anywhere = torch.rand(rows, 2, generator=self._torch) * 1.8 - 0.9
        gripper = torch.where(choice < 0.35, start, start + way * (goal - start) + 0.08 * jitter)
        gripper = torch.where(choice < 0.65, gripper, goal + 0.15 * jitter)
        gripper = torch.where(choice < 0.85, gripper, anywhere)
        env.move_gripper(gripper, now["closed"] ^ (torch.rand(rows, generator=self._torch) < 0.1))
        return env.observe_envs()

    def _batches(self, pool: int = 2048) -> Iterator[tuple[Any, Any]]:
        rows = self.env.num_envs
        while True:
            scenes = draw_scenes(self._rng, pool)
            # In some scenes the named thing is the only one: going to what is there is learned before words are.
            lone = self._rng.random(pool) < self._alone
            away = lone[:, None] & (np.arange(THINGS) != scenes.target[:, None])
            away[:, -1] &= ~scenes.starts_held
            scenes.position[away] = 9.0
            share = np.where(scenes.starts_held, self._puts, 1 - self._puts)
            order = self._rng.choice(pool, pool, p=share / share.sum())
            yield from ((scenes, order[i : i + rows]) for i in range(0, pool - rows + 1, rows))


class Probes(nn.Module):
    """Auxiliary read-outs, for training only."""

    def __init__(self, width: int, seed: int):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.things = nn.Linear(width, KINDS + 2)
            self.way = nn.Linear(width, 2)

    def see(self, patches: Tensor, env: Tabletop) -> Tensor:
        """What is in each patch of [B, 2 * patches, D]: kinds (cross-entropy) and place (squared error)."""
        kinds, places, any_ = patch_labels(env)
        out = self.things(patches)
        kind_loss = F.binary_cross_entropy_with_logits(out[..., :KINDS], kinds) * KINDS
        place_loss = ((out[..., KINDS:] - places).square().sum(-1) * any_).sum() / any_.sum()
        return kind_loss + 3 * place_loss

    def reach(self, hidden: Tensor, env: Tabletop) -> Tensor:
        """The way from the gripper to the named thing, from each hidden state [B, R, D] that an action is read from."""
        now = env.snapshot()
        way = now["position"][torch.arange(len(hidden)), now["target"]] - now["gripper"]
        return (self.way(hidden) - way[:, None]).square().mean()


def patch_labels(env: Tabletop) -> tuple[Tensor, Tensor, Tensor]:
    """Per patch of the overhead, then the wrist image: kinds [B, P, K], place in it [B, P, 2], anything [B, P]."""
    now = env.snapshot()
    rows = env.num_envs
    kind = now["colour"] + len(COLOURS) * now["is_plate"]
    loose = torch.arange(THINGS) != now["held"][:, None]
    kinds = torch.zeros(rows, 2, GRID * GRID, KINDS)
    places, anything = torch.zeros(rows, 2, GRID * GRID, 2), torch.zeros(rows, 2, GRID * GRID)
    row = torch.arange(rows)[:, None].expand(rows, THINGS)
    from_gripper = (now["position"] - now["gripper"][:, None]) / WRIST_VIEW
    for camera, place in enumerate((now["position"], from_gripper)):
        column, line = ((place * torch.tensor([1.0, -1.0]) + 1) * GRID / 2).floor().clamp(0, GRID - 1).long().unbind(-1)
        seen = (place.abs() < 1).all(-1) & loose
        at = (row[seen], camera, (line * GRID + column)[seen])
        kinds[(*at, kind[seen])] = 1.0
        places[at] = place[seen]
        anything[at] = 1.0
    return kinds.flatten(1, 2), places.flatten(1, 2), anything.flatten(1, 2)


def success(
    policy: Any, *, split: str = "eval", greedy: bool = True, blank: bool = False, shuffle: bool = False
) -> tuple[float, list[float]]:
    """Success on 200 states, in all and by task; with all images grey, or with another colour asked for."""
    env = tabletop.build(TabletopConfig(), EnvContext(chunk=CHUNK, num_envs=200))
    states = env.reset_states(split)[:200]
    rows = np.arange(len(states))
    obs = env.reset(rows, np.array([state.id for state in states]), np.zeros(len(states), np.int64))
    tasks = np.array([[task.name for task in TASKS].index(state.task) for state in states])
    colours = len(COLOURS)
    other = tasks // colours * colours + (tasks % colours + 1 + rows // len(TASKS) % (colours - 1)) % colours
    active, won = np.ones(len(states), bool), np.zeros(len(states), bool)
    for chunk in range(CHUNKS):
        if blank:
            obs = attrs.evolve(obs, images={name: torch.full_like(image, 115) for name, image in obs.images.items()})
        if shuffle:
            obs = attrs.evolve(obs, instructions=tuple(TASKS[i].instruction for i in other))
        noise = Noise(0, "base checkpoint/evaluation", rows.tolist(), [0] * len(rows), [chunk] * len(rows))
        result = env.chunk_step(policy.sample_chunk(obs, noise, greedy).actions, active, True)
        won |= result.rewards.numpy().sum(1) > 0
        active &= ~result.terminated.numpy().any(1)
        obs = result.obs
    return float(won.mean()), [float(won[tasks == i].mean()) for i in range(len(TASKS))]


def train(options: argparse.Namespace) -> Any:
    """-> the policy, at the first evaluation with enough success. Raises SystemExit when it never gets there."""
    env = tabletop.build(TabletopConfig(), EnvContext(chunk=CHUNK, num_envs=options.batch))
    config = openvla_oft.config(preset="tiny", unnorm_key="tabletop")
    policy = openvla_oft.build(config, ModelContext(seed=options.seed, chunk=CHUNK, env=env.info))
    network = policy.module.vla
    probes = Probes(network.config.text_config.hidden_size, options.seed)
    trained = [p for p in policy.module.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW([*trained, *probes.parameters()], lr=options.lr, betas=(0.9, 0.98))
    seen: dict[str, Tensor] = {}
    network.projector.register_forward_hook(lambda module, args, out: seen.update(patches=out))
    network.language_model.model.norm.register_forward_hook(lambda module, args, out: seen.update(hidden=out))
    reads = CHUNK * env.info.action_dim
    begun = time.perf_counter()

    def update(loss: Tensor, lr: float) -> None:
        for group in optimiser.param_groups:
            group["lr"] = lr
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimiser.step()

    def report(phase: str, number: int, text: str) -> None:
        print(f"{phase:>5} {number:5}  {text}  {time.perf_counter() - begun:.0f} s", flush=True)

    stream = Stream(env, options.seed, options.alone, puts=0.5)
    for number in range(options.see):
        obs = stream.next()
        pixels = policy.images([obs.images[name] for name in env.info.cameras])
        loss = probes.see(network.projector(network.vision_backbone(pixels)), env)
        update(loss, options.lr * min(1.0, (number + 1) / 50))
        if (number + 1) % 100 == 0:
            report("see", number + 1, f"loss {loss.item():.3f}")

    def step(find_only: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Losses of imitation and of finding the named thing, and their sum."""
        obs = stream.next()
        imitation = policy.imitation_loss(obs, env.expert_chunk())
        prompt, hidden = policy.prompts.take_prompts(obs.instructions), seen["hidden"]
        last = prompt.start + hidden.shape[1] - prompt.ids.shape[1]
        read = hidden[torch.arange(len(hidden))[:, None], last[:, None] + torch.arange(reads)]
        way = probes.reach(read, env)
        auxiliary = 0.3 * probes.see(seen["patches"], env) + 6 * way
        return imitation, way, auxiliary if find_only else imitation + auxiliary

    for number in range(options.find):
        _, way, loss = step(find_only=True)
        cosine = 0.6 + 0.4 * math.cos(math.pi * number / options.find)
        update(loss, options.lr * min(cosine, (number + 1) / 100))
        if (number + 1) % 100 == 0:
            report("find", number + 1, f"off by {way.sqrt().item():.3f}")
    stream = Stream(env, options.seed + 1, options.alone, puts=options.puts)
    for number in range(options.act):
        imitation, _, loss = step(find_only=False)
        update(loss, options.act_lr * min(1.0, (number + 1) / 20))
        if (number + 1) % options.every == 0:
            rate, tasks = success(policy, split="train")
            report("act", number + 1, f"loss {imitation.item():.3f}  success {rate:.3f} {tasks}")
            if rate >= options.stop:
                return policy
    raise SystemExit(f"success stayed below {options.stop} for {options.act} updates; nothing was written")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the checkpoint")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=64, help="samples an update")
    parser.add_argument("--lr", type=float, default=2e-3, help="AdamW's learning rate, after a linear warm-up")
    parser.add_argument("--act-lr", type=float, default=5e-4, help="the same in phase 3")
    parser.add_argument("--see", type=int, default=500, help="updates of phase 1")
    parser.add_argument("--find", type=int, default=2000, help="updates of phase 2")
    parser.add_argument("--act", type=int, default=2000, help="most updates of phase 3")
    parser.add_argument(
        "--puts", type=float, default=0.12, help="share of put tasks among the demonstrations of phase 3"
    )
    parser.add_argument("--alone", type=float, default=0.3, help="share of scenes with the named thing alone")
    parser.add_argument("--stop", type=float, default=0.5, help="greedy success on 200 train states to stop at")
    parser.add_argument("--every", type=int, default=10, help="updates between evaluations")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    begun = time.perf_counter()
    policy = train(options)
    minutes = (time.perf_counter() - begun) / 60
    policy.save(options.out)
    figures = {
        "success_greedy": success(policy)[0],
        "success_sampled": success(policy, greedy=False)[0],
        "success_images_blanked": success(policy, blank=True)[0],
        "success_instructions_shuffled": success(policy, shuffle=True)[0],
        "minutes": minutes,
        "parameters": float(sum(p.numel() for p in policy.module.parameters())),
        "bytes": float(sum(path.stat().st_size for path in options.out.iterdir())),
    }
    report(figures, options.out, options.json)


if __name__ == "__main__":
    main()

"""Make SRPO's encoder for the built-in simulator: a small V-JEPA 2 that has learned what progress looks like there.

It sees the wrist camera, and is taught with the simulator's own geometry on scenes of its own: the embedding of a clip
lies as far from its task's prototype as the gripper (or the block in it) is from the goal at the end of the clip.
Clips are the beginnings of a scripted expert's trajectories, most of which are disturbed. So this is the stand-in, in
a world of squares and rings, for an encoder that knows the domain; it says nothing about V-JEPA 2's own features.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from attrs import frozen
from scipy.stats import spearmanr
from torch import Tensor, nn
from transformers import VJEPA2Config, VJEPA2Model

from vla_rl.core.randomness import generator
from vla_rl.core.types import Context
from vla_rl.plugins.algorithms.srpo.encoder import BUILTIN, Frames, frame_indices, preprocess
from vla_rl.plugins.envs.tabletop import TabletopConfig
from vla_rl.plugins.envs.tabletop import plugin as tabletop
from vla_rl.plugins.envs.tabletop.scenes import draw_scenes
from vla_rl.plugins.envs.tabletop.simulator import Tabletop
from vla_rl.plugins.envs.tabletop.tasks import TASKS

OUT = BUILTIN / "tabletop"
CHUNK, CHUNKS, FRAMES, SIZE = 4, 5, 4, 64
UNIT = 4.0
"""Length in the embedding of one unit of the table."""


@frozen(eq=False)
class Films:
    """N trajectories, disturbed to different degrees."""

    frames: Frames
    """uint8 [N, chunks + 1, H, W, 3] of the wrist camera."""
    length: Frames
    """int64 [N]: frames until the episode ended."""
    distance: Frames
    """float32 [N, chunks + 1] to the goal, in units of the table."""
    task: Frames
    """int64 [N]."""
    success: Frames
    """bool [N]."""


def play(env: Tabletop, rng: np.random.Generator) -> Films:
    """One episode a row, in new scenes."""
    rows = env.num_envs
    scenes = draw_scenes(rng, rows)
    env.place(torch.arange(rows), scenes, np.arange(rows))
    noise = rng.uniform(0, 1, rows) * (rng.random(rows) < 0.8)
    length, active, success = np.ones(rows, np.int64), np.ones(rows, bool), np.zeros(rows, bool)
    frames, distance = [wrist(env)], [to_goal(env)]
    for _ in range(CHUNKS):
        aim = rng.normal(size=(rows, 1, 3)) * [1.0, 1.0, 0.6]
        tremor = 0.3 * rng.normal(size=(rows, CHUNK, 3))
        actions = env.expert_chunk().cpu().numpy() + noise[:, None, None] * (aim + tremor)
        result = env.chunk_step(np.clip(actions, -1, 1).astype(np.float32), active, True)
        length += active
        success |= active & result.succeeded.cpu().numpy().any(1)
        frames.append(wrist(env))
        distance.append(to_goal(env))
        active &= ~result.terminated.cpu().numpy().any(1)
    return Films(np.stack(frames, 1), length, np.stack(distance, 1), scenes.task, success)


def wrist(env: Tabletop) -> Frames:
    image: Frames = env.observe().images["wrist"].cpu().numpy()
    return image


def to_goal(env: Tabletop) -> Frames:
    """From the gripper to the named block, or from the block that was in it to the named plate. float32 [N]."""
    now = env.snapshot()
    goal = now["position"][torch.arange(env.num_envs), now["target"]]
    mover = torch.where(now["puts"][:, None], now["position"][:, -1], now["gripper"])
    distance: Frames = (mover - goal).norm(dim=1).numpy()
    return distance


def prepared(films: Films) -> Tensor:
    """Every frame as the encoder is given it: float32 [N, chunks + 1, 3, S, S]."""
    return preprocess(films.frames.reshape(-1, *films.frames.shape[2:]), SIZE, "cpu").unflatten(
        0, films.frames.shape[:2]
    )


def distances(model: VJEPA2Model, prototypes: Tensor, seen: Tensor, task: Frames, ends: Frames) -> Tensor:
    """Of the beginnings of B films, `ends` frames each, to their tasks' prototypes in the embedding, in units of the
    table. float32 [B]."""
    chosen = np.stack([frame_indices(int(end), FRAMES) for end in ends])
    clips = seen[torch.arange(len(seen))[:, None], torch.from_numpy(chosen)]
    embedding = model.get_vision_features(clips).mean(1)
    return (embedding - prototypes[torch.from_numpy(task)]).square().sum(1).add(1e-8).sqrt() / UNIT


def train(options: argparse.Namespace) -> tuple[VJEPA2Model, nn.Parameter]:
    config = VJEPA2Config(
        crop_size=SIZE,
        frames_per_clip=FRAMES,
        hidden_size=options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=options.width // 24,
        pred_hidden_size=24,
        pred_num_hidden_layers=1,
        pred_num_attention_heads=1,
    )
    torch.manual_seed(options.seed)
    model = VJEPA2Model(config)
    prototypes = nn.Parameter(torch.randn(len(TASKS), options.width) / options.width**0.5)
    optimizer = torch.optim.AdamW([*model.encoder.parameters(), prototypes], lr=options.lr, weight_decay=0.04)
    warmup = max(1, options.steps // 40)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / warmup) * (1 - 0.95 * step / options.steps)
    )
    env = tabletop.build(TabletopConfig(), Context(num_envs=options.films, chunk=CHUNK))
    rng = generator(options.seed, "progress encoder")
    for step in range(options.steps):
        if step % options.refresh == 0:
            films = play(env, rng)
            seen = prepared(films)
        which = rng.choice(options.films, options.batch)
        ends = rng.integers(1, films.length[which] + 1)
        wanted = torch.from_numpy(films.distance[which, ends - 1])
        loss = (distances(model, prototypes, seen[which], films.task[which], ends) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 200 == 0:
            print(f"step {step}: squared error {loss.item():.4f}", flush=True)
    return model.eval(), prototypes


@torch.inference_mode()
def rank_correlation(model: VJEPA2Model, prototypes: Tensor, seed: int) -> float:
    """Spearman's, of distances in the embedding and on the table at the ends of 512 new trajectories."""
    env = tabletop.build(TabletopConfig(), Context(num_envs=512, chunk=CHUNK))
    films = play(env, generator(seed, "progress encoder, check"))
    found = distances(model, prototypes, prepared(films), films.task, films.length)
    return float(spearmanr(found.numpy(), films.distance[np.arange(512), films.length - 1]).statistic)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--batch", type=int, default=64, help="clips of an update")
    parser.add_argument("--films", type=int, default=512, help="trajectories that clips are from; a multiple of 8")
    parser.add_argument("--refresh", type=int, default=40, help="updates between new trajectories")
    parser.add_argument("--width", type=int, default=72, help="of the transformer; a multiple of 24")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-3, help="AdamW's learning rate, after a linear warm-up")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    begun = time.perf_counter()
    model, prototypes = train(options)
    figures = {
        "minutes": (time.perf_counter() - begun) / 60,
        "rank_correlation": rank_correlation(model, prototypes, options.seed),
        "parameters": float(sum(p.numel() for p in model.encoder.parameters())),
    }
    model.save_pretrained(options.out)
    for name, value in figures.items():
        print(f"{name:>20} {value:,.3f}" if value < 1000 else f"{name:>20} {value:,.0f}")
    print(f"wrote {options.out}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()

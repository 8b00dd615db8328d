"""Make SRPO's encoder for the built-in simulator: a small V-JEPA 2 that has learned what progress looks like there.

It sees the wrist camera, and is taught with the simulator's own geometry on separate scenes. An embedding says how
near the gripper (or the block in it) is, at the end of a clip, to what each task asks for: 1 at the place, falling with
the distance, 0 where the scene has no such thing; what numbers are left are 0. Clips are the beginnings of a scripted
expert's trajectories, most of which are disturbed. So this is the stand-in, in a world of squares and rings, for an
encoder that knows the domain; it says nothing about V-JEPA 2's own features.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from attrs import frozen
from scipy.stats import spearmanr
from torch import Tensor
from transformers import VJEPA2Config, VJEPA2Model

from figures import report
from vla_rl.core.contexts import EnvContext
from vla_rl.core.randomness import generator
from vla_rl.core.types import Observation, to_numpy
from vla_rl.plugins.algorithms.srpo.impl import BUILTIN, Frames, frame_indices, preprocess_frames
from vla_rl.plugins.envs.tabletop import plugin as tabletop
from vla_rl.plugins.envs.tabletop.config import TabletopConfig
from vla_rl.plugins.envs.tabletop.simulator import Tabletop, draw_scenes
from vla_rl.plugins.envs.tabletop.tasks import COLOURS, TASKS

OUT = BUILTIN / "tabletop"
CHUNK, CHUNKS, FRAMES, SIZE = 4, 5, 4, 64
REACH = 0.4
"""Distance on the table at which nearness has fallen to 1 / e."""


@frozen(eq=False)
class Films:
    """N trajectories, disturbed to different degrees."""

    frames: Frames
    """uint8 [N, chunks + 1, H, W, 3] of the wrist camera."""
    length: Frames
    """int64 [N]: frames until the episode ended."""
    nearness: Frames
    """float32 [N, chunks + 1, tasks] to what each task asks for."""
    task: Frames
    """int64 [N]."""
    success: Frames
    """bool [N]."""


def play(env: Tabletop, rng: np.random.Generator) -> Films:
    """One episode a row, in new scenes."""
    rows = env.num_envs
    scenes = draw_scenes(rng, rows)
    env.place_scenes(torch.arange(rows), scenes, np.arange(rows))
    noise = rng.uniform(0, 1, rows) * (rng.random(rows) < 0.8)
    length, active, success = np.ones(rows, np.int64), np.ones(rows, bool), np.zeros(rows, bool)
    frames, near = [wrist(env.observe_envs())], [nearness(env)]
    for _ in range(CHUNKS):
        aim = rng.normal(size=(rows, 1, 3)) * [1.0, 1.0, 0.6]
        tremor = 0.3 * rng.normal(size=(rows, CHUNK, 3))
        actions = env.expert_chunk().cpu().numpy() + noise[:, None, None] * (aim + tremor)
        result = env.chunk_step(np.clip(actions, -1, 1).astype(np.float32), active, True)
        length += active
        success |= active & result.succeeded.cpu().numpy().any(1)
        frames.append(wrist(result.obs))
        near.append(nearness(env))
        active &= ~result.terminated.cpu().numpy().any(1)
    return Films(np.stack(frames, 1), length, np.stack(near, 1), scenes.task, success)


def wrist(obs: Observation) -> Frames:
    return to_numpy(obs.images["wrist"])


def nearness(env: Tabletop) -> Frames:
    """Return the nearness of the gripper to the block of each colour, or of the block in it to the plate of each:
    float32 [N, tasks]."""
    now = env.snapshot()
    mover = torch.where(now["puts"][:, None], now["position"][:, -1], now["gripper"])
    near = torch.exp(-(now["position"][:, :-1] - mover[:, None]).norm(dim=2) / REACH)
    verb = now["puts"][:, None].long() * len(COLOURS)
    out: Frames = torch.zeros(env.num_envs, len(TASKS)).scatter(1, verb + now["colour"][:, :-1], near).numpy()
    return out


def prepared(films: Films) -> Tensor:
    """Every frame as the encoder is given it: float32 [N, chunks + 1, 3, S, S]."""
    return preprocess_frames(films.frames.reshape(-1, *films.frames.shape[2:]), SIZE, "cpu").unflatten(
        0, films.frames.shape[:2]
    )


def embeddings(model: VJEPA2Model, seen: Tensor, ends: Frames) -> Tensor:
    """Return the embeddings of the beginnings of B videos, `ends` frames each: float32 [B, D]."""
    chosen = np.stack([frame_indices(int(end), FRAMES) for end in ends])
    clips = seen[torch.arange(len(seen))[:, None], torch.from_numpy(chosen)]
    out: Tensor = model.get_vision_features(clips).mean(1)
    return out


def train(options: argparse.Namespace) -> VJEPA2Model:
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
    optimizer = torch.optim.AdamW(model.encoder.parameters(), lr=options.lr, weight_decay=0.04)
    warmup = max(1, options.steps // 40)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / warmup) * (1 - 0.95 * step / options.steps)
    )
    env = tabletop.build(TabletopConfig(), EnvContext(num_envs=options.films, chunk=CHUNK))
    rng = generator(options.seed, "progress encoder")
    for step in range(options.steps):
        if step % options.refresh == 0:
            films = play(env, rng)
            seen = prepared(films)
        which = rng.choice(options.films, options.batch)
        ends = rng.integers(1, films.length[which] + 1)
        wanted = torch.from_numpy(films.nearness[which, ends - 1])
        found = embeddings(model, seen[which], ends)[:, : len(TASKS)]
        loss = (found - wanted).square().sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 200 == 0:
            print(f"step {step}: squared error of {len(TASKS)} numbers {loss.item():.4f}", flush=True)
    with torch.no_grad():
        for part in (model.encoder.layernorm.weight, model.encoder.layernorm.bias):
            part[len(TASKS) :] = 0
    return model.eval()


@torch.inference_mode()
def rank_correlation(model: VJEPA2Model, seed: int) -> float:
    """Spearman's, of the embedding's and the true nearness to the goal at the ends of 512 new trajectories."""
    env = tabletop.build(TabletopConfig(), EnvContext(num_envs=512, chunk=CHUNK))
    films = play(env, generator(seed, "progress encoder, check"))
    row = np.arange(512)
    found = embeddings(model, prepared(films), films.length).numpy()[row, films.task]
    return float(spearmanr(found, films.nearness[row, films.length - 1, films.task]).statistic)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=64, help="clips of an update")
    parser.add_argument("--films", type=int, default=512, help="trajectories that clips are from; a multiple of 8")
    parser.add_argument("--refresh", type=int, default=40, help="updates between new trajectories")
    parser.add_argument("--width", type=int, default=72, help="of the transformer; a multiple of 24")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-3, help="AdamW's learning rate, after a linear warm-up")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    begun = time.perf_counter()
    model = train(options)
    figures = {
        "minutes": (time.perf_counter() - begun) / 60,
        "rank_correlation": rank_correlation(model, options.seed),
        "parameters": float(sum(p.numel() for p in model.encoder.parameters())),
    }
    model.save_pretrained(options.out)
    report(figures, options.out, options.json)


if __name__ == "__main__":
    main()

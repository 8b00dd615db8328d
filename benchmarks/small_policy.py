"""How large and how fast the small policy is on one CPU core, against a tiny OpenVLA-OFT.

    OMP_NUM_THREADS=1 python benchmarks/small_policy.py [--cameras 1 2] [--pixels 64 128] [--json FILE]

Chunks of 8 x 7 numbers, a state of 9, a critic. "act": a row's chunk at batch 1 and 8, drawn, with its log-probs and
value. "learn": log-probs, entropy and values of 64 recorded chunks with gradient, backward, AdamW, a sample. "clone":
the same with the imitation loss. Processor time, medians. The tiny OpenVLA-OFT sees 64 pixels whatever it is given.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

import torch

from vla_rl.core.contexts import ModelContext
from vla_rl.core.hookspecs import VLAModel
from vla_rl.core.randomness import Noise
from vla_rl.plugins.models.film_resnet import plugin as film_resnet
from vla_rl.plugins.models.film_resnet.config import FilmResnetConfig, NetworkConfig
from vla_rl.plugins.models.openvla import openvla_oft
from vla_rl.plugins.models.openvla.config import OpenVLAOFTConfig
from vla_rl.testing import synthetic

CHUNK, ACTION_DIM, STATE_DIM, BATCH = 8, 7, 9, 64


def milliseconds(work: Callable[[], Any], times: int) -> float:
    for _ in range(2):
        work()
    taken = []
    for _ in range(times):
        begun = process_time()
        work()
        taken.append(process_time() - begun)
    return 1e3 * statistics.median(taken)


def measure(model: VLAModel, env: Any) -> dict[str, float]:
    trained = [p for p in model.module.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=1e-6)

    def act(rows: int) -> float:
        obs, noise = synthetic.observation(env, rows), Noise(0, "benchmark", range(rows), [0] * rows, [0] * rows)
        return milliseconds(lambda: model.sample_chunk(obs, noise, False), 30) / rows

    obs = synthetic.observation(env, BATCH)
    chunk = model.sample_chunk(obs, Noise(0, "benchmark", range(BATCH), [0] * BATCH, [0] * BATCH), False)

    def step(loss: Callable[[], torch.Tensor]) -> None:
        optimiser.zero_grad(set_to_none=True)
        loss().backward()
        optimiser.step()

    def scored() -> torch.Tensor:
        scores = model.chunk_log_probs(obs, chunk)
        assert scores.values is not None
        return scores.log_probs.exp().mean() + scores.entropy.mean() + scores.values.square().mean()

    return {
        "parameters": sum(p.numel() for p in trained),
        "act_1_ms": act(1),
        "act_8_ms": act(8),
        "learn_ms": milliseconds(lambda: step(scored), 9) / BATCH,
        "clone_ms": milliseconds(lambda: step(lambda: model.imitation_loss(obs, chunk.actions)), 9) / BATCH,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cameras", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--pixels", type=int, nargs="+", default=[64])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for pixels in arguments.pixels:
        for cameras in arguments.cameras:
            env = synthetic.env_info(cameras=cameras, pixels=pixels, state_dim=STATE_DIM, action_dim=ACTION_DIM)
            place = ModelContext(env=env, chunk=CHUNK, values="chunk")
            policies = {
                "film_resnet": film_resnet.build(FilmResnetConfig(network=NetworkConfig(image_size=pixels)), place),
                "openvla_oft": openvla_oft.build(OpenVLAOFTConfig(preset="tiny"), place),
            }
            for name, model in policies.items():
                line = {"model": name, "cameras": cameras, "pixels": pixels, **measure(model, env)}
                found.append(line)
                print(
                    f"{name}, {cameras} x {pixels} px: {line['parameters'] / 1e6:.2f}M, "
                    f"act {line['act_1_ms']:.2f} ms (batch 8: {line['act_8_ms']:.2f}), "
                    f"learn {line['learn_ms']:.2f} ms, clone {line['clone_ms']:.2f} ms"
                )
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Updates a second of the trainer `off_policy`, against a plain loop with the same networks.

    OMP_NUM_THREADS=1 python benchmarks/off_policy.py [--only trained frozen] [--rounds 7] [--json FILE]

film_resnet with a Gaussian head, one camera of 64 pixels, chunks of 4 x 4 numbers, two critics of 256 x 256, batches of
64, four updates for each new transition (UTD 4). The plain loop keeps its transitions in arrays in memory and makes the
same passes and optimiser steps, without files, checks of numbers, metrics and random numbers that can be repeated. Both
take turns in one process; ratios are medians over the rounds. `trained`: the critics' loss trains the features.
`frozen`: it does not; then the trainer keeps features instead of frames, and the plain loop computes them again.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
from measuring import Figures, command_line, write_json

from vla_rl.core.contexts import ModelContext
from vla_rl.core.spec.sections import TrainSpec
from vla_rl.core.trainers import Transitions, TransitionsData
from vla_rl.plugins.models.film_resnet import plugin as film_resnet
from vla_rl.plugins.models.film_resnet.config import FilmResnetConfig, Gaussian, NetworkConfig
from vla_rl.plugins.trainers.off_policy.config import OffPolicyConfig
from vla_rl.plugins.trainers.off_policy.impl import OffPolicy
from vla_rl.testing import synthetic
from vla_rl.toolkit.trainers.context import TrainerContext
from vla_rl.toolkit.trainers.critics import CriticEnsemble
from vla_rl.toolkit.trainers.trained_model import TrainedModel

CHUNK = 4
BATCH = 64
UTD = 4
NEW = 4
"""New transitions of a round."""
START = 500
DISCOUNT = 0.99
RATE = 0.005
INFO = synthetic.env_info(cameras=1, pixels=64, state_dim=3, action_dim=4)
LOW = torch.tensor(INFO.action_low)
HIGH = torch.tensor(INFO.action_high)


def transitions(count: int, seed: int) -> Transitions:
    """Return an episode with random actions and rewards."""
    draws = np.random.default_rng(seed)
    low, high = (np.array(bound, np.float32) for bound in (INFO.action_low, INFO.action_high))
    return Transitions(
        frames=synthetic.observation(INFO, count + 1, seed=seed),
        first=np.arange(count),
        following=np.arange(1, count + 1),
        actions=(low + (high - low) * draws.random((count, CHUNK, INFO.action_dim))).astype(np.float32),
        rewards=draws.random((count, CHUNK)).astype(np.float32),
        valid=np.ones((count, CHUNK), bool),
        terminated=np.arange(count) == count - 1,
    )


def build_model() -> Any:
    config = FilmResnetConfig(network=NetworkConfig(head=Gaussian()))
    return film_resnet.build(config, ModelContext(chunk=CHUNK, env=INFO))


def trainer_rounds(features: str, folder: Path) -> Callable[[], int]:
    """Return a function that adds transitions to a trainer and returns how many updates it made."""
    train = TrainSpec(steps=1, lr=1e-4, micro_batch=BATCH)
    trained = TrainedModel(build_model(), train, name="film_resnet", device="cpu", info=INFO, acting=True)
    training = TrainerContext(chunk=CHUNK, trained=trained, algorithm=None, heartbeat=lambda: None, folder=folder)  # type: ignore[arg-type]
    config = OffPolicyConfig(
        batch=BATCH, min_data=START, updates_per_step=UTD, capacity=10_000, features=features, discount=DISCOUNT
    )  # type: ignore[arg-type]
    trainer = OffPolicy(config, training)
    step = 1
    trainer.update(TransitionsData(step=step, version=0, transitions=transitions(START, 0)))

    def work() -> int:
        nonlocal step
        step += 1
        data = TransitionsData(step=step, version=step - 1, transitions=transitions(NEW, step))
        return int(trainer.update(data).sums["off_policy/updates"])

    return work


class PlainLoop:
    """SAC as one writes it down, on arrays in memory."""

    def __init__(self, features: str) -> None:
        self._model = build_model()
        self._trains_features = features == "trained"
        with torch.no_grad():
            size = self._model.policy_features(synthetic.observation(INFO, 1)).shape[1]
        inputs = size + CHUNK * INFO.action_dim
        self._critics = CriticEnsemble(2, inputs, (256, 256), layer_norm=True, seed=0)
        self._targets = copy.deepcopy(self._critics).requires_grad_(False)
        self._log_temperature = torch.zeros((), requires_grad=True)
        self._policy_optimizer = torch.optim.AdamW(self._model.module.parameters(), lr=1e-4, weight_decay=0.0)
        self._critic_optimizer = torch.optim.Adam(self._critics.parameters(), lr=3e-4)
        self._temperature_optimizer = torch.optim.Adam([self._log_temperature], lr=3e-4)
        self._data = transitions(START, 0)
        self._draws = np.random.default_rng(0)

    def __call__(self) -> int:
        for _ in range(UTD * NEW):
            self._update()
        return UTD * NEW

    def _inputs(self, features: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        return torch.cat([features, ((actions - (LOW + HIGH) / 2) / ((HIGH - LOW) / 2)).flatten(1)], 1)

    def _update(self) -> None:
        data = self._data
        rows = self._draws.integers(0, len(data), BATCH)
        rewards = torch.tensor((data.rewards[rows] * DISCOUNT ** np.arange(CHUNK)).sum(1), dtype=torch.float32)
        bootstrap = torch.tensor(DISCOUNT**CHUNK * ~data.terminated[rows], dtype=torch.float32)
        temperature = self._log_temperature.exp()
        with torch.no_grad():
            following = self._model.policy_features(data.frames.take(data.following[rows]))
            actions, log_probs = self._sample(following)
            values = self._targets(self._inputs(following, actions)).min(0).values
            targets = rewards + bootstrap * (values - temperature * log_probs)
        with torch.set_grad_enabled(self._trains_features):
            features = self._model.policy_features(data.frames.take(data.first[rows]))
        q_values = self._critics(self._inputs(features, torch.tensor(data.actions[rows])))
        self._policy_optimizer.zero_grad()
        self._critic_optimizer.zero_grad()
        ((q_values - targets).square().sum(0) / 2).mean().backward()
        self._critic_optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(self._targets.parameters(), self._critics.parameters(), strict=True):
                slow.lerp_(fast, RATE)
        self._critics.requires_grad_(False)
        actions, log_probs = self._sample(features.detach())
        best = self._critics(self._inputs(features.detach(), actions)).min(0).values
        (temperature.detach() * log_probs - best).mean().backward()
        self._critics.requires_grad_(True)
        self._policy_optimizer.step()
        self._temperature_optimizer.zero_grad()
        (-temperature * (log_probs.detach() - CHUNK * INFO.action_dim)).mean().backward()
        self._temperature_optimizer.step()

    def _sample(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normals = torch.randn(len(features), CHUNK, INFO.action_dim)
        actions, log_probs = self._model.reparameterised_actions(features, normals)
        return actions, log_probs.sum((1, 2))


def measure(features: str, rounds: int) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        works = {"trainer": trainer_rounds(features, Path(folder)), "plain": PlainLoop(features)}
        wall: dict[str, list[float]] = {name: [] for name in works}
        processor: dict[str, list[float]] = {name: [] for name in works}
        for number in range(rounds + 1):  # the first one warms up
            for name, work in works.items():
                begun = perf_counter(), process_time()
                updates = work()
                if number:
                    wall[name].append((perf_counter() - begun[0]) / updates)
                    processor[name].append((process_time() - begun[1]) / updates)
    return {
        "trainer, updates/s": 1 / median(wall["trainer"]),
        "plain loop, updates/s": 1 / median(wall["plain"]),
        "ratio": median(b / a for a, b in zip(wall["trainer"], wall["plain"], strict=True)),
        "ratio by processor time": median(b / a for a, b in zip(processor["trainer"], processor["plain"], strict=True)),
    }


def main() -> None:
    parser = command_line(__doc__, ("trained", "frozen"), "FEATURES")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    results = {}
    for features in options.only:
        results[features] = measure(features, options.rounds)
        figures = ", ".join(f"{name} {value:.2f}" for name, value in results[features].items())
        print(f"features {features}: {figures}", flush=True)
    write_json(results, options.json)


if __name__ == "__main__":
    main()

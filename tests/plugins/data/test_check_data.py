"""`check_data` finds what a data plugin gets wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from vla_rl.core.hookspecs import Demonstrations
from vla_rl.core.types import EnvInfo, Observation, TaskInfo
from vla_rl.testing import check_data
from vla_rl.testing.findings import CheckFailed
from vla_rl.toolkit.data.samples import Windows, statistics

CHUNK, STEPS = 3, 9
ENV = EnvInfo(
    cameras={"top": (4, 4)},
    state_dim=2,
    action_low=(-1.0,) * 2,
    action_high=(1.0,) * 2,
    tasks=(TaskInfo(name="reach", instruction="reach", max_steps=9),),
)


class Sound(Demonstrations):
    def __init__(self) -> None:
        numbers = np.random.default_rng(0)
        self.windows = Windows([STEPS], CHUNK)
        self.images = numbers.integers(0, 256, (STEPS, 4, 4, 3), np.uint8)
        self.state, self.actions = numbers.random((STEPS, 2), np.float32), numbers.random((STEPS, 2), np.float32)

    def num_samples(self) -> int:
        return len(self.windows)

    def read_samples(self, indices: Any) -> tuple[Observation, Any]:
        _, steps = self.windows.find(np.asarray(indices))
        obs = Observation(
            images={"top": self.images[steps]}, instructions=("reach",) * len(steps), state=self.state[steps]
        )
        return obs, np.stack([self.actions[t : t + CHUNK] for t in steps])

    def data_statistics(self) -> Any:
        return statistics({"action": self.actions, "state": self.state})


class SortsActions(Sound):
    def read_samples(self, indices: Any) -> tuple[Observation, Any]:
        return super().read_samples(indices)[0], super().read_samples(np.sort(indices))[1]


class Broken(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.state[4] = np.inf


class Doubles(Sound):
    def read_samples(self, indices: Any) -> tuple[Observation, Any]:
        obs, actions = super().read_samples(indices)
        return obs, actions.astype(np.float64)


def test_sound_data_pass() -> None:
    check_data(Sound(), env=ENV, chunk=CHUNK)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (SortsActions(), "samples in the order of the indices"),
        (Broken(), "finite states"),
        (Doubles(), "actions float32"),
    ],
)
def test_what_breaks_the_contract_is_found(data: Demonstrations, message: str) -> None:
    with pytest.raises(CheckFailed, match=message):
        check_data(data, env=ENV, chunk=CHUNK)

"""`check_data` finds what a data plugin gets wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

from vla_rl.core.errors import UserError
from vla_rl.core.hookspecs import Demonstrations
from vla_rl.core.types import DataProperties, EnvInfo, Observation, TaskInfo
from vla_rl.testing import check_data
from vla_rl.testing.common.findings import CheckFailed
from vla_rl.toolkit.data.samples import StepWindows, check_sample, compute_statistics
from vla_rl.toolkit.data.validation import CheckedDemonstrations

CHUNK, STEPS = 3, 55
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
        self.windows = StepWindows([STEPS], CHUNK)
        self.images = numbers.integers(0, 256, (STEPS, 4, 4, 3), np.uint8)
        self.state, self.actions = numbers.random((STEPS, 2), np.float32), numbers.random((STEPS, 2), np.float32)

    def num_samples(self) -> int:
        return len(self.windows)

    def read_samples(self, indices: Any) -> tuple[Observation, Any]:
        _, steps = self.windows.locate_samples(np.asarray(indices))
        obs = Observation(
            images={"top": self.images[steps]}, instructions=("reach",) * len(steps), state=self.state[steps]
        )
        return obs, np.stack([self.actions[t : t + CHUNK] for t in steps])

    def data_statistics(self) -> Any:
        return compute_statistics({"action": self.actions, "state": self.state})


class Changed(Sound):
    """Samples of `Sound` that `change` broke: (indices, obs, actions) -> (obs, actions)."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change

    def read_samples(self, indices: Any) -> tuple[Observation, Any]:
        return self.change(np.asarray(indices), *super().read_samples(indices))


def images(change: Any) -> Any:
    return lambda i, obs, a: (evolve(obs, images={"top": change(i, obs.images["top"])}), a)


def state(change: Any) -> Any:
    return lambda i, obs, a: (evolve(obs, state=change(i, obs.state)), a)


def actions(change: Any) -> Any:
    return lambda i, obs, a: (obs, change(i, a))


def texts(change: Any) -> Any:
    return lambda i, obs, a: (evolve(obs, instructions=change(i, obs.instructions)), a)


def every(number: int, indices: Any, array: Any, value: float) -> Any:
    """`value` in the samples whose index has the remainder 5."""
    chosen = (indices % number == 5).reshape(-1, *[1] * (array.ndim - 1))
    return np.where(chosen, np.float32(value), array).astype(array.dtype)


BROKEN = {
    "float64 actions": (actions(lambda i, a: a.astype(float)), "actions float32", "actions float32 [1, 3, 2], got f"),
    "float64 states": (state(lambda i, s: s.astype(float)), "states float32", "states float32 [1, 2], got float64"),
    "other units": (actions(lambda i, a: 57 * a), "number . within -1 and 1", "within -1 and 1, the simulator's"),
    "other units of one number": (actions(lambda i, a: a * np.float32([1, 5])), "number 1 within", "number 1 within"),
    "one wild sample": (actions(lambda i, a: every(31, i, a, -9)), "sample 5, actions: expected", "sample 5, actions"),
    "NaN in each seventh action": (actions(lambda i, a: every(7, i, a, np.nan)), "finite actions", "sample 5, actions"),
    "inf in each seventh state": (state(lambda i, s: every(7, i, s, np.inf)), "finite states, got inf", "sample 5, st"),
    "NaN at the end": (state(lambda i, s: every(50, i + 1, s, np.nan)), "finite states", None),
    "states of another length": (state(lambda i, s: s[:, :1]), "states float32 .., 2", "states of a sample are"),
    "images 0 to 1": (images(lambda i, p: np.float32(p / 255)), "images of 'top'.* got float32", "got float32"),
    "dark images": (images(lambda i, p: p // 250), "values from 0 to 255", None),
    "images CHW": (images(lambda i, p: p.transpose(0, 3, 1, 2)), "uint8 .., H, W, 3", "uint8 [1, H, W, 3], got u"),
    "images of 16 bits": (images(lambda i, p: p.astype(np.uint16)), "got uint16", "got uint16"),
    "larger images later": (
        images(lambda i, p: p.repeat(2, 1).repeat(2, 2) if i.max() > 30 else p),
        "4 x 4 pixels as in other samples, got 8 x 8",
        "4 x 4 pixels as in other samples, got 8 x 8; resize them",
    ),
    "one image for all": (images(lambda i, p: np.where(np.arange(4)[:, None] > 1, np.uint8(7), 0 * p)),
        "images of 'top' that differ", None),
    "another task": (texts(lambda i, t: ("dance",) * len(i)), "'dance', which the simulator", "instruction 'dance'"),
    "a capital letter": (texts(lambda i, t: ("Reach.",) * len(i)), "did you mean 'reach'", "did you mean 'reach'"),
    "bytes": (texts(lambda i, t: (b"reach",) * len(i)), "a text, got b'reach'", "a text, got b'reach'; say the task"),
    "no text": (texts(lambda i, t: (" ",) * len(i)), "a text, got ' '", "a text, got ' '"),
    "one text": (texts(lambda i, t: "reach"), "got one text|a text", "a text|instructions"),
    "sorted actions": (
        lambda i, obs, a: (obs, a[np.argsort(np.argsort(i))] if len(i) > 1 and i[0] > i[-1] else a),
        "samples in the order of the indices", None),
    "indices without repeats": (
        lambda i, obs, a: (obs, a if len(np.unique(i)) == len(i) else a + np.float32([[0]] * (len(i) - 1) + [[0.1]])[:, None]),
        "a sample twice where its index comes twice", None),
    "one action for the chunk": (actions(lambda i, a: a[:, :1].repeat(CHUNK, 1)), "steps that follow each other", None),
    "one state for all": (state(lambda i, s: 0 * s), "states that differ, got the same in 53 samples", None),
    "the first image of each episode": (
        images(lambda i, p: np.uint8(i // 27)[:, None, None, None] + np.arange(48, dtype=np.uint8).reshape(4, 4, 3)),
        "change during an episode, got a change in 1 of 52 steps", None),
    "the same actions": (actions(lambda i, a: 0 * a), "actions that differ", None),
}  # fmt: skip


class OneBuffer(Sound):
    """Writes into what it returned before."""

    def read_samples(self, indices: Any) -> tuple[Observation, Any]:
        obs, found = super().read_samples(indices)
        self.buffer = getattr(self, "buffer", np.zeros((16, CHUNK, 2), np.float32))
        self.buffer[: len(found)] = found
        return obs, self.buffer[: len(found)]


class Counts(Sound):
    """Reads on wherever it stopped."""

    calls = 0

    def read_samples(self, indices: Any) -> tuple[Observation, Any]:
        self.calls += 1
        return super().read_samples((np.asarray(indices) + self.calls) % self.num_samples())


class LastOneMissing(Sound):
    """Counts a sample that is not there."""

    def num_samples(self) -> int:
        return super().num_samples() + 1


class TwoCameras(Sound):
    """Shows the first camera's images as the second's too."""

    def read_samples(self, indices: Any) -> tuple[Observation, Any]:
        obs, found = super().read_samples(indices)
        return evolve(obs, images={"top": obs.images["top"], "wrist": obs.images["top"].copy()}), found


class WithStatistics(Sound):
    """Statistics that `change` broke."""

    def __init__(self, part: str, **changes: Any) -> None:
        super().__init__()
        self.part, self.changes = part, changes

    def data_statistics(self) -> Any:
        found = super().data_statistics()
        found[self.part] |= {name: change(found[self.part]) for name, change in self.changes.items()}
        return found


class NamesOfOtherData(Sound):
    def data_properties(self) -> DataProperties:
        return DataProperties(action_names=("x", "y", "z"))


STATISTICS = {
    "min above max": (WithStatistics("action", min=lambda s: s["max"], max=lambda s: s["min"]), "min <= max"),
    "q01 above q99": (WithStatistics("state", q01=lambda s: s["q99"], q99=lambda s: s["q01"]), "q01 <= q99"),
    "std 0": (WithStatistics("action", std=lambda s: (0.0, 0.0)), "a deviation above 0"),
    "negative std": (WithStatistics("state", std=lambda s: (-0.1, 0.2)), "a deviation above 0"),
    "variance of large numbers": (WithStatistics("action", std=lambda s: (9.0, 9.0)), "no larger than the range"),
    "NaN": (WithStatistics("action", mean=lambda s: (np.nan, 0.0)), "finite numbers in 'mean', got nan"),
    "mean of other data": (WithStatistics("action", mean=lambda s: (5.0, 0.5)), "mean <= max, got 5 and"),
    "three numbers": (WithStatistics("action", q99=lambda s: (1.0,) * 3), "2 numbers each"),
    "none": (WithStatistics("action", q99=lambda s: ()), "2 numbers each"),
}


class FirstImages(Sound):
    """Shows the first image of each of two long episodes."""

    def __init__(self) -> None:
        super().__init__()
        self.windows = StepWindows([200, 200], CHUNK)
        numbers = np.random.default_rng(1)
        self.state, self.actions = numbers.random((200, 2), np.float32), numbers.random((200, 2), np.float32)

    def read_samples(self, indices: Any) -> tuple[Observation, Any]:
        episodes, steps = self.windows.locate_samples(np.asarray(indices))
        obs = Observation(
            images={"top": self.images[episodes]}, instructions=("reach",) * len(steps), state=self.state[steps]
        )
        return obs, np.stack([self.actions[t : t + CHUNK] for t in steps])


OTHERS = {
    "the first image of each long episode": (FirstImages(), "got a change in 0 of"),
    "three names": (NamesOfOtherData(), "2 names of the action's numbers, or none, got 3"),
    "one buffer": (OneBuffer(), "samples that stay as returned"),
    "state": (Counts(), "equal samples twice"),
    "last one missing": (LastOneMissing(), "reading sample 53|IndexError"),
    "two cameras alike": (TwoCameras(), "the images of 'top' in each of"),
    "statistics of other data": (
        WithStatistics("action", min=lambda s: (0.4, 0.4), q01=lambda s: (0.4, 0.4), mean=lambda s: (0.5, 0.5)),
        "expected actions from min to max, 0.4 to",
    ),
}


def test_sound_data_pass() -> None:
    check_data(Sound(), env=ENV, chunk=CHUNK)


@pytest.mark.parametrize("name", BROKEN)
def test_samples_that_are_wrong_are_found(name: str) -> None:
    change, found, _ = BROKEN[name]
    with pytest.raises(CheckFailed, match=found):
        check_data(Changed(change), env=ENV, chunk=CHUNK)


@pytest.mark.parametrize("name", [name for name, (_, _, refused) in BROKEN.items() if refused])
def test_samples_that_are_wrong_are_refused_before_a_model_sees_them(name: str) -> None:
    change, _, message = BROKEN[name]
    data = Changed(change)
    with pytest.raises(UserError, match=r"data 'odd' does not go with env 'line'.*") as refused:
        check_sample("data 'odd'", data, "env 'line'", ENV, CHUNK)
        checked = CheckedDemonstrations(data, "data 'odd'", "env 'line'", ENV, CHUNK)
        for index in range(data.num_samples()):
            checked.read_samples(np.array([index]))
    assert any(words in str(refused.value) for words in message.split("|")), refused.value


@pytest.mark.parametrize("name", [*STATISTICS, *OTHERS])
def test_what_else_breaks_the_contract_is_found(name: str) -> None:
    data, message = (STATISTICS | OTHERS)[name]
    cameras = {"top": (4, 4), "wrist": (4, 4)} if isinstance(data, TwoCameras) else ENV.cameras
    with pytest.raises(CheckFailed, match=message):
        check_data(data, env=evolve(ENV, cameras=cameras), chunk=CHUNK)


@pytest.mark.parametrize("name", STATISTICS)
def test_statistics_that_cannot_be_are_refused(name: str) -> None:
    data, message = STATISTICS[name]
    checked = CheckedDemonstrations(data, "data 'odd'", "env 'line'", ENV, CHUNK)
    with pytest.raises(UserError, match=f"data 'odd', data_statistics, .*{message}"):
        checked.data_statistics()


@pytest.mark.parametrize("noise", [0.0, 1e-4])
def test_an_action_that_rarely_moves_is_named_and_scaled_by_all_of_its_range(
    noise: float, caplog: pytest.LogCaptureFixture
) -> None:
    pulses = Sound()
    pulses.actions = np.repeat(pulses.actions, 10, axis=0)
    pulses.actions[:, 1] = np.linspace(0, noise, len(pulses.actions))
    pulses.actions[100:103, 1] = 0.5
    measured = pulses.data_statistics()["action"]
    checked = CheckedDemonstrations(pulses, "data 'odd'", "env 'line'", ENV, CHUNK).data_statistics()["action"]
    (line,) = caplog.messages
    assert "data 'odd': action 1: 99 % of the steps lie in" in line
    assert "it reaches 0.5" in line
    assert (checked["q01"][0], checked["q99"][0]) == (measured["q01"][0], measured["q99"][0])
    assert (checked["q01"][1], checked["q99"][1]) == (0, 0.5)


def test_a_batch_with_one_image_of_another_size_names_its_sample() -> None:
    class Mixed(Sound):
        def read_samples(self, indices: Any) -> tuple[Observation, Any]:
            obs, found = super().read_samples(indices)
            sizes = [2 if index == 11 else 1 for index in indices]
            each = [p.repeat(n, 0).repeat(n, 1) for p, n in zip(obs.images["top"], sizes, strict=True)]
            return evolve(obs, images={"top": np.stack(each)}), found

    checked = CheckedDemonstrations(Mixed(), "data 'odd'", "env 'line'", ENV, CHUNK)
    with pytest.raises(UserError, match="samples 11 to 11, images of 'top': expected 4 x 4 pixels"):
        checked.read_samples(np.arange(8, 16))


def test_an_instruction_of_some_other_task_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    dances = Changed(texts(lambda i, t: tuple("dance" if index == 12 else "reach" for index in i)))
    checked = CheckedDemonstrations(dances, "data 'odd'", "env 'line'", ENV, CHUNK)
    for _ in range(2):
        checked.read_samples(np.arange(8, 16))
    (line,) = caplog.messages
    assert line == "data 'odd': sample 12 has the instruction 'dance', which the simulator never says"


def test_what_is_right_passes_in_other_forms() -> None:
    """Tensors, views of images, actions that rounding took over the bounds, a wording for each episode."""
    nudged = Changed(lambda i, obs, a: (obs, np.where(a > 0.99, np.float32(1.001), a)))
    nudged.data_statistics = Demonstrations.data_statistics.__get__(nudged)
    turned = Changed(images(lambda i, p: p[:, ::-1, ::-1]))
    retold = evolve(ENV, tasks=(evolve(ENV.tasks[0], instruction_varies=True),))
    for data, env in ((nudged, ENV), (turned, ENV), (Changed(BROKEN["another task"][0]), retold)):
        check_data(data, env=env, chunk=CHUNK)
        obs, _ = CheckedDemonstrations(data, "data", "env", env, CHUNK).read_samples(np.arange(9))
        torch.as_tensor(obs.images["top"])

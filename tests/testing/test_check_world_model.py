"""`check_world_model` finds what a world model does wrong, and nothing wrong with one that is right."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch
from attrs import frozen
from small_world_model import INFO, Linear

from vla_rl.core.declarations import WorldModelPlugin
from vla_rl.core.world_models import WorldModel
from vla_rl.testing import CheckFailed, check_world_model

MUTANTS: dict[type[WorldModel], str] = {}


def found_by(text):
    """Register a mutant, and what of a finding names its mistake."""

    def register(mutant):
        MUTANTS[mutant] = text
        return mutant

    return register


class Quiet(Linear):
    """Reports losses by `measure`, under its own names."""

    def fit(self, windows, noise):
        found = super().fit(windows, noise)
        return {"dynamics": found["pixel_loss"], "seconds": 1.0}

    @torch.no_grad()
    def measure(self, windows, noise):
        return {"dynamics": float(self.losses(windows)["pixel_loss"])}


@frozen
class Config: ...


@pytest.mark.parametrize("model", [Linear, Quiet])
def test_one_that_is_right_passes(model):
    check_world_model(model(), env=INFO)
    check_world_model(WorldModelPlugin(config=Config, build=model, summary="one layer"), env=INFO)


# --------------------------------------------------------------------------------------------------------------- fit


@found_by("load_training_state: expected to continue exactly")
class Forgets(Linear):
    def training_state(self):
        return {}

    def load_training_state(self, state):
        pass


@found_by("expected a finite state_loss")
class Diverges(Linear):
    def fit(self, windows, noise):
        return {**super().fit(windows, noise), "state_loss": float("nan")}


@found_by("fit: expected lower losses (pixel_loss, state_loss, outcome_loss) after 20 fits on one window")
class Climbs(Linear):
    def total(self, losses):
        return -super().total(losses)


@found_by("fit: expected lower losses")
class NoOptimiserStep(Linear):
    def fit(self, windows, noise):
        return {name: float(loss.detach()) for name, loss in self.losses(windows).items()}


@found_by("fit: expected other weights after it")
class TrainsACopy(Linear):
    def __init__(self, config=None, context=None):
        super().__init__(config, context)
        self.other = Linear(config, context)

    def fit(self, windows, noise):
        return self.other.fit(windows, noise)

    def training_state(self):
        return {"other": self.other.module.state_dict(), **self.other.training_state()}

    def load_training_state(self, state):
        self.other.module.load_state_dict(state["other"])
        self.other.load_training_state(state)


@found_by("a state_loss that falls sometimes, got one that rises at every fit")
class UnlearnsTheState(Linear):
    def total(self, losses):
        return losses["pixel_loss"] + losses["outcome_loss"] - 0.01 * losses["state_loss"]


@found_by("fit: expected lower losses")
class HugeSteps(Linear):
    def __init__(self, config=None, context=None):
        super().__init__(config, context)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=3e2)


@found_by("fit: expected its windows unchanged")
class FitWrites(Linear):
    def fit(self, windows, noise):
        windows.state[:] = windows.state - windows.state.mean()
        return super().fit(windows, noise)


# ----------------------------------------------------------------------------------------------------------- imagine


class Sees(Linear):
    """`change` changes what is imagined."""

    def imagine(self, windows, actions, noise):
        return self.change(super().imagine(windows, actions, noise), windows, actions)


@found_by("other frames for other actions")
class IgnoresActions(Linear):
    def predict(self, pixels, state, actions):
        return super().predict(pixels, state, 0 * np.asarray(actions))


@found_by("other frames for other actions")
class ImagesIgnoreActions(Linear):
    def imagine(self, windows, actions, noise):
        still = super().imagine(windows, 0 * np.asarray(actions), noise)
        return attrs.evolve(super().imagine(windows, actions, noise), images=still.images)


@found_by("another state for other actions, got the same")
class LastState(Sees):
    def change(self, obs, windows, actions):
        return attrs.evolve(obs, state=windows.state[:, -1].copy())


@found_by("what is seen next, got the last frame of the window")
class LastFrame(Sees):
    def change(self, obs, windows, actions):
        return attrs.evolve(obs, images={camera: frames[:, -1].copy() for camera, frames in windows.images.items()})


@found_by("other frames after another last frame")
class LooksAtTheFirstFrame(Linear):
    def imagine(self, windows, actions, noise):
        images = {camera: frames[:, ::-1] for camera, frames in windows.images.items()}
        return super().imagine(attrs.evolve(windows, images=images, state=windows.state[:, ::-1]), actions, noise)


@found_by("each number of each action of a chunk to count, got nothing new for another action 1")
class ReadsTheFirstAction(Linear):
    def predict(self, pixels, state, actions):
        return super().predict(pixels, state, np.asarray(actions) * np.float32([[1], [0]]))


@found_by("nothing new for another number 1 of actions, number 2 of actions")
class ReadsTheFirstNumber(Linear):
    def predict(self, pixels, state, actions):
        return super().predict(pixels, state, np.asarray(actions) * np.float32([1, 0, 0]))


class Redraws(Sees):
    """`redraw` changes each image."""

    def change(self, obs, windows, actions):
        return attrs.evolve(obs, images={camera: self.redraw(image) for camera, image in obs.images.items()})


@found_by("one that is like them upside down")
class UpsideDown(Redraws):
    def redraw(self, image):
        return image[:, ::-1].copy()


@found_by("one that is like them with red and blue exchanged")
class BlueIsRed(Redraws):
    def redraw(self, image):
        return image[..., ::-1].copy()


@found_by("image 'camera0': expected values from 0 to 255, got no above 1")
class ZeroToOne(Redraws):
    def redraw(self, image):
        return image // 255


@found_by("one that is like them of camera 'camera1'")
class CamerasExchanged(Sees):
    def change(self, obs, windows, actions):
        images = dict(zip(obs.images, [*obs.images.values()][::-1], strict=True))
        return attrs.evolve(obs, images=images)


@found_by("a row's state alone as among others")
class CentresStates(Sees):
    def change(self, obs, windows, actions):
        return attrs.evolve(obs, state=obs.state - 0.1 * windows.state[:, -1].mean(0))


@found_by("a separate image for camera 'camera1'")
class OneCameraForAll(Sees):
    def change(self, obs, windows, actions):
        return attrs.evolve(obs, images={"camera0": obs.images["camera0"], "camera1": obs.images["camera0"].copy()})


@found_by("a row alone as among others")
class Shares(Sees):
    def change(self, obs, windows, actions):
        return attrs.evolve(obs, state=obs.state + 9 * len(actions))


@found_by("a row that does not depend on other rows' actions")
class ActionsOfTheFirstRow(Linear):
    def imagine(self, windows, actions, noise):
        return super().imagine(windows, np.repeat(actions[:1], len(actions), 0), noise)


@found_by("the same for the same noise")
class Remembers(Sees):
    calls = 0

    def change(self, obs, windows, actions):
        self.calls += 1
        return attrs.evolve(obs, state=obs.state + np.float32(self.calls))


@found_by("the same for the same noise")
class DrawsItsOwnNoise(Sees):
    def change(self, obs, windows, actions):
        return attrs.evolve(obs, state=obs.state + torch.randn(obs.state.shape).numpy())


@found_by("imagine: expected its windows unchanged")
class Writes(Sees):
    def change(self, obs, windows, actions):
        windows.state[:] = 0
        return obs


@found_by("imagine: expected its windows unchanged")
class ScalesActionsInPlace(Linear):
    def imagine(self, windows, actions, noise):
        actions *= 0.5
        return super().imagine(windows, actions, noise)


@found_by("frames that stay as they are, got ones that the next call wrote into")
class OneBuffer(Sees):
    buffer = None

    def change(self, obs, windows, actions):
        if self.buffer is None or len(self.buffer) != len(obs):
            self.buffer = obs.images["camera0"].copy()
        self.buffer[:] = obs.images["camera0"]
        return attrs.evolve(obs, images={**obs.images, "camera0": self.buffer})


@found_by("expected uint8")
class Floats(Sees):
    def change(self, obs, windows, actions):
        return attrs.evolve(obs, images={camera: image / 255 for camera, image in obs.images.items()})


@found_by("expected uint8 [4, 8, 8, 3]")
class ChannelsFirst(Sees):
    def change(self, obs, windows, actions):
        return attrs.evolve(obs, images={c: np.moveaxis(image, 3, 1) for c, image in obs.images.items()})


@found_by("imagine: state")
class NanState(Sees):
    def change(self, obs, windows, actions):
        return attrs.evolve(obs, state=obs.state * np.float32("nan"))


@found_by("imagine: expected ['push the red block'")
class OneInstruction(Sees):
    def change(self, obs, windows, actions):
        return attrs.evolve(obs, instructions=windows.instructions[:1] * len(obs))


# ------------------------------------------------------------------------------------------------ outcome and traces


@found_by("outcome: expected probabilities")
class Logits(Linear):
    @torch.no_grad()
    def outcome(self, windows, actions, after):
        return self.predict(*self.seen(windows, -1), actions)[2].numpy()


@found_by("outcome: expected float32 [4, 5], got float32 [4, 2]")
class SuccessOrNot(Linear):
    def outcome(self, windows, actions, after):
        return super().outcome(windows, actions, after)[:, :2]


@found_by("outcome: expected recorded outcomes that are likelier after 20 fits on them")
class SuccessIsFailure(Linear):
    def outcome(self, windows, actions, after):
        return super().outcome(windows, actions, after)[:, [0, 3, 4, 1, 2]]


class TwoParts(Linear):
    """Frames and outcome have separate layers."""

    def __init__(self, config=None, context=None):
        super().__init__(config, context)
        outcome = torch.nn.Linear(self.sizes[1], 5)
        self.module = torch.nn.ModuleDict({"frames": self.module, "outcome": outcome})
        self.optimizer = torch.optim.Adam(self.module.parameters(), lr=3e-3)

    def predict(self, pixels, state, actions):
        inputs = torch.cat([pixels, state, torch.as_tensor(actions).flatten(1)], 1)
        moved, change, _ = self.module["frames"](inputs).split(self.sizes, 1)
        return pixels + moved, state + change, self.module["outcome"](state)


@found_by("a pixel_loss that 20 fits on one window change")
class NeverTrainsTheFrames(TwoParts):
    def total(self, losses):
        return losses["outcome_loss"]


@found_by(
    "one step of all parts: outcomes of recorded frames that 20 fits change, got the same outcomes, and no change of"
)
class NeverTrainsTheOutcome(TwoParts):
    def total(self, losses):
        return losses["pixel_loss"] + losses["state_loss"]


@found_by("outcome: expected probabilities that depend on what happened")
class ConstantOutcome(Linear):
    def outcome(self, windows, actions, after):
        return np.full((len(actions), 5), 0.2, np.float32)


@found_by("outcome: expected a row alone as among others")
class SoftmaxOverRows(Linear):
    def outcome(self, windows, actions, after):
        chances = super().outcome(windows, actions, after) * super().outcome(windows, actions, after).mean(0)
        return chances / chances.sum(1, keepdims=True)


@found_by("outcome: expected the same for the same arguments")
class DrawsTheOutcome(Linear):
    def outcome(self, windows, actions, after):
        chances = super().outcome(windows, actions, after) + np.float32(torch.rand(()))
        return chances / chances.sum(1, keepdims=True)


@found_by("outcome: expected its `after` unchanged")
class OutcomeWrites(Linear):
    def outcome(self, windows, actions, after):
        after.state[:] = 0
        return super().outcome(windows, actions, after)


@found_by("measure: expected weights and buffers that stay as they are")
class MeasuresByFitting(Linear):
    def measure(self, windows, noise):
        return self.fit(windows, noise)


@found_by("imagine: expected the global random generators left alone")
class SeedsTorch(Linear):
    def imagine(self, windows, actions, noise):
        torch.manual_seed(0)
        return super().imagine(windows, actions, noise)


@found_by("fit: expected the global random generators left alone")
class SeedsInFit(Linear):
    def fit(self, windows, noise):
        torch.manual_seed(0)
        return super().fit(windows, noise)


@pytest.mark.parametrize("model", MUTANTS, ids=lambda model: model.__name__)
def test_what_is_wrong_is_found(model):
    with pytest.raises(CheckFailed) as failed:
        check_world_model(model(), env=INFO)
    assert MUTANTS[model] in str(failed.value)


class HeadElsewhere(Linear):
    """A part of it is in no checkpoint."""

    def __init__(self, config=None, context=None):
        super().__init__(config, context)
        self.head = Linear(config, context)

    def imagine(self, windows, actions, noise):
        return attrs.evolve(
            super().imagine(windows, actions, noise), state=self.head.imagine(windows, actions, noise).state
        )


class SeedsInBuild(Linear):
    def __init__(self, config=None, context=None):
        torch.manual_seed(context.seed)
        super().__init__(config, attrs.evolve(context, seed=0))


class WeightsByChance(Linear):
    def __init__(self, config=None, context=None):
        super().__init__(config, context)
        torch.nn.init.normal_(self.module.weight, std=0.01)


@pytest.mark.parametrize(
    ("model", "finding"),
    [
        (WeightsByChance, "the same weights in every process"),
        (HeadElsewhere, "the same frames of a restored model"),
        (SeedsInBuild, "a seed that stays set in torch"),
    ],
)
def test_what_is_wrong_with_a_plugin_is_found(model, finding):
    with pytest.raises(CheckFailed, match=finding):
        check_world_model(WorldModelPlugin(config=Config, build=model, summary="one layer"), env=INFO)

"""`gym_hil`: a scripted person takes over from the policy, and devices that are not there."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import numpy as np
import pytest

from vla_rl.core.contexts import EnvContext
from vla_rl.core.errors import UserError
from vla_rl.core.spec.spec import make_component
from vla_rl.core.spec.structure import Problems
from vla_rl.core.types import ActionSource
from vla_rl.plugins.envs.gym_hil import plugin as gym_hil
from vla_rl.plugins.envs.gym_hil.env import DrawCameras
from vla_rl.plugins.envs.gymnasium.config import STATES
from vla_rl.testing import check_env

NOTHING = np.array([0.0, 0.0, 0.0, 1.0], np.float32)
"""The action of a policy that keeps still."""
installed = pytest.mark.skipif(find_spec("gym_hil") is None, reason="needs gym-hil: make gymnasium-packages")


@pytest.fixture
def painted(monkeypatch):
    """Images that are painted from the positions of hand and cube, because software takes a second for a real one."""

    def render(self):
        sensor = self.env.unwrapped.data.sensor
        positions = np.concatenate([sensor(name).data for name in ("2f85/pinch_pos", "block_pos")])
        image = np.zeros((self._size, self._size, 3), np.uint8)
        image[:2, 0] = np.clip(255 * (positions + 0.5) / 1.5, 0, 255).reshape(2, 3)
        return dict.fromkeys(self._cameras, image)

    monkeypatch.setattr(DrawCameras, "render", render)


class Device:
    """A takeover device as `module:Class`: the person moves the hand up at the second step, and then pulls the plug."""

    def __init__(self, env, unplugged_at=10**6, status=None, breaks=False):
        self.unplugged_at = unplugged_at
        self.status = status
        self.breaks = breaks
        self.running = True
        self.steps = 0

    def start(self):
        if self.breaks:
            raise OSError("no such device")

    def stop(self):
        pass

    def reset(self):
        self.steps = 0

    def update(self):
        self.steps += 1
        self.running = self.steps < self.unplugged_at

    def should_intervene(self):
        return self.steps == 2

    def get_deltas(self):
        return 0.0, 0.0, 3.0

    def gripper_command(self):
        return "no-op"

    def get_episode_end_status(self):
        return self.status if self.steps == 3 else None


def make(num_envs=1, chunk=4, **settings):
    defaults = {"cameras": ["front"], "image_size": 8, "processes": {"apart": False}}
    config = make_component("env", "gym_hil", **defaults | settings).config
    return gym_hil.build(config, EnvContext(num_envs=num_envs, chunk=chunk))


def episode(env, state):
    """Play an episode in which the policy keeps still. Return its results, one for each chunk."""
    one = np.ones(1, np.int64)
    env.reset(one * 0, one * state, one)
    results = []
    while not results or not (results[-1].terminated | results[-1].truncated).any():
        results.append(env.chunk_step(np.tile(NOTHING, (1, 4, 1)), np.array([True]), True))
        assert not env.faults()
    return results


def sources(results):
    return np.concatenate([result.source[result.executed] for result in results]).tolist()


@installed
@pytest.mark.sim
def test_a_scripted_person_lifts_the_cube_after_steps_without_progress(painted):
    env = make(person={"type": "scripted", "after": 4})
    results = episode(env, STATES)
    source = sources(results)
    assert source[:4] == [ActionSource.POLICY] * 4 and set(source[4:]) == {ActionSource.EXPERT}
    assert results[-1].success.all() and results[-1].terminated.any() and len(source) < 40
    by_person = np.concatenate([result.executed_actions[result.source > 0] for result in results])
    low, high = np.array(env.info.action_low), np.array(env.info.action_high)
    assert ((by_person >= low) & (by_person <= high)).all() and np.ptp(by_person[:, 3]) == 2.0
    env.close()


@installed
@pytest.mark.sim
def test_a_person_gives_the_robot_back_and_leaves_evaluations_alone(painted):
    env = make(person={"type": "scripted", "after": 2, "steps": 3, "in_evaluation": False}, max_steps=12)
    source = sources(episode(env, STATES + 1))
    assert source[:5] == [0, 0, *[int(ActionSource.EXPERT)] * 3] and source[5] == 0
    assert not any(sources(episode(env, 0)))
    env.close()


@installed
@pytest.mark.sim
def test_no_takeovers_without_a_person():
    env = make(max_steps=4)
    (result,) = episode(env, 0)
    assert not env.info.takeovers and result.source is None and env.info.deterministic
    image = result.obs.images["front"][0]
    assert image.shape == (8, 8, 3) and len(np.unique(image)) > 10, "a real image"
    env.close()


@installed
@pytest.mark.sim
def test_fast_images_show_the_scene_and_leave_physics_alone():
    fast = make(max_steps=4, fast_render=True, image_size=64)
    plain = make(max_steps=4)
    (image_result,) = episode(fast, 0)
    (plain_result,) = episode(plain, 0)
    for image in image_result.obs.images.values():
        assert image.shape == (1, 64, 64, 3) and len(np.unique(image)) > 10
        pink = (image[0, ..., 0] > 150) & (image[0, ..., 1] < 0.7 * image[0, ..., 0])
        assert pink.any(), "the cube is in the image"
    np.testing.assert_array_equal(image_result.obs.state, plain_result.obs.state)
    fast.close()
    plain.close()


@installed
@pytest.mark.sim
@pytest.mark.parametrize("status", ["success", "failure", "rerecord_episode"])
def test_a_person_acts_and_ends_the_episode(painted, status):
    env = make(person={"type": "custom", "controller": f"{__name__}:Device", "kwargs": {"status": status}})
    (result,) = episode(env, 0)
    assert sources([result]) == [0, int(ActionSource.PERSON), 0] and not env.info.deterministic
    assert result.executed_actions[0, 1].tolist() == [0.0, 0.0, 1.0, 1.0], "3.0 is clipped to the bounds"
    assert result.success.all() == (status == "success") and result.rewards[0, 2] == float(status == "success")
    assert (
        result.terminated[0, 2] == (status != "rerecord_episode") and result.truncated[0, 2] != result.terminated[0, 2]
    )
    env.close()


@installed
@pytest.mark.sim
def test_a_device_that_disappears_or_was_never_there_ends_the_run_with_its_name(painted):
    env = make(person={"type": "custom", "controller": f"{__name__}:Device", "kwargs": {"unplugged_at": 6}})
    with pytest.raises(UserError, match=r"takeover device '.*:Device' is not there any more .* connect it"):
        episode(env, 0)
    env.close()
    with pytest.raises(
        UserError, match=r"takeover device '.*:Device' does not work \(start: OSError: no such device\)"
    ):
        make(person={"type": "custom", "controller": f"{__name__}:Device", "kwargs": {"breaks": True}})
    with pytest.raises(UserError, match="person.controller: 'nowhere:Pad' cannot be made: ModuleNotFoundError"):
        make(person={"type": "custom", "controller": "nowhere:Pad"})


@installed
@pytest.mark.sim
def test_a_state_places_the_cube_whatever_went_before(painted):
    """gym-hil's own seed does not place it."""
    env = make()
    seen = {}
    for state in (3, 5, 3, 4, 5, 3):
        image = env.reset(np.array([0]), np.array([state]), np.array([state])).images["front"][0]
        assert np.array_equal(seen.setdefault(state, image), image), f"state {state} began differently"
    cubes = {image[1, 0].tobytes() for image in seen.values()}
    assert len(cubes) == 3
    env.close()


@installed
@pytest.mark.sim
def test_it_keeps_to_the_contract_with_a_scripted_person(painted):
    check_env(make(num_envs=2, person={"type": "scripted", "after": 2}, max_steps=8), num_envs=2, chunk=4, seconds=3)


def test_a_person_holds_one_robot():
    with pytest.raises(UserError, match="gamepad with 2 envs, and a person holds one robot at a time"):
        make(num_envs=2, person={"type": "gamepad"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"person": {"type": "joystick"}}, "type: expected one of 'scripted', 'gamepad', 'keyboard', 'custom', got"),
        ({"person": {"type": "scripted", "kwargs": {"speed": 1}}}, "person.kwargs: unknown key"),
        ({"person": {"type": "keyboard", "after": 3}}, "person.after: unknown key"),
        ({"person": {"type": "custom", "controller": "joystick"}}, "person.controller: 'controller' must match regex"),
        ({"person": {"controller": "keyboard"}}, "person.type: required, but missing; one of 'scripted', 'gamepad'"),
        ({"control_hz": 0}, "0.* actions a second; give a number above 0"),
        ({"cameras": ["front", "front"]}, "front given more than once"),
        ({"cameras": ["side"]}, "side"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, message):
    with pytest.raises(Problems, match=message):
        make(**settings)


def test_without_the_package_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "gym_hil", None)
    with pytest.raises(UserError, match="gym_hil needs the package gym-hil: pip install --no-deps gym-hil"):
        make()

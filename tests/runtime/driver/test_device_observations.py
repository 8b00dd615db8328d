"""Images of a simulator on a device stay there until the policy on the same device has used them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attrs import evolve
from scripted_runs import scripted_spec

from vla_rl.core.declarations import EnvPlugin, ModelPlugin
from vla_rl.core.run.loop import collect_rollout, flow_of
from vla_rl.core.run.state import State
from vla_rl.core.spec.spec import parse_spec
from vla_rl.core.types import Observation
from vla_rl.runtime.start import start
from vla_rl.testing.linear import LinearModel
from vla_rl.testing.scripted import LinearConfig, ScriptedConfig, ScriptedEnv


class OnDevice(torch.Tensor):
    """A tensor that refuses to come to the host, as one on a device would have to. What is computed from it is one too;
    copies of rows are."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func.__name__ in ("cpu", "numpy", "tolist", "item", "__array__"):
            raise AssertionError(f"{func.__name__} of an image: it left the device")
        return super().__torch_function__(func, types, args, kwargs or {})


def on_device(obs: Observation) -> Observation:
    return evolve(
        obs, images={name: torch.from_numpy(image).as_subclass(OnDevice) for name, image in obs.images.items()}
    )


class DeviceEnv(ScriptedEnv):
    def reset(self, env_ids, state_ids, seed):
        return on_device(super().reset(env_ids, state_ids, seed))

    def chunk_step(self, actions, active, stop_at_end):
        result = super().chunk_step(actions, active, stop_at_end)
        return evolve(result, obs=on_device(result.obs))


class Seeing(LinearModel):
    """Acts on images that are on the device, and on no others."""

    def sample_chunk(self, obs, noise, greedy):
        images = obs.images.values()
        blank = all(isinstance(image, np.ndarray) and not image.any() for image in images)  # the run measures its size
        assert blank or all(isinstance(image, OnDevice) for image in images)
        return super().sample_chunk(obs, noise, greedy)

    def values(self, obs):
        assert all(isinstance(image, OnDevice) for image in obs.images.values())
        return super().values(obs)


def build_env(config, context):
    return DeviceEnv(context.num_envs, chunk=context.chunk, first_env=context.first_env, length=3)


def build_model(config, context):
    return Seeing(context.env, context.chunk, values=context.values)


vla_rl_plugins = {
    "env": {"on_device": EnvPlugin(config=ScriptedConfig, build=build_env, summary="images refuse to leave")},
    "model": {"seeing": ModelPlugin(config=LinearConfig, build=build_model, summary="sees what it gets")},
}


@pytest.mark.parametrize(
    "rollout",
    [{"group_size": 1}, {"episodes": None, "auto_reset": {"steps": 4}, "group_size": 1}],
    ids=["episodes", "auto_reset"],
)
def test_images_reach_the_policy_without_the_host(rollout):
    spec = parse_spec(
        scripted_spec(
            plugins=[__file__],
            env={"type": "on_device", "num_envs": 4},
            model={"type": "seeing"},
            rollout=rollout,
            algorithm={"type": "ppo"},
        )
    )
    runtime = start(spec)
    rollout_of_step, _, _ = collect_rollout(runtime, flow_of(spec, State()), 1)
    assert rollout_of_step.valid.any(-1).sum() >= 8
    runtime.workers.close()


def test_the_tensor_of_this_test_refuses_to_leave():
    image = torch.zeros(2, 3).as_subclass(OnDevice)
    rows = torch.cat([image, image])[1:]
    for leave in (rows.cpu, rows.numpy, rows.tolist, lambda: np.asarray(rows)):
        with pytest.raises(AssertionError, match="left the device"):
            leave()

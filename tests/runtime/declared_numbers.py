"""A plugin in one file: simulators and a model that report numbers of their own, and an algorithm whose loss raises
unless each sample has the numbers of its own chunk."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import attrs
import numpy as np
import torch
from attrs import frozen
from fragile import Fragile, FragileConfig, MakeFragile
from fragile import build as build_fragile

from vla_rl.core.contexts import EnvContext, ModelContext
from vla_rl.core.declarations import AlgorithmPlugin, EnvPlugin, ModelPlugin
from vla_rl.core.hookspecs import Algorithm
from vla_rl.core.types import Advantages, AdvantageScope, Chunk, ChunkResult, Loss, to_numpy
from vla_rl.testing.linear import LinearModel
from vla_rl.testing.scripted import LinearConfig, ScriptedConfig, ScriptedEnv, read_stamp
from vla_rl.toolkit.envs.single_env import Outcome
from vla_rl.toolkit.envs.subproc_envs import SubprocEnvs

OF_ACTIONS = {"pushed": "C", "sides": "C 2"}


def numbers_of(actions: Any) -> dict[str, Any]:
    return {"pushed": 3 * actions[..., 0], "sides": np.stack([actions[..., 0], -actions[..., 1]], -1)}


@frozen(kw_only=True)
class MeasuredConfig(ScriptedConfig):
    lacks: str = ""
    """A number that is missing from the third chunk on."""
    undeclared: bool = False


class Measured(ScriptedEnv):
    """A batched simulator that says three numbers an action, and one a chunk."""

    def __init__(self, config: MeasuredConfig, context: EnvContext) -> None:
        options = attrs.asdict(config, filter=lambda known, _: known.name not in ("lacks", "undeclared"))
        super().__init__(
            context.num_envs, chunk=context.chunk, first_env=context.first_env, **{**options, "stamp": True}
        )
        declared = {} if config.undeclared else {**OF_ACTIONS, "scene": ""}
        self.info = attrs.evolve(self.info, extras=declared)
        self._lacks = config.lacks

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        result = super().chunk_step(actions, active, stop_at_end)
        extras = numbers_of(to_numpy(actions)) | {"scene": self._state.astype(np.float32)}
        if self._lacks and self._calls > 2:
            del extras[self._lacks]
        return attrs.evolve(result, extras=extras)


@frozen(kw_only=True)
class ProcessConfig(FragileConfig):
    lacks: str = ""


class MeasuredProcess(Fragile):
    def step(self, action: np.ndarray) -> Outcome:
        numbers = {name: value for name, value in numbers_of(action).items() if name != self.config.lacks}
        return super().step(action)._replace(extras=numbers)


@frozen
class MakeMeasured(MakeFragile):
    def __call__(self, number: int) -> MeasuredProcess:
        return MeasuredProcess(self.config, number)


def build_processes(config: ProcessConfig, context: EnvContext) -> SubprocEnvs:
    fragile = build_fragile(config, context)
    info = attrs.evolve(fragile.info, extras=OF_ACTIONS)
    states = {split: fragile.reset_states(split) for split in ("train", "eval")}
    return SubprocEnvs(info, states, MakeMeasured(config), context, config.processes)


@frozen(kw_only=True)
class DoubtingConfig(LinearConfig):
    reports: bool = True
    declares: str = ""
    """A further number, the same as the doubt."""


class Doubting(LinearModel):
    """A policy that says how much it doubts each action."""

    extras = MappingProxyType({"doubt": "C"})
    reports = True

    def sample_chunk(self, obs: Any, noise: Any, greedy: bool) -> Chunk:
        chunk = super().sample_chunk(obs, noise, greedy)
        doubt = dict.fromkeys(self.extras, 5 * chunk.actions[..., 1]) if self.reports else {}
        return attrs.evolve(chunk, extras={**chunk.extras, **doubt})


def build_model(config: DoubtingConfig, context: ModelContext) -> Doubting:
    model = Doubting(context.env, context.chunk, bins=config.bins, seed=context.seed, values=context.values)
    model.reports = config.reports
    if config.declares:
        model.extras = {**model.extras, config.declares: "C"}
    return model


@frozen(kw_only=True)
class CheckConfig:
    reads: str = "pushed"


class ChecksNumbers(Algorithm):
    """REINFORCE that is paid for pushing, as the simulator reports it."""

    off_policy = True
    advantage_scope = AdvantageScope.GROUP

    def __init__(self, config: CheckConfig, context: Any) -> None:
        self.reads = config.reads

    def advantages(self, rollout: Any) -> Advantages:
        valid = rollout.valid.float()
        assert rollout.extras["pushed"].shape == valid.shape
        assert not rollout.extras["pushed"][~rollout.valid].any()
        pushed = rollout.extras["pushed"].sum((0, 2))[None, :, None] * valid
        return Advantages(advantages=rollout.rewards.sum((0, 2))[None, :, None] * valid + pushed, weights=valid)

    def loss(self, scores: Any, batch: Any) -> Loss:
        batch.extras[self.reads]
        valid, actions = batch.valid, torch.as_tensor(batch.chunk.actions)
        for name, numbers in numbers_of(actions.numpy()).items():
            expected = torch.as_tensor(numbers)
            mask = valid if expected.ndim == 2 else valid[..., None]
            assert torch.equal(batch.extras[name], torch.where(mask, expected, 0.0)), name
        assert torch.equal(batch.extras["doubt"], 5 * actions[..., 1])
        if "scene" in batch.extras:
            assert batch.extras["scene"].tolist() == read_stamp(batch.obs).state.tolist()
        total = -(scores.log_probs.sum(-1) * batch.advantages * batch.weights).sum()
        return Loss(total=total, metrics={"loss/policy": total.detach(), "checked": batch.weights.sum()})


vla_rl_plugins = {
    "env": {
        "measured": EnvPlugin(config=MeasuredConfig, build=Measured, summary="reports numbers", expert=True),
        "measured_processes": EnvPlugin(config=ProcessConfig, build=build_processes, summary="reports numbers"),
    },
    "model": {"doubting": ModelPlugin(config=DoubtingConfig, build=build_model, summary="reports doubts")},
    "algorithm": {"checks_numbers": AlgorithmPlugin(config=CheckConfig, build=ChecksNumbers, summary="checks numbers")},
}

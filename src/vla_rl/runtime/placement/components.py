"""Components of a spec, built and wrapped in the process that uses them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from vla_rl.core.catalogue import build, hook_modules, installed_plugins, load
from vla_rl.core.contexts import AlgorithmContext, DataContext, EnvContext, RewardModelContext
from vla_rl.core.hookspecs import Algorithm, Demonstrations, SimEnv
from vla_rl.core.manager import Named, wrap
from vla_rl.core.reward_models import RewardModel
from vla_rl.core.spec.sections import Component
from vla_rl.core.spec.spec import Spec
from vla_rl.core.spec.yaml import dotted_path
from vla_rl.core.types import EnvInfo, ValueGranularity
from vla_rl.runtime.placement.assignments import Assignment
from vla_rl.toolkit.algorithms.declarations import check_declarations
from vla_rl.toolkit.algorithms.result_checks import ResultGuard
from vla_rl.toolkit.data.mixture import MixedDemonstrations
from vla_rl.toolkit.data.samples import check_sample
from vla_rl.toolkit.data.validation import CheckedDemonstrations
from vla_rl.toolkit.envs.settings import in_processes


def build_algorithm(spec: Spec, device: str = "cpu") -> Algorithm:
    """Build the spec's algorithm with its wrappers. Raises PluginError for a declaration against the contract."""
    context = AlgorithmContext(seed=spec.seed, device=device, chunk=spec.rollout.chunk)
    name = spec.algorithm.type
    component: Algorithm = build("algorithm", name, spec.algorithm.config, context, spec.plugins)
    check_declarations(component, name)
    guard = (f"{name}: results", ResultGuard(name, component.extras))
    return wrap("algorithm", component, name, [guard, *hook_modules(spec.plugins)])


def values_for(algorithm: Algorithm) -> ValueGranularity:
    """Return whether the algorithm needs values, and for each chunk or for each action."""
    if not algorithm.needs.values:
        return "none"
    return "action" if algorithm.value_granularity == "action" else "chunk"


def build_env(spec: Spec, assignment: Assignment, index: int) -> SimEnv:
    """Build the simulator of a worker's lane, without wrappers."""
    lane = next(lane for lane in assignment.lanes if lane.index == index)
    context = EnvContext(
        seed=spec.seed,
        device=assignment.slot.device,
        chunk=spec.rollout.chunk,
        num_envs=lane.num_envs,
        first_env=lane.first_env,
    )
    config = in_processes(spec.env.config) if assignment.concurrent_lanes else spec.env.config
    env: SimEnv = build("env", spec.env.type, config, context, spec.plugins)
    return env


def build_plain_env(spec: Spec, num_envs: int) -> SimEnv:
    """Build the spec's simulator in this process, on the CPU."""
    context = EnvContext(seed=spec.seed, chunk=spec.rollout.chunk, num_envs=num_envs)
    env: SimEnv = build("env", spec.env.type, spec.env.config, context, spec.plugins)
    return env


def describe_simulator(spec: Spec) -> EnvInfo:
    """Return the description of the spec's simulator, which is built only where its plugin cannot say."""
    describe = load("env", spec.env.type, spec.plugins).env_info
    if describe is not None:
        return describe(spec.env.config)
    with closing(build_plain_env(spec, 1)) as env:
        return env.info


def build_reward_model(spec: Spec, assignment: Assignment, info: EnvInfo, wrappers: Named) -> RewardModel:
    """Build the model of the spec's `rewards:` for the simulators of a worker."""
    assert spec.rewards is not None
    context = RewardModelContext(
        seed=spec.seed,
        device=assignment.slot.device,
        chunk=spec.rollout.chunk,
        num_envs=sum(lane.num_envs for lane in assignment.lanes),
        env=info,
    )
    model: RewardModel = build("reward_model", spec.rewards.type, spec.rewards.config, context, spec.plugins)
    return wrap("reward_model", model, spec.rewards.type, wrappers)


def find_data_plugin(folder: Path, modules: Sequence[str] = ()) -> str:
    """Return the data plugin whose files a folder has; for others `lerobot`, whose message says what they are."""
    plugins = {name: load("data", name, modules) for name in installed_plugins("data", modules)}
    return next((name for name, one in plugins.items() if any(any(folder.glob(f)) for f in one.files)), "lerobot")


def open_data(spec: Spec, info: EnvInfo, device: str, wrappers: Named) -> Demonstrations:
    """Open the demonstrations of the spec's `imitation:`. Raises UserError where they do not fit the simulator."""
    assert spec.imitation is not None
    data_sets = spec.imitation.data_sets()
    names = (
        [f"{dotted_path(path)} ({part.type})" for path, part in data_sets]
        if len(data_sets) > 1
        else [f"data {part.type!r}" for _, part in data_sets]
    )
    opened = [
        _open_data_set(spec, part, name, info, device, wrappers)
        for (_, part), name in zip(data_sets, names, strict=True)
    ]
    return opened[0] if len(opened) == 1 else MixedDemonstrations(opened, names)


def _open_data_set(
    spec: Spec, part: Component, source: str, info: EnvInfo, device: str, wrappers: Named
) -> Demonstrations:
    """Open one data set. `source`: the data set in words, for messages."""
    context = DataContext(seed=spec.seed, device=device, chunk=spec.rollout.chunk, env=info)
    opened: Demonstrations = build("data", part.type, part.config, context, spec.plugins)
    data = wrap("data", opened, part.type, wrappers)
    simulator = f"env {spec.env.type!r}"
    check_sample(source, data, simulator, info, spec.rollout.chunk)
    return CheckedDemonstrations(data, source, simulator, info, spec.rollout.chunk)

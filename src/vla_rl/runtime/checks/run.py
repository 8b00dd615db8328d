"""Checks for which a run is refused. `check_spec` finds all that shows before there are any processes, and is all of
`vla-rl check`. The other checks are made on components once they are built, before the first step."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress

from vla_rl.core.augmentation import AugmentSpec
from vla_rl.core.capabilities import HasCritic, HasReference, Offloadable
from vla_rl.core.catalogue import installed_plugins, load
from vla_rl.core.contexts import CheckContext
from vla_rl.core.declarations import TrainingData
from vla_rl.core.errors import PluginError, SpecError, UserError, did_you_mean
from vla_rl.core.hookspecs import Algorithm, SimEnv, VLAModel
from vla_rl.core.installation import OWN_DIST
from vla_rl.core.paths import path_error
from vla_rl.core.plan import Cluster
from vla_rl.core.requirements import keep_build, unmet_base
from vla_rl.core.run.runtime import Scaling
from vla_rl.core.run.session import build_listeners
from vla_rl.core.run.shape import RunShape
from vla_rl.core.spec.sections import ImitationSpec
from vla_rl.core.spec.source import Item, format_problems
from vla_rl.core.spec.spec import (
    Component,
    Spec,
    asks_expert,
    find_missing_packages,
    has_own_policy,
    suites_of,
    takes_data_statistics,
    trains_on_transitions,
)
from vla_rl.core.spec.structure import Problems
from vla_rl.core.types import AdvantageScope, EnvInfo
from vla_rl.runtime.checks.imagination import imagination_problems
from vla_rl.runtime.checks.interpreter import interpreter_problems
from vla_rl.runtime.checks.known_checkpoints import checkpoint_lines, checkpoint_problems, checkpoint_warnings
from vla_rl.runtime.checks.no_effect import precision_warnings, transfer_warnings, without_effect
from vla_rl.runtime.checks.plan import compile_problems, plan_with_problems
from vla_rl.runtime.placement.components import build_algorithm
from vla_rl.runtime.placement.hardware import machine_resources
from vla_rl.runtime.planning.known_sizes import known_info
from vla_rl.toolkit.algorithms.policy_gradient import GroupSettings
from vla_rl.toolkit.data.recording import RecordSettings
from vla_rl.toolkit.hooks.files import belongs_to_run, same_file
from vla_rl.toolkit.trainers.settings import CriticWarmupSettings, DemonstrationSettings

logger = logging.getLogger(__name__)


def check_spec(spec: Spec, *, training: bool, imitation: bool = False, cluster: Cluster | None = None) -> None:
    """Check all that shows without building a simulator or a network, and without access to other machines: files,
    names, requirements of components on each other, the plan.

    Raises SpecError with all problems. Logs warnings about settings without effect.

    Args:
        training: the run trains by reinforcement learning.
        imitation: the run reads the spec's `imitation:`.
        cluster: machine that is to run it; None: this one, or the one at `runtime.address`, which only a run can see.
    """
    reads_data = imitation or (training and trains_on_transitions(spec))
    problems = list(find_missing_packages(spec, reads_data))
    lacking = {path for path, _ in problems}
    problems += checkpoint_problems(spec)
    by_data = takes_data_statistics(spec) and not training  # cloned, or evaluated after cloning
    for path, kind, part in _local_components(spec, reads_data):
        if path not in lacking:
            problems += _plugin_problems(spec, path, kind, part, scaling={} if by_data and kind == "model" else None)
    if training or imitation:
        problems += _engine_problems(spec)
    if training:
        problems += _training_problems(spec)
    problems += _trainer_problems(spec, training=training, imitation=imitation)
    if training or imitation:
        with suppress(UserError):  # nothing is known of the simulator before it is built: the run checks it then
            problems += _camera_problems(spec, known_info(spec, []), training, imitation)
    if ("algorithm",) not in lacking:
        problems += _algorithm_problems(spec)
    problems += [*_hook_problems(spec, lacking), *_recording_problems(spec, training)]
    problems += _interpreter_problems(spec)
    cluster = cluster or (None if spec.runtime.address is not None else machine_resources())
    plan = None
    if cluster is not None:
        plan, plan_problems = plan_with_problems(spec, training, cluster)
        if plan is not None:
            plan_problems += compile_problems(spec, plan, learns=training or imitation)
        problems += plan_problems
    if problems:
        raise SpecError(format_problems(problems, spec.source))
    if unmet := unmet_base():
        logger.warning("warning: %s needs %s: %s", OWN_DIST, ", ".join(unmet), keep_build(unmet))
    for line in checkpoint_lines(spec):
        logger.warning("%s", line)
    warnings = [*checkpoint_warnings(spec), *without_effect(spec, training=training, imitation=imitation)]
    if plan is not None:
        warnings += [*transfer_warnings(spec, plan), *precision_warnings(spec, plan)]
    for text in format_problems(warnings, spec.source):
        logger.warning("warning: %s", text)


def check_simulators(spec: Spec) -> None:
    """Raise UserError for what simulators lack on this machine, found out by trying. The driver calls this."""
    if on_this_machine(spec):
        run_preflight(spec)


def on_this_machine(spec: Spec) -> bool:
    """Return whether simulators run in this interpreter, and on no other machine."""
    return spec.env.python is None and spec.runtime.address is None


def run_preflight(spec: Spec) -> None:
    """Let the simulator plugin check what is lacking here. Raises UserError."""
    look = load("env", spec.env.type, spec.plugins).preflight
    if look is not None:
        look(spec.env.config)


def check_offload(env: SimEnv, name: str) -> None:
    """Raise PluginError for a simulator that cannot be offloaded."""
    if not isinstance(env, Offloadable):
        raise PluginError(
            f"env {name!r} cannot be offloaded: it does not inherit vla_rl.Offloadable; leave out "
            f"placement.offload.sim, or give simulators separate devices (placement: disaggregated)"
        )


def check_critic(model: VLAModel, spec: Spec) -> None:
    """Raise PluginError for a model without the critic that the algorithm needs."""
    if not isinstance(model, HasCritic) or model.critic is None:
        lack = "its `critic` is None" if isinstance(model, HasCritic) else "it does not inherit vla_rl.HasCritic"
        raise PluginError(
            f"algorithm {spec.algorithm.type!r} needs values, and model {spec.model.type!r} has no value head "
            f"({lack}); choose an algorithm without a critic, or a model with one"
        )


def check_reference(model: VLAModel, spec: Spec) -> None:
    """Raise UserError for a model without the reference policy that the algorithm needs."""
    if not isinstance(model, HasReference):
        raise UserError(
            f"algorithm {spec.algorithm.type!r} compares the policy with a reference (algorithm.kl), and model "
            f"{spec.model.type!r} has none as it is set (it does not inherit vla_rl.HasReference); set "
            f"algorithm.kl: null, or give the model `lora` if it takes it: without adapters "
            f"a reference would be a second copy of its weights"
        )


# ------------------------------------------------------------------------------------------------ internal


def _local_components(spec: Spec, reads_data: bool) -> Iterator[tuple[tuple[str | int, ...], str, Component]]:
    """Yield (path, kind, component) of the components whose files and packages are on this machine."""
    yield ("algorithm",), "algorithm", spec.algorithm
    if spec.runtime.address is not None:
        return
    yield ("rollout", "engine"), "engine", spec.rollout.engine
    if not has_own_policy(spec):
        yield ("model",), "model", spec.model
    if spec.env.python is None:
        yield ("env",), "env", spec.env
    if spec.world_model is not None:
        yield ("world_model",), "world_model", spec.world_model
    if spec.rewards is not None:
        yield ("rewards",), "reward_model", spec.rewards
    if reads_data and spec.imitation is not None and spec.imitation.data is not None:
        yield from ((path, "data", part) for path, part in spec.imitation.data_sets())


def _plugin_problems(
    spec: Spec, path: tuple[str | int, ...], kind: str, part: Component, scaling: Scaling = None
) -> list[Item]:
    """Return the problems that the plugin itself finds in its settings. `scaling`: as in `CheckContext`."""
    rollout = spec.rollout
    context = CheckContext(
        seed=spec.seed,
        chunk=rollout.chunk,
        temperature=rollout.temperature,
        suites=suites_of(spec),
        scaling=scaling,
        num_envs=spec.env.num_envs,
    )
    try:
        check = load(kind, part.type, spec.plugins).check
        if check is not None:
            check(part.config, context)
    except Problems as exc:
        return [((*path, *inside), text) for inside, text in exc.items]
    except UserError as exc:
        return [(path, str(exc))]
    except OSError as exc:
        if (error := path_error(exc, {})) is None:
            raise
        return [(path, str(error))]
    except BaseException as exc:
        exc.add_note(f"in plugin {part.type!r}, checking the {kind}'s settings")
        raise
    return []


def _engine_problems(spec: Spec) -> Iterator[Item]:
    """Refuse to train with an engine that would not act with what is trained."""
    if has_own_policy(spec):
        text = (
            f"{spec.rollout.engine.type!r} acts with its own policy, so nothing can train it; evaluate it (vla-rl "
            f"eval), serve it, or leave it out to train model {spec.model.type!r}"
        )
        yield ("rollout", "engine"), text


def _training_problems(spec: Spec) -> Iterator[Item]:
    why = load("model", spec.model.type, spec.plugins).no_rl
    reason = why and why(spec.model.config)
    if reason and spec.train.steps:
        yield ("model",), f"model {spec.model.type!r} cannot be trained by reinforcement learning: {reason}"
    look = load("algorithm", spec.algorithm.type, spec.plugins).preflight
    try:
        if look is not None:
            look(spec.algorithm.config)
    except UserError as exc:
        yield ("algorithm",), str(exc)


def _trainer_problems(spec: Spec, *, training: bool, imitation: bool) -> Iterator[Item]:
    """Refuse trainers that learn from other data than those of their section."""
    sections: list[tuple[tuple[str, ...], Component, tuple[TrainingData, ...]]] = []
    if training:
        collected = (TrainingData.TRAJECTORIES, TrainingData.TRANSITIONS)
        sections.append((("trainer",), spec.trainer, collected))
        yield from _transition_problems(spec)
        yield from _expert_problems(spec)
    if imitation and spec.imitation is not None:
        recorded = (TrainingData.RECORDINGS,) if spec.imitation.data is not None else ()
        sections.append((("imitation", "trainer"), spec.imitation.trainer, (TrainingData.DEMONSTRATIONS, *recorded)))
        for key in ("steps", "lr"):
            if getattr(spec.imitation, key) is None:
                yield ("imitation", key), "required by vla-rl sft"
        yield from _critic_steps_problems(spec.imitation)
    for path, trainer, data in sections:
        trains_on = load("trainer", trainer.type, spec.plugins).trains_on
        if trains_on not in data:
            text = f"trainer {trainer.type!r} learns from {trains_on.value}, and here it would get {data[0].value}"
            yield (*path, "type"), text


def _critic_steps_problems(section: ImitationSpec) -> Iterator[Item]:
    """Refuse a run in which the policy never learns; one without any steps evaluates, and is let pass."""
    config = section.trainer.config
    if isinstance(config, CriticWarmupSettings) and section.steps and config.critic_steps >= section.steps:
        text = (
            f"all {section.steps} steps (imitation.steps) train the critics alone, and the policy stays as it is; give "
            f"fewer than {section.steps}, or raise imitation.steps"
        )
        yield ("imitation", "trainer", "critic_steps"), text


def _transition_problems(spec: Spec) -> Iterator[Item]:
    """Refuse what does not go with a trainer of transitions, and its algorithm without one."""
    trainer = spec.trainer.type
    if not trains_on_transitions(spec):
        if spec.algorithm.type == "transitions":
            yield ("algorithm", "type"), f"trainer {trainer!r} takes the loss of an algorithm; 'transitions' has none"
        return
    if spec.algorithm.type != "transitions":
        yield ("algorithm",), f"trainer {trainer!r} takes no loss of an algorithm; leave `algorithm` out"
    if spec.asynchrony.replay is not None:
        text = f"trainer {trainer!r} keeps transitions itself, as trainer.capacity says; leave asynchrony.replay out"
        yield ("asynchrony", "replay"), text
    config = spec.trainer.config
    has_data = spec.imitation is not None and spec.imitation.data is not None
    if isinstance(config, DemonstrationSettings) and config.demonstrations is not None and not has_data:
        text = (
            f"{config.demonstrations.share:g} is the share of demonstrations in a batch, and there are none; name a "
            f"recording in imitation.data, or leave it out"
        )
        yield ("trainer", "demonstrations"), text
    if spec.imagination is not None:
        yield ("imagination",), f"trainer {trainer!r} does not train on imagined trajectories; leave imagination out"


def check_cameras(spec: Spec, info: EnvInfo, *, training: bool, imitation: bool) -> None:
    """Raise SpecError for random changes of cameras that the simulator lacks. The driver, who knows, calls this."""
    problems = list(_camera_problems(spec, info, training, imitation))
    if problems:
        raise SpecError(format_problems(problems, spec.source))


def _camera_problems(spec: Spec, info: EnvInfo, training: bool, imitation: bool) -> Iterator[Item]:
    sections = {"trainer": spec.trainer.config} if training else {}
    for name, section in (sections | ({"imitation": spec.imitation} if imitation else {})).items():
        augment = getattr(section, "augment", None)
        for i, camera in enumerate((augment.cameras or ()) if isinstance(augment, AugmentSpec) else ()):
            if camera not in info.cameras:
                text = f"the simulator has no camera {camera!r}{did_you_mean(camera, info.cameras)}; it has: "
                yield (name, "augment", "cameras", i), text + (", ".join(info.cameras) or "none")


def _expert_problems(spec: Spec) -> Iterator[Item]:
    """Refuse a trainer that asks an expert with a simulator that has none."""
    if not asks_expert(spec) or load("env", spec.env.type, spec.plugins).expert:
        return
    with_expert = []
    for name in installed_plugins("env", spec.plugins):
        with suppress(PluginError):  # a plugin that cannot be imported offers nothing
            if load("env", name, spec.plugins).expert:
                with_expert.append(name)
    text = (
        f"trainer {spec.trainer.type!r} asks the simulator's scripted expert, and {spec.env.type!r} has none "
        f"(EnvPlugin.expert); these have one: {', '.join(with_expert)}. Where an operator can take over, use "
        f"trainer hg_dagger"
    )
    yield ("env", "type"), text


def _algorithm_problems(spec: Spec) -> list[Item]:
    try:
        algorithm = build_algorithm(spec)
        streamed = _streaming_problems(algorithm, spec) if spec.asynchrony.streaming_update else ()
        return [*_unmet_requirements(algorithm, spec), *streamed, *imagination_problems(algorithm, spec)]
    except PluginError as exc:
        return [(("algorithm",), str(exc))]


def _hook_problems(spec: Spec, lacking: set[tuple[str | int, ...]]) -> Iterator[Item]:
    """Build the hooks, so that unknown events are found; they do nothing before a run starts."""
    if any(path[0] == "hooks" for path in lacking):
        return
    for i, hook in enumerate(spec.hooks):
        yield from _plugin_problems(spec, ("hooks", i), "hook", hook)
    yield from _file_problems(spec)
    try:
        build_listeners(spec)
    except PluginError as exc:
        yield ("hooks",), str(exc)


def _file_problems(spec: Spec) -> Iterator[Item]:
    """Yield files in the run folder that two hooks would write."""
    writers: dict[str, str] = {}
    for i, hook in enumerate(spec.hooks):
        files = load("hook", hook.type, spec.plugins).files
        for file in () if files is None else files(hook.config):
            other = writers.setdefault(same_file(file), f"hooks[{i}]")
            if belongs_to_run(file):
                yield ("hooks", i), f"{hook.type!r} would write {file} in the run folder, which is the run's own"
            elif other != f"hooks[{i}]":
                text = f"{hook.type!r} writes {file} in the run folder, and so does {other}; leave one of the two out"
                yield ("hooks", i), text


def _recording_problems(spec: Spec, training: bool) -> Iterator[Item]:
    recording = [(i, hook.config) for i, hook in enumerate(spec.hooks) if isinstance(hook.config, RecordSettings)]
    for i, _ in recording[1:]:
        yield ("hooks", i), "another hook records episodes, and simulators keep them once; leave one of the two out"
    for i, settings in recording[:1]:
        if training and settings.what != "evaluation" and spec.rollout.auto_reset is not None:
            text = (
                "with rollout.auto_reset rollouts end in the midst of episodes, and whole ones are recorded; use "
                "what: evaluation, or rollout.episodes"
            )
            yield ("hooks", i, "what"), text


def _interpreter_problems(spec: Spec) -> Iterator[Item]:
    python = spec.env.python
    if python is not None and spec.runtime.address is None:
        yield from ((("env", "python"), text) for text in interpreter_problems(python))
    if python is not None and spec.runtime.backend == "local":
        yield ("env", "python"), "runtime.backend: local has one process and so one interpreter; use ray"


def _streaming_problems(algorithm: Algorithm, spec: Spec) -> Iterator[Item]:
    """Yield why groups cannot be trained on before the step is complete (streaming update)."""
    if algorithm.advantage_scope is not AdvantageScope.GROUP:
        why = algorithm.scope_reason or "its advantage_scope is STEP; choose another"
        text = f"algorithm {spec.algorithm.type!r} needs the whole step before learners can begin: {why}"
        yield ("asynchrony", "streaming_update"), f"{text}, or asynchrony.streaming_update: false"
    for key in [key for key in ("global_batch", "mini_batches") if getattr(spec.train, key) is not None]:
        text = (
            "with asynchrony.streaming_update an optimiser step has all samples of its training step: those of a "
            "smaller one are drawn from all; remove it, or set asynchrony.streaming_update: false"
        )
        yield ("train", key), text
    if spec.asynchrony.replay is not None:
        text = (
            "learners cannot begin with a part of what is trained on again; leave out asynchrony.replay, or set "
            "asynchrony.streaming_update: false"
        )
        yield ("asynchrony", "streaming_update"), text


def _unmet_requirements(algorithm: Algorithm, spec: Spec) -> list[Item]:
    """Return the requirements of the algorithm that are not met."""
    name, rollout = spec.algorithm.type, spec.rollout
    problems: list[Item] = []
    if algorithm.needs.groups and (rollout.group_size < 2 or rollout.auto_reset is not None):
        text = (
            f"algorithm {name!r} compares trajectories of a group: it needs rollout.group_size >= 2 (got "
            f"{rollout.group_size}) and rollout.episodes, without rollout.auto_reset"
        )
        problems.append((("rollout", "group_size"), text))
    if algorithm.needs.frames and rollout.auto_reset is not None:
        text = (
            f"algorithm {name!r} looks at the frames of whole trajectories: it needs rollout.episodes, without "
            f"rollout.auto_reset"
        )
        problems.append((("rollout", "auto_reset"), text))
    if not algorithm.needs.values:
        keys = {"value_lr": spec.train.value_lr, "critic_warmup_steps": spec.train.critic_warmup_steps}
        text = "{} is for a critic, and algorithm {!r} has none; remove it"
        problems += [(("train", key), text.format(value, name)) for key, value in keys.items() if value]
    if rollout.resample is not None and not algorithm.needs.groups:
        problems.append((("rollout", "resample"), f"it replaces groups that are filtered; algorithm {name!r} has none"))
    config = spec.algorithm.config
    if rollout.resample is not None and isinstance(config, GroupSettings) and not config.drops_groups:
        text = f"it replaces groups that are filtered, and algorithm {name!r}, as it is set, keeps all; add a filter"
        problems.append((("rollout", "resample"), text))
    return [*problems, *_replay_problems(algorithm, spec)]


def _replay_problems(algorithm: Algorithm, spec: Spec) -> Iterator[Item]:
    """Check the replay buffer's settings."""
    replay, per_step = spec.asynchrony.replay, RunShape.from_spec(spec).groups_per_step
    if replay is None:
        return
    section = ("asynchrony", "replay")
    if not algorithm.off_policy:
        text = (
            f"algorithm {spec.algorithm.type!r}, as it is set, takes old data for new, so nothing can be trained on "
            f"{replay.uses} times; use gipo, or a `correction` (decoupled, truncated, v-trace) where the algorithm has "
            f"one, or leave it out"
        )
        yield (*section, "uses"), text
    needed = (replay.uses - 1) * per_step
    demand = f"uses: {replay.uses} trains on {needed} earlier groups in a step ({replay.uses - 1} x {per_step})"
    if replay.capacity is not None and replay.capacity <= needed:
        text = (
            f"{replay.capacity} groups are too few to draw from: {demand}; give more, such as {2 * needed}, or leave "
            f"it out to replay exactly these"
        )
        yield (*section, "capacity"), text
    lag = max(spec.rollout.lag, spec.asynchrony.max_lag)
    if replay.max_lag is not None and replay.max_lag <= lag:
        yield (*section, "max_lag"), f"a chunk may be {lag} steps old when it is trained on first; give more than {lag}"

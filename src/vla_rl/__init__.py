"""vla-rl: train vision-language-action models by reinforcement learning.

Every public name, loaded on first use: contracts and the data that crosses them for authors of plugins; specs, runs and
all that the command line does for users. `vla_rl.toolkit` holds what plugins are built with, `vla_rl.testing` what they
are checked with.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vla_rl.cli.python import (
        Served,
        benchmark,
        check,
        check_env,
        clone,
        compare,
        doctor,
        evaluate,
        examples,
        export,
        known_checkpoints,
        list_plugins,
        new_plugin,
        open_run,
        plan,
        recipes,
        report,
        run,
        serve,
    )
    from vla_rl.cli.run_record import RunRecord
    from vla_rl.core.catalogue import build, load
    from vla_rl.core.errors import CheckpointError, NotOffered, PluginError, SpecError, UserError, did_you_mean
    from vla_rl.core.events import EpisodeFrames, Evaluation, Rate, Run
    from vla_rl.core.hookspecs import (
        Algorithm,
        Demonstrations,
        Placement,
        PolicyEngine,
        RunEvents,
        SimEnv,
        VLAModel,
    )
    from vla_rl.core.manager import broadcast, hookimpl, wrap
    from vla_rl.core.plan import Batching, Cluster, DoesNotFit, Job, MeasureFirst, Node, Plan, Slot
    from vla_rl.core.randomness import Noise, derived_seed, generator
    from vla_rl.core.reward_models import RewardModel
    from vla_rl.core.spec.spec import Spec, load_spec, parse_spec
    from vla_rl.core.spec.structure import at
    from vla_rl.core.trainers import (
        DemonstrationsData,
        ImitationStep,
        ModelInputs,
        OptimizerStep,
        Trainer,
        TrajectoryData,
        TrajectoryPart,
        UpdateMetrics,
        WindowData,
    )
    from vla_rl.core.types import (
        Advantages,
        AdvantageScope,
        Batch,
        Chunk,
        ChunkResult,
        Context,
        EnvInfo,
        Episode,
        Loss,
        Observation,
        Plugin,
        RecordedRewards,
        Requirements,
        ResetState,
        Rollout,
        Scores,
        Statistic,
        TaskInfo,
        TrainingData,
        UnexecutedActions,
        at_last_action,
        to_numpy,
    )
    from vla_rl.core.world_models import Windows, WorldModel
    from vla_rl.serving.policy import BadObservation, Policy, open_policy

__version__ = "0.1.0"
__all__ = [
    "AdvantageScope",
    "Advantages",
    "Algorithm",
    "BadObservation",
    "Batch",
    "Batching",
    "CheckpointError",
    "Chunk",
    "ChunkResult",
    "Cluster",
    "Context",
    "Demonstrations",
    "DemonstrationsData",
    "DoesNotFit",
    "EnvInfo",
    "Episode",
    "EpisodeFrames",
    "Evaluation",
    "ImitationStep",
    "Job",
    "Loss",
    "MeasureFirst",
    "ModelInputs",
    "Node",
    "Noise",
    "NotOffered",
    "Observation",
    "OptimizerStep",
    "Placement",
    "Plan",
    "Plugin",
    "PluginError",
    "Policy",
    "PolicyEngine",
    "Rate",
    "RecordedRewards",
    "Requirements",
    "ResetState",
    "RewardModel",
    "Rollout",
    "Run",
    "RunEvents",
    "RunRecord",
    "Scores",
    "Served",
    "SimEnv",
    "Slot",
    "Spec",
    "SpecError",
    "Statistic",
    "TaskInfo",
    "Trainer",
    "TrainingData",
    "TrajectoryData",
    "TrajectoryPart",
    "UnexecutedActions",
    "UpdateMetrics",
    "UserError",
    "VLAModel",
    "WindowData",
    "Windows",
    "WorldModel",
    "at",
    "at_last_action",
    "benchmark",
    "broadcast",
    "build",
    "check",
    "check_env",
    "clone",
    "compare",
    "derived_seed",
    "did_you_mean",
    "doctor",
    "evaluate",
    "examples",
    "export",
    "generator",
    "hookimpl",
    "known_checkpoints",
    "list_plugins",
    "load",
    "load_spec",
    "new_plugin",
    "open_policy",
    "open_run",
    "parse_spec",
    "plan",
    "recipes",
    "report",
    "run",
    "serve",
    "to_numpy",
    "wrap",
]
_MODULES = {
    "cli.python": (
        "Served",
        "benchmark",
        "check",
        "check_env",
        "clone",
        "compare",
        "doctor",
        "evaluate",
        "examples",
        "export",
        "known_checkpoints",
        "list_plugins",
        "new_plugin",
        "open_run",
        "plan",
        "recipes",
        "report",
        "run",
        "serve",
    ),
    "cli.run_record": ("RunRecord",),
    "core.catalogue": ("build", "load"),
    "core.errors": ("CheckpointError", "NotOffered", "PluginError", "SpecError", "UserError", "did_you_mean"),
    "core.events": ("EpisodeFrames", "Evaluation", "Rate", "Run"),
    "core.hookspecs": (
        "Algorithm",
        "Demonstrations",
        "Placement",
        "PolicyEngine",
        "RunEvents",
        "SimEnv",
        "VLAModel",
    ),
    "core.manager": ("broadcast", "hookimpl", "wrap"),
    "core.plan": ("Cluster", "DoesNotFit", "Job", "MeasureFirst", "Node", "Plan", "Slot", "Batching"),
    "core.randomness": ("Noise", "derived_seed", "generator"),
    "core.spec.spec": ("Spec", "load_spec", "parse_spec"),
    "core.spec.structure": ("at",),
    "core.trainers": (
        "DemonstrationsData",
        "ImitationStep",
        "ModelInputs",
        "OptimizerStep",
        "TrajectoryPart",
        "Trainer",
        "TrajectoryData",
        "UpdateMetrics",
        "WindowData",
    ),
    "core.reward_models": ("RewardModel",),
    "core.types": (
        "AdvantageScope",
        "Advantages",
        "Batch",
        "Chunk",
        "ChunkResult",
        "Context",
        "EnvInfo",
        "Episode",
        "Loss",
        "Observation",
        "Plugin",
        "RecordedRewards",
        "Requirements",
        "ResetState",
        "Rollout",
        "Scores",
        "Statistic",
        "TaskInfo",
        "TrainingData",
        "UnexecutedActions",
        "at_last_action",
        "to_numpy",
    ),
    "core.world_models": ("Windows", "WorldModel"),
    "serving.policy": ("BadObservation", "Policy", "open_policy"),
}
_MODULE_OF = {name: f"vla_rl.{module}" for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'vla_rl' has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})

"""vla-rl: train vision-language-action models by reinforcement learning.

Every public name, loaded on first use: contracts and the data that crosses them for authors of plugins; specs, runs and
all that the command line does for users. `vla_rl.toolkit` holds what plugins are built with, `vla_rl.testing` what they
are checked with.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vla_rl.version import __version__ as __version__

if TYPE_CHECKING:
    from vla_rl.cli.commands import check as check
    from vla_rl.cli.commands import check_env as check_env
    from vla_rl.cli.commands import clone as clone
    from vla_rl.cli.commands import compare as compare
    from vla_rl.cli.commands import convert as convert
    from vla_rl.cli.commands import doctor as doctor
    from vla_rl.cli.commands import evaluate as evaluate
    from vla_rl.cli.commands import examples as examples
    from vla_rl.cli.commands import export as export
    from vla_rl.cli.commands import fit_rewards as fit_rewards
    from vla_rl.cli.commands import inspect_data as inspect_data
    from vla_rl.cli.commands import install_gl as install_gl
    from vla_rl.cli.commands import known_checkpoints as known_checkpoints
    from vla_rl.cli.commands import list_plugins as list_plugins
    from vla_rl.cli.commands import new_plugin as new_plugin
    from vla_rl.cli.commands import open_run as open_run
    from vla_rl.cli.commands import plan as plan
    from vla_rl.cli.commands import recipes as recipes
    from vla_rl.cli.commands import report as report
    from vla_rl.cli.commands import run as run
    from vla_rl.cli.commands import serve as serve
    from vla_rl.cli.convert.convert import Conversion as Conversion
    from vla_rl.cli.run_record import RunRecord as RunRecord
    from vla_rl.cli.serve import Served as Served
    from vla_rl.core.capabilities import ActionTokens as ActionTokens
    from vla_rl.core.capabilities import Capturable as Capturable
    from vla_rl.core.capabilities import Compilable as Compilable
    from vla_rl.core.capabilities import ContinuesChunks as ContinuesChunks
    from vla_rl.core.capabilities import HasCritic as HasCritic
    from vla_rl.core.capabilities import HasFeatures as HasFeatures
    from vla_rl.core.capabilities import HasReference as HasReference
    from vla_rl.core.capabilities import Offloadable as Offloadable
    from vla_rl.core.capabilities import Reparameterised as Reparameterised
    from vla_rl.core.capabilities import Steerable as Steerable
    from vla_rl.core.capabilities import TrainsInParts as TrainsInParts
    from vla_rl.core.catalogue import build as build
    from vla_rl.core.catalogue import load as load
    from vla_rl.core.contexts import AlgorithmContext as AlgorithmContext
    from vla_rl.core.contexts import CheckContext as CheckContext
    from vla_rl.core.contexts import Context as Context
    from vla_rl.core.contexts import DataContext as DataContext
    from vla_rl.core.contexts import EngineContext as EngineContext
    from vla_rl.core.contexts import EnvContext as EnvContext
    from vla_rl.core.contexts import ModelContext as ModelContext
    from vla_rl.core.contexts import RewardModelContext as RewardModelContext
    from vla_rl.core.contexts import WorldModelContext as WorldModelContext
    from vla_rl.core.contexts import WorldModelTrainerContext as WorldModelTrainerContext
    from vla_rl.core.declarations import AlgorithmPlugin as AlgorithmPlugin
    from vla_rl.core.declarations import DataPlugin as DataPlugin
    from vla_rl.core.declarations import EnginePlugin as EnginePlugin
    from vla_rl.core.declarations import EnvPlugin as EnvPlugin
    from vla_rl.core.declarations import HookPlugin as HookPlugin
    from vla_rl.core.declarations import ModelPlugin as ModelPlugin
    from vla_rl.core.declarations import PlacementPlugin as PlacementPlugin
    from vla_rl.core.declarations import RewardModelPlugin as RewardModelPlugin
    from vla_rl.core.declarations import TrainerPlugin as TrainerPlugin
    from vla_rl.core.declarations import TrainingData as TrainingData
    from vla_rl.core.declarations import WorldModelPlugin as WorldModelPlugin
    from vla_rl.core.errors import CheckpointError as CheckpointError
    from vla_rl.core.errors import PluginError as PluginError
    from vla_rl.core.errors import SpecError as SpecError
    from vla_rl.core.errors import UserError as UserError
    from vla_rl.core.errors import did_you_mean as did_you_mean
    from vla_rl.core.events import EpisodeFrames as EpisodeFrames
    from vla_rl.core.events import Evaluation as Evaluation
    from vla_rl.core.events import MissingEpisode as MissingEpisode
    from vla_rl.core.events import Rate as Rate
    from vla_rl.core.events import Run as Run
    from vla_rl.core.hookspecs import Algorithm as Algorithm
    from vla_rl.core.hookspecs import Demonstrations as Demonstrations
    from vla_rl.core.hookspecs import Placement as Placement
    from vla_rl.core.hookspecs import PolicyEngine as PolicyEngine
    from vla_rl.core.hookspecs import RunEvents as RunEvents
    from vla_rl.core.hookspecs import SimEnv as SimEnv
    from vla_rl.core.hookspecs import VLAModel as VLAModel
    from vla_rl.core.manager import broadcast as broadcast
    from vla_rl.core.manager import hookimpl as hookimpl
    from vla_rl.core.manager import wrap as wrap
    from vla_rl.core.plan import Batching as Batching
    from vla_rl.core.plan import Cluster as Cluster
    from vla_rl.core.plan import DoesNotFit as DoesNotFit
    from vla_rl.core.plan import Job as Job
    from vla_rl.core.plan import MeasureFirst as MeasureFirst
    from vla_rl.core.plan import Node as Node
    from vla_rl.core.plan import Plan as Plan
    from vla_rl.core.plan import Slot as Slot
    from vla_rl.core.randomness import Noise as Noise
    from vla_rl.core.randomness import derived_seed as derived_seed
    from vla_rl.core.randomness import generator as generator
    from vla_rl.core.reward_models import RewardModel as RewardModel
    from vla_rl.core.spec.spec import Spec as Spec
    from vla_rl.core.spec.spec import load_spec as load_spec
    from vla_rl.core.spec.spec import parse_spec as parse_spec
    from vla_rl.core.spec.structure import at as at
    from vla_rl.core.trainers import DemonstrationsData as DemonstrationsData
    from vla_rl.core.trainers import ImitationStep as ImitationStep
    from vla_rl.core.trainers import ModelInputs as ModelInputs
    from vla_rl.core.trainers import OptimizerStep as OptimizerStep
    from vla_rl.core.trainers import Trainer as Trainer
    from vla_rl.core.trainers import TrajectoryData as TrajectoryData
    from vla_rl.core.trainers import TrajectoryPart as TrajectoryPart
    from vla_rl.core.trainers import Transitions as Transitions
    from vla_rl.core.trainers import TransitionsData as TransitionsData
    from vla_rl.core.trainers import UpdateMetrics as UpdateMetrics
    from vla_rl.core.trainers import WindowData as WindowData
    from vla_rl.core.types import ActionSource as ActionSource
    from vla_rl.core.types import Advantages as Advantages
    from vla_rl.core.types import AdvantageScope as AdvantageScope
    from vla_rl.core.types import Batch as Batch
    from vla_rl.core.types import Chunk as Chunk
    from vla_rl.core.types import ChunkResult as ChunkResult
    from vla_rl.core.types import EnvInfo as EnvInfo
    from vla_rl.core.types import Episode as Episode
    from vla_rl.core.types import Loss as Loss
    from vla_rl.core.types import Observation as Observation
    from vla_rl.core.types import RecordedRewards as RecordedRewards
    from vla_rl.core.types import Requirements as Requirements
    from vla_rl.core.types import ResetState as ResetState
    from vla_rl.core.types import Rollout as Rollout
    from vla_rl.core.types import Scores as Scores
    from vla_rl.core.types import Statistic as Statistic
    from vla_rl.core.types import TaskInfo as TaskInfo
    from vla_rl.core.types import UnexecutedActions as UnexecutedActions
    from vla_rl.core.types import at_last_action as at_last_action
    from vla_rl.core.types import to_numpy as to_numpy
    from vla_rl.core.world_models import Windows as Windows
    from vla_rl.core.world_models import WorldModel as WorldModel
    from vla_rl.serving.policy import BadObservation as BadObservation
    from vla_rl.serving.policy import Policy as Policy
    from vla_rl.serving.policy import open_policy as open_policy

_MODULES = {
    "cli.commands": (
        "check",
        "check_env",
        "clone",
        "compare",
        "convert",
        "doctor",
        "evaluate",
        "examples",
        "export",
        "fit_rewards",
        "inspect_data",
        "install_gl",
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
    "cli.convert.convert": ("Conversion",),
    "cli.run_record": ("RunRecord",),
    "cli.serve": ("Served",),
    "core.capabilities": (
        "ActionTokens",
        "Capturable",
        "Compilable",
        "ContinuesChunks",
        "HasCritic",
        "HasFeatures",
        "HasReference",
        "Offloadable",
        "Reparameterised",
        "Steerable",
        "TrainsInParts",
    ),
    "core.catalogue": ("build", "load"),
    "core.contexts": (
        "AlgorithmContext",
        "CheckContext",
        "Context",
        "DataContext",
        "EngineContext",
        "EnvContext",
        "ModelContext",
        "RewardModelContext",
        "WorldModelContext",
        "WorldModelTrainerContext",
    ),
    "core.declarations": (
        "AlgorithmPlugin",
        "DataPlugin",
        "EnginePlugin",
        "EnvPlugin",
        "HookPlugin",
        "ModelPlugin",
        "PlacementPlugin",
        "RewardModelPlugin",
        "TrainerPlugin",
        "TrainingData",
        "WorldModelPlugin",
    ),
    "core.errors": ("CheckpointError", "PluginError", "SpecError", "UserError", "did_you_mean"),
    "core.events": ("EpisodeFrames", "Evaluation", "MissingEpisode", "Rate", "Run"),
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
        "Transitions",
        "TransitionsData",
        "UpdateMetrics",
        "WindowData",
    ),
    "core.reward_models": ("RewardModel",),
    "core.types": (
        "ActionSource",
        "AdvantageScope",
        "Advantages",
        "Batch",
        "Chunk",
        "ChunkResult",
        "EnvInfo",
        "Episode",
        "Loss",
        "Observation",
        "RecordedRewards",
        "Requirements",
        "ResetState",
        "Rollout",
        "Scores",
        "Statistic",
        "TaskInfo",
        "UnexecutedActions",
        "at_last_action",
        "to_numpy",
    ),
    "core.world_models": ("Windows", "WorldModel"),
    "serving.policy": ("BadObservation", "Policy", "open_policy"),
}
_MODULE_OF = {name: f"vla_rl.{module}" for module, names in _MODULES.items() for name in names}
__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'vla_rl' has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})

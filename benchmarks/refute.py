"""Whether `vla-rl eval --refute` names the shortcuts of six policies that have one, and none of three that do not.

    python benchmarks/refute.py FOLDER [--sound RUN ...]

Policies are trained on tabletop in FOLDER, unless they are there. The file is a module of plugins too: film_resnet
without the instruction or one camera, and a tabletop that shows its evaluation states in training.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

import vla_rl
from vla_rl.core.contexts import EnvContext, ModelContext
from vla_rl.core.declarations import EnvPlugin, ModelPlugin
from vla_rl.core.types import Observation, ResetState
from vla_rl.plugins.envs.tabletop.config import TabletopConfig, describe_env
from vla_rl.plugins.envs.tabletop.simulator import Tabletop
from vla_rl.plugins.models.film_resnet.builder import FilmResnetPolicy, build_policy
from vla_rl.plugins.models.film_resnet.config import FilmResnetConfig

FEW = 160
"""Evaluation states that the overfitted policy was trained on."""


class PlantedPolicy(FilmResnetPolicy):
    """film_resnet that ignores something."""

    ignored = ""

    def _prepare_inputs(self, obs: Observation, offsets: Any = None) -> Any:
        if self.ignored == "instruction":
            obs = evolve(obs, instructions=("",) * len(obs))
        images = {name: image * 0 if name == self.ignored else image for name, image in obs.images.items()}
        return super()._prepare_inputs(evolve(obs, images=images), offsets)


@frozen(kw_only=True)
class PlantedConfig(FilmResnetConfig):
    """Keys of film_resnet, and what it ignores."""

    ignored: str = "instruction"
    """The instruction, or a camera."""


def build_planted(config: PlantedConfig, context: ModelContext) -> Any:
    policy = build_policy(config, context)
    policy.__class__ = type("Planted", (PlantedPolicy,), {"ignored": config.ignored})
    return policy


class LeakyTabletop(Tabletop):
    """Tabletop whose training states are some of the evaluation's, where its settings say so."""

    def __init__(self, config: LeakyConfig, context: EnvContext) -> None:
        super().__init__(config, context)
        self._leaks = config.leaks

    def reset_states(self, split: str) -> tuple[ResetState, ...]:
        states = super().reset_states("eval" if self._leaks else split)
        return states[:FEW] if self._leaks or split == "eval" else states


@frozen(kw_only=True)
class LeakyConfig(TabletopConfig):
    """Keys of tabletop."""

    leaks: bool = False
    """Train on evaluation states."""


vla_rl_plugins = {
    "model": {"planted": ModelPlugin(config=PlantedConfig, build=build_planted, summary="ignores something")},
    "env": {
        "leaky": EnvPlugin(
            config=LeakyConfig, build=LeakyTabletop, summary="shows its states", expert=True, env_info=describe_env
        )
    },
}
SPEC: dict[str, Any] = {
    "name": "policy",
    "plugins": [str(Path(__file__).resolve())],
    "model": {"type": "film_resnet"},
    "env": {"type": "tabletop", "num_envs": 64},
    "imitation": {
        "expert": {"episodes": 1024, "noise": 0.3},
        "steps": 500,
        "lr": 2e-3,
        "lr_schedule": "linear",
        "report_every": 100,
    },
    "rollout": {"chunk": 4, "episodes": 64, "group_size": 8},
    "algorithm": {"type": "grpo"},
    "train": {"steps": 10, "lr": 1e-4, "micro_batch": 64},
    "eval": {"before": False, "episodes_per_task": 5},
    "runtime": {"backend": "local"},
    "hooks": [],
}
PLANTED: dict[str, tuple[list[str], list[str]]] = {
    "does not read the instruction": (["model={type: planted}"], []),
    "does not read the instruction, two tasks": (["model={type: planted}", "env.tasks=[pick_red, pick_blue]"], []),
    "does not look at camera overhead": (["model={type: planted, ignored: overhead}"], []),
    "does not look at camera wrist": (["model={type: planted, ignored: wrist}", "seed=1"], []),
    "does not close the loop": (["rollout.chunk=16", "imitation.expert.noise=0"], []),
    "is overfitted": (["env.type=leaky", "env.leaks=true", "imitation.expert.noise=0"], ["env.leaks=false"]),
}
"""Shortcut -> changes of the spec in training, and in evaluation."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sound", type=Path, nargs="*", default=[])
    given = parser.parse_args()
    runs: list[tuple[str, Path, list[str]]] = []
    for name, (training, evaluation) in PLANTED.items():
        folder = given.folder / name.replace(" ", "_").replace(",", "")
        if not (folder / "checkpoints" / "last").exists():
            vla_rl.clone(SPEC, folder, overrides=training)
        runs.append((name, folder, evaluation))
    for name, folder, changes in [*runs, *(("sound", folder, []) for folder in given.sound)]:
        overrides = [*changes, "eval.episodes_per_task=25" if "leaky" not in str(changes) else "", "imitation=null"]
        result = vla_rl.evaluate(
            folder, overrides=[text for text in overrides if text], refute=True, say=lambda line: None
        )
        rates = {entry["name"]: round(entry["success"]["rate"], 2) for entry in result["refute"]["entries"]}
        print(f"{name}: {result['success']['rate']:.2f} {result['refute']['shortcuts']} {rates}", flush=True)


if __name__ == "__main__":
    main()

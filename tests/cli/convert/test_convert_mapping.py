"""The mappings: every rule names where the source says so, and single keys become what they mean."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from vla_rl.cli.convert.convert import _MISSING, Conversion, convert_source, load_mapping
from vla_rl.cli.convert.sources import SourceKeys, SourceValue
from vla_rl.core.errors import UserError
from vla_rl.core.spec.spec import parse_spec
from vla_rl.core.spec.yaml import value_at

PROJECTS = ("rlinf", "simplevla", "siirl", "lerobot")
PPO = {
    "runner.task_type": "embodied",
    "runner.max_epochs": 1000,
    "env.train.env_type": "libero",
    "env.train.task_suite_name": "libero_10",
    "env.train.total_num_envs": 64,
    "env.train.rollout_epoch": 8,
    "env.train.max_steps_per_rollout_epoch": 480,
    "env.train.max_episode_steps": 480,
    "env.train.auto_reset": False,
    "algorithm.adv_type": "gae",
    "algorithm.loss_type": "actor_critic",
    "algorithm.update_epoch": 4,
    "actor.model.model_type": "openpi",
    "actor.model.model_path": "/path/to/RLinf-Pi05-LIBERO-SFT/",
    "actor.model.openpi.config_name": "pi05_libero",
    "actor.model.openpi.num_steps": 5,
    "actor.model.num_action_chunks": 10,
    "actor.micro_batch_size": 128,
    "actor.global_batch_size": 2048,
    "actor.optim.lr": 5e-6,
    "cluster.component_placement.actor,env,rollout": "all",
}
"""Keys of an experiment of RLinf."""
SRPO = {
    "ALG": "srpo",
    "algorithm.workflow_type": "embodied",
    "algorithm.adv_estimator": "grpo",
    "data.train_batch_size": 64,
    "actor_rollout_ref.rollout.n": 8,
    "actor_rollout_ref.model.path": "/models/owner/name",
    "actor_rollout_ref.embodied.embodied_type": "openvla-oft",
    "actor_rollout_ref.embodied.action_chunks_len": 8,
    "actor_rollout_ref.embodied.unnorm_key": "libero_10_no_noops",
    "actor_rollout_ref.embodied.env.env_type": "libero",
    "actor_rollout_ref.embodied.env.env_name": "libero_10",
    "actor_rollout_ref.embodied.env.max_steps": 512,
}
"""Keys of a script of siiRL."""


def convert(project: str = "rlinf", base: dict[str, Any] | None = None, **changes: Any) -> Conversion:
    """Convert keys, some of them changed; None leaves one out."""
    given = {**(PPO if base is None else base), **{key.replace("__", "."): value for key, value in changes.items()}}
    values = {key: SourceValue(value, "mine.yaml:7") for key, value in given.items() if value is not None}
    return convert_source(SourceKeys(project=project, file=Path("mine.yaml"), values=values))


def kind_of(converted: Conversion, key: str) -> str:
    (one,) = [one for one in converted.keys if one.key == key]
    return one.kind


@pytest.mark.parametrize("project", PROJECTS)
def test_what_is_carried_or_dead_names_its_source(project: str) -> None:
    mapping = load_mapping(project)
    rules = [(key, rule) for key, cases in mapping.keys.items() for rule in cases]
    missing = [
        key for key, rule in rules if rule.kind in ("carried", "dead") and not re.search(r"\.\w+(:\d|$)", rule.at)
    ]
    assert not missing
    assert not [key for key, rule in rules if rule.kind == "no counterpart" and not rule.note]
    assert not [fact for fact in mapping.code if not fact["at"]]


@pytest.mark.parametrize("project", PROJECTS)
def test_no_rule_is_hidden_by_one_before_it(project: str) -> None:
    mapping = load_mapping(project)
    for key, cases in mapping.keys.items():
        assert all(rule.when for rule in cases[:-1]), key
        if key.endswith("*"):
            before = list(mapping.keys)[: list(mapping.keys).index(key)]
            assert not [one for one in before if one.endswith("*") and key.startswith(one[:-1])], key


def test_a_spec_is_made_and_read() -> None:
    converted = convert()
    spec = parse_spec(converted.spec)
    assert spec.model.config.checkpoint == "RLinf/RLinf-Pi05-LIBERO-SFT"
    assert (spec.rollout.episodes, spec.rollout.max_steps, spec.rollout.chunk) == (512, 480, 10)
    assert spec.algorithm.config.time_limit == "terminal" and spec.algorithm.config.value_coef == 1.0
    assert spec.train.weight_decay == 0.01  # the default of RLinf's code
    assert len(converted.keys) == len(PPO) + len([one for one in converted.keys if not one.key])


@pytest.mark.parametrize(
    ("changes", "key", "expected"),
    [
        ({}, "algorithm.aggregation", "rlinf"),
        ({"env__train__auto_reset": True}, "algorithm.aggregation", "step-mean"),
        ({"env__train__auto_reset": True}, "rollout.auto_reset", {"mode": "deferred", "steps": 3840}),
        ({"env__train__auto_reset": True, "algorithm__bootstrap_type": "always"}, "algorithm.time_limit", "always"),
        ({"algorithm__bootstrap_type": "always"}, "algorithm.time_limit", "terminal"),
        ({"runner__max_steps": 10}, "train.steps", 10),
        ({"runner__max_steps": -1}, "train.steps", 1000),
        ({"actor__optim__adam_beta1": 0.8, "actor__optim__adam_beta2": 0.95}, "train.adam_betas", [0.8, 0.95]),
        ({"actor__optim__critic_warmup_steps": 60}, "train.critic_warmup_steps", 2),  # 48 optimiser steps a step
        ({"actor__optim__lr_scheduler": "cosine"}, "train.lr_end", 0.0),
        ({"actor__optim__lr_scheduler": "cosine", "actor__optim__min_lr": 2.5e-6}, "train.lr_end", 0.5),
        ({"actor__optim__lr_scheduler": "cosine", "actor__optim__min_lr_rate": 0.1}, "train.lr_end", 0.1),
        ({"actor__model__openpi__joint_logprob": True, "algorithm__clip_ratio_low": 0.2}, "algorithm.clip_low", 0.7379),
        (
            {"actor__model__openpi__joint_logprob": True, "algorithm__clip_ratio_high": 0.2},
            "algorithm.clip_high",
            1.986,
        ),
        ({"algorithm__clip_ratio_high": 0.2}, "algorithm.clip_high", 0.2),
        ({"actor__model__openpi__config_name": "pi0_libero"}, "model.type", "pi0"),
        ({"runner__val_check_interval": -1}, "eval.every", 0),
        ({"actor__model__model_path": "/mine/weights"}, "model.checkpoint", "/mine/weights"),
    ],
)
def test_a_key_becomes_what_it_means(changes: dict[str, Any], key: str, expected: Any) -> None:
    assert value_at(convert(**changes).spec, key.split(".")) == expected


def test_defaults_of_the_code_are_carried_where_the_file_is_silent() -> None:
    metaworld = convert(env__train__env_type="metaworld", env__train__task_suite_name="metaworld_50")
    assert metaworld.spec["env"]["settle_steps"] == 15
    srpo = convert("siirl", SRPO).spec
    assert (srpo["algorithm"]["dual_clip"], srpo["train"]["weight_decay"]) == (3.0, 0.01)
    off = {"actor_rollout_ref__actor__clip_ratio_c": 10000.0, "actor_rollout_ref__actor__optim__weight_decay": 0.1}
    srpo = convert("siirl", SRPO, **off).spec
    assert (srpo["algorithm"].get("dual_clip"), srpo["train"]["weight_decay"]) == (None, 0.1)


@pytest.mark.parametrize(
    ("changes", "key", "kind"),
    [
        ({"algorithm__clip_ratio_c": 3.0}, "algorithm.clip_ratio_c", "dead"),
        ({"algorithm__clip_ratio_c": 3.0, "algorithm__loss_type": "decoupled_actor_critic"}, "algorithm.clip_ratio_c", "carried"),
        ({"algorithm__kl_beta": 0.01}, "algorithm.kl_beta", "dead"),
        ({"algorithm__loss_agg_func": "token-mean"}, "algorithm.loss_agg_func", "dead"),
        ({"algorithm__bootstrap_type": "always"}, "algorithm.bootstrap_type", "dead"),
        ({"env__train__reset_gripper_open": True}, "env.train.reset_gripper_open", "default"),
        ({"env__train__reset_gripper_open": False}, "env.train.reset_gripper_open", "no counterpart"),
        ({"runner__logger__log_path": "x"}, "runner.logger.log_path", "no effect"),
        ({"algorithm__brand_new": 3}, "algorithm.brand_new", "unknown"),
    ],
)  # fmt: skip
def test_every_key_has_a_kind(changes: dict[str, Any], key: str, kind: str) -> None:
    assert kind_of(convert(**changes), key) == kind


def test_optimiser_steps_are_as_many_as_there() -> None:
    """Padded chunks count in RLinf's global batch."""
    train = convert().spec["train"]
    assert train["mini_batches"] == 64 * 8 * 48 // 2048 and "global_batch" not in train
    train = convert(env__train__auto_reset=True).spec["train"]
    assert train["global_batch"] == 2048 and "mini_batches" not in train
    assert convert(actor__optim__critic_warmup_steps=96).spec["train"]["critic_warmup_steps"] == 2


def test_a_list_that_two_keys_share_is_written_twice() -> None:
    steered = {"actor.model.openpi.use_dsrl": True, "actor.model.openpi.dsrl_hidden_dims": [128, 128]}
    converted = convert(base={**PPO, "algorithm.loss_type": "embodied_sac", **steered})
    assert converted.spec["trainer"]["hidden"] == converted.spec["model"]["steering"]["hidden"] == [128, 128]
    assert "&id" not in converted.text


def test_an_unknown_key_is_named_in_the_head_and_in_the_account() -> None:
    converted = convert(algorithm__brand_new=3)
    assert "`algorithm.brand_new: 3` (mine.yaml:7) is left out" in " ".join(converted.text.replace("\n#  ", "").split())
    assert "  algorithm.brand_new: 3" in converted.lines()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"runner__task_type": "reasoning"}, "only tasks of type embodied"),
        ({"env__train__env_type": "behavior"}, r"no plugin for the simulator behavior \(mine.yaml:7\)"),
        ({"actor__model__model_type": "starvla"}, "no plugin for the model starvla"),
        ({"algorithm__loss_type": "embodied_nft"}, "NFT"),
        ({"algorithm__loss_type": "rlt_ac"}, "its algorithm"),
        ({"env__train__task_suite_name": "libero_pro"}, "no suite libero_pro here"),
        ({"runner__only_eval": True}, "evaluates only"),
    ],
)
def test_what_cannot_run_here_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=rf"^mine.yaml: cannot run here: .*{message}"):
        convert(**changes)


def test_two_sources_for_one_key_are_refused() -> None:
    with pytest.raises(UserError, match=r"two sources for model.checkpoint: '/a' of actor.*:7\), and '/b' of rollout"):
        convert(actor__model__model_path="/a", rollout__model__model_path="/b")


def test_a_value_that_cannot_be_computed_is_named_where_it_counts() -> None:
    values = {key: SourceValue(value, "mine.yaml:7") for key, value in PPO.items()}
    for key, fails in (("runner.logger.log_path", False), ("actor.model.model_path", True)):
        lost = values | {key: SourceValue(None, "mine.yaml:9", "no variable WEIGHTS")}
        source = SourceKeys(project="rlinf", file=Path("mine.yaml"), values=lost)
        if fails:
            with pytest.raises(UserError, match=rf"{key} \(mine.yaml:9\) cannot be resolved: no variable WEIGHTS"):
                convert_source(source)
        else:
            assert convert_source(source).spec == convert().spec


def test_placements_keep_the_groups() -> None:
    hybrid = {"cluster.component_placement.env": "0-3", "cluster.component_placement.rollout": "4-7",
              "cluster.component_placement.actor": "0-7", "rollout.pipeline_stage_num": 2}  # fmt: skip
    base = {key: value for key, value in PPO.items() if "placement" not in key}
    placement = convert(base={**base, **hybrid, "actor.enable_offload": True}).spec["placement"]
    assert placement == {"type": "hybrid", "sim": "0-3", "policy": "4-7", "learner": "0-7", "pipeline_stages": 2,
                         "offload": {"learner": True}}  # fmt: skip
    apart = convert(algorithm__loss_type="decoupled_actor_critic").spec["placement"]
    assert apart == {"type": "disaggregated", "sim": "0-1", "policy": "2-3", "learner": "4-7"}


def numbers_in(value: Any) -> list[float]:
    """Return the numbers of plain data, in order."""
    if isinstance(value, dict):
        return [number for pair in value.items() for part in pair for number in numbers_in(part)]
    if isinstance(value, list):
        return [number for part in value for number in numbers_in(part)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []


def numbers_of(project: str) -> dict[str, list[float]]:
    """Return key of the source, or of ours that its code sets -> the numbers in its rules."""
    mapping = load_mapping(project)
    found: dict[str, list[float]] = {}
    for key, rules in mapping.keys.items():
        for rule in rules:
            parts = [part for part in (rule.value, rule.values, rule.default, rule.when) if part is not _MISSING]
            found.setdefault(key, []).extend(numbers_in(parts))
    for fact in mapping.code:
        for key, value in fact.get("set", {}).items():
            found.setdefault(f"code: {key}", []).extend(numbers_in(value))
    return {key: numbers for key, numbers in found.items() if numbers}


NUMBERS = {
    "rlinf": {
        "algorithm.entropy_type": [0],
        "algorithm.entropy_bonus": [0],
        "algorithm.critic_subsample_size": [2],
        "algorithm.target_update_freq": [1],
        "algorithm.train_actor_steps": [10, 10],
        "env.train.group_size": [1, 1, 1],
        "env.train.specific_reset_id": [0, 0],
        "rollout.sampling_params.temperature_eval": [-1, 0],
        "rollout.sampling_params.top_k": [-1, 0],
        "rollout.sampling_params.top_p": [1.0],
        "rollout.sampling_params.repetition_penalty": [1.0],
        "actor.optim.num_cycles": [0.5],
        "actor.model.openpi.config_name": [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12],
        "actor.model.precision": [32],
        "runner.weight_sync_interval": [1],
        "code: algorithm.value_coef": [1.0],
        "code: env.settle_steps": [15, 15],
        "code: env.corner2_position": [0.75, 0.075, 0.7],
        "code: env.cameras": [480],
        "code: model.steering.range": [1.0],
        "code: trainer.target_critics": [2],
        "code: train.weight_decay": [0.01],
    },
    "simplevla": {
        "data.num_trials_per_task": [50],
        "data.oversample_factor": [1],
        "actor_rollout_ref.model.lora_rank": [0],
        "actor_rollout_ref.model.lora_alpha": [0],
        "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": [0.0],
        "actor_rollout_ref.rollout.num_images_in_input": [1],
        "actor_rollout_ref.rollout.top_k": [-1, 0],
        "actor_rollout_ref.rollout.top_p": [1],
        "algorithm.kl_ctrl.kl_coef": [0],
        "code: env.cameras": [256],
        "code: train.weight_decay": [0.01],
    },
    "siirl": {
        "algorithm.gamma": [1.0],
        "algorithm.embodied_sampling.oversample_factor": [1],
        "actor_rollout_ref.actor.clip_ratio_c": [10000.0],
        "actor_rollout_ref.embodied.num_images_in_input": [1],
        "actor_rollout_ref.embodied.env.max_steps": [512],
        "actor_rollout_ref.embodied.env.num_trials_per_task": [50],
        "code: env.cameras": [256],
        "code: algorithm.dual_clip": [3.0],
        "code: train.weight_decay": [0.01],
        "code: train.micro_batch": [16],
    },
    "lerobot": {
        "policy.empty_cameras": [0],
        "dataset.eval_split": [0.0],
        "eval_steps": [0],
        "code: rollout.episodes": [64],
        "code: rollout.group_size": [8],
        "code: train.steps": [0],
        "code: train.micro_batch": [8],
    },
}
"""Project -> key of the source, or of ours that its code sets -> the numbers in its rules, as read at `at`."""


@pytest.mark.parametrize("project", PROJECTS)
def test_numbers_of_the_mapping_are_those_that_were_read(project: str) -> None:
    """A number that a source's key has seldom is in no recipe."""
    assert numbers_of(project) == NUMBERS[project]

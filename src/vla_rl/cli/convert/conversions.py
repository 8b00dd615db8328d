"""Conversions of single values, which the mappings name: (value, all values of the source) -> our value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from vla_rl.core.spec.known_checkpoints import known_checkpoints

Values = Mapping[str, Any]
TASKS = {"libero_90": 90, "libero_130": 130, "metaworld_50": 50, "metaworld_45_ood": 5}
"""Tasks of a suite, where they are not 10."""


def find_checkpoint(path: Any, values: Values) -> Any:
    """Return the hub's name of a folder that is named like a known checkpoint; any other path unchanged."""
    name = str(path).rstrip("/")
    rows = known_checkpoints().find_namesakes(name.rpartition("/")[2])
    return rows[0].name if len(rows) == 1 else path


def halve_bounds(value: Any, values: Values) -> Any:
    """Divide a bound in reward by RLinf's reward of a success."""
    return float(f"{value / values.get('env.train.reward_coef', 1.0):.6g}")


def positive_or_zero(value: Any, values: Values) -> Any:
    return max(0, value)


def pair_of_betas(value: Any, values: Values) -> Any:
    return [values.get("actor.optim.adam_beta1", 0.9), values.get("actor.optim.adam_beta2", 0.999)]


def rank_and_alpha(value: Any, values: Values) -> Any:
    return {"rank": value, "alpha": float(value)}


# ------------------------------------------------------------------------------------------------ RLinf: sizes


def episodes_of_step(value: Any, values: Values) -> Any:
    """Envs times rollout epochs."""
    return values["env.train.total_num_envs"] * _rollout_epochs(values)


def steps_of_ticket(value: Any, values: Values) -> Any:
    """Actions of an env in a training step: those of a rollout epoch, times the epochs."""
    return values["env.train.max_steps_per_rollout_epoch"] * _rollout_epochs(values)


def steps_of_run(value: Any, values: Values) -> Any:
    """Training steps: RLinf's epochs, unless its steps are fewer."""
    epochs, steps = values["runner.max_epochs"], values.get("runner.max_steps", -1)
    return epochs if steps < 0 else min(epochs, steps)


def mini_batches_of_chunks(value: Any, values: Values) -> Any:
    """Optimiser steps of an epoch: all chunks of the training step, padded ones too, divided by the global batch."""
    return max(1, episodes_of_step(None, values) * _chunks(values) // value)


def training_steps_of_warmup(value: Any, values: Values) -> Any:
    """Optimiser steps of the critic's warm-up, in training steps, rounded up."""
    steps = mini_batches_of_chunks(values["actor.global_batch_size"], values) * values.get("algorithm.update_epoch", 1)
    return math.ceil(value / steps) if value > 0 else 0


def episodes_of_evaluation(value: Any, values: Values) -> Any:
    """Episodes of an evaluation for each task."""
    each = values["env.eval.max_steps_per_rollout_epoch"] // values["env.eval.max_episode_steps"]
    episodes = values["env.eval.total_num_envs"] * values.get("env.eval.rollout_epoch", 1) * max(1, each)
    suite = str(values.get("env.eval.task_suite_name", ""))
    each_task = max(1, episodes // TASKS.get(suite, 10 if suite else 1))
    return None if suite.startswith("libero") and each_task == 50 else each_task


def cosine_end(value: Any, values: Values) -> Any:
    """Share of the rate that is left at the end: `min_lr_rate`, else `min_lr` divided by the rate, else 0."""
    rate = values.get("actor.optim.min_lr_rate")
    return rate if rate is not None else values.get("actor.optim.min_lr", 0.0) / values["actor.optim.lr"]


# ------------------------------------------------------------------------------------------------ RLinf: model


def clip_below(value: Any, values: Values) -> Any:
    """A lower clip of the mean over K + 1 log-ratios as one of their sum: 1 - (1 - e)^(K + 1)."""
    return float(f"{1 - (1 - value) ** _terms(values):.4f}")


def clip_above(value: Any, values: Values) -> Any:
    """An upper clip of the mean over K + 1 log-ratios as one of their sum: (1 + e)^(K + 1) - 1."""
    return float(f"{(1 + value) ** _terms(values) - 1:.4f}")


def cameras_of_libero(value: Any, values: Values) -> Any:
    """Cameras with RLinf's size: the third person's, and the wrist's where the model sees two images."""
    return dict.fromkeys(camera_names(None, values), value)


def camera_names(value: Any, values: Values) -> Any:
    """Names of the simulator's cameras, as many as the model sees images."""
    count = values.get("actor.model.openpi.num_images_in_input", values.get("actor.model.num_images_in_input"))
    if count is None:
        count = 2 if str(values.get("actor.model.model_type")).startswith(("gr00t", "openpi")) else 1
    names = {
        "libero": ("agentview", "wrist"),
        "maniskill": ("3rd_view_camera",),
        "robotwin": ("head", "left_wrist", "right_wrist"),
        "metaworld": ("corner2",),
    }[values["env.train.env_type"]]
    return list(names[:count])


def placement_of_groups(value: Any, values: Values) -> Any:
    """The placement of RLinf's groups env, rollout and actor on GPUs, and what they offload."""
    if values["algorithm.loss_type"] in ("embodied_sac", "embodied_dagger"):  # transitions are kept on one learner here
        return {"type": "collocated", "workers": 1}
    prefix = "cluster.component_placement."
    groups: dict[str, str] = {}
    for key, devices in values.items():
        if key.startswith(prefix):
            groups |= {name.strip(): str(devices) for name in key.removeprefix(prefix).split(",")}
    roles = {"sim": groups.get("env"), "policy": groups.get("rollout"), "learner": groups.get("actor")}
    if values["algorithm.loss_type"] == "decoupled_actor_critic":  # learners have workers of their own here
        return {"type": "disaggregated", **_share_out(str(roles["learner"]))}
    together = len(set(roles.values())) == 1
    keys = {"sim": "env.train.enable_offload", "learner": "actor.enable_offload"}
    if set(_devices(roles["policy"])).isdisjoint(_devices(roles["learner"])):  # others share the learners' workers
        keys["policy"] = "rollout.enable_offload"
    offload = {role: True for role, key in keys.items() if values.get(key)}
    stages = {"pipeline_stages": values.get("rollout.pipeline_stage_num", 1)}
    placement = {"type": "collocated"} if together else {"type": "hybrid", **roles, **stages}
    return placement | ({"offload": offload} if offload else {})


# ------------------------------------------------------------------------------------------------ DSRL and DAgger


def updates_of_transition(value: Any, values: Values) -> Any:
    """Updates of a training step, divided by its transitions (chunks)."""
    return float(f"{value / (episodes_of_step(None, values) * _chunks(values)):.4g}")


def widths_of_critics(value: Any, values: Values) -> Any:
    return values["actor.model.openpi.dsrl_hidden_dims"]


def transitions_of_trajectories(value: Any, values: Values) -> Any:
    """Chunks of this many trajectories, one a rank and env at full length."""
    return value * _chunks(values)


# ------------------------------------------------------------------------------------------------ shell scripts


def trajectories_of_step(value: Any, values: Values) -> Any:
    """Prompts times samples of a prompt."""
    return values["data.train_batch_size"] * samples_of_prompt(None, values)


def samples_of_prompt(value: Any, values: Values) -> Any:
    return values.get("data.n_samples", values.get("actor_rollout_ref.rollout.n", 1))


def mini_batches_of_trajectories(value: Any, values: Values) -> Any:
    """Optimiser steps of an epoch, of this many trajectories each."""
    return max(1, trajectories_of_step(None, values) // value)


def chunks_of_prompts(value: Any, values: Values) -> Any:
    """Prompts as the chunks of their trajectories, at the step limit."""
    return value * samples_of_prompt(None, values) * _chunks_of_script(values)


def envs_of_prompts(value: Any, values: Values) -> Any:
    """Simulators of all GPUs: SimpleVLA-RL rolls out this many prompts on each, and all samples of a prompt."""
    return value * samples_of_prompt(None, values) * _gpus_of_script(values)


def envs_of_workers(value: Any, values: Values) -> Any:
    """Simulators of all GPUs, each of which has this many."""
    return value * _gpus_of_script(values)


def owner_and_name(path: Any, values: Values) -> Any:
    """The last two folders of a path, OWNER/NAME on the hub."""
    return "/".join(str(path).rstrip("/").split("/")[-2:])


def batches_of_epoch(value: Any, values: Values) -> Any:
    """Batches of an epoch but the first, as further rollouts of all simulators."""
    envs = envs_of_prompts(values.get("actor_rollout_ref.rollout.micro_batch_size", 1), values)
    return max(1, (_batches(values) - 1) * trajectories_of_step(None, values) // envs)


def limit_of_robotwin(value: Any, values: Values) -> Any:
    """SimpleVLA-RL's step limit of a task of RoboTwin."""
    return _step_limit(values)


def unnorm_key_of_suite(value: Any, values: Values) -> Any:
    """The statistics' name: the suite's, with the ending of the data without idle steps."""
    return f"{value}_no_noops" if str(value).startswith("libero") else value


def steps_of_epochs(value: Any, values: Values) -> Any:
    """Training steps of this many passes over the initial states of all tasks, in batches."""
    return value * max(1, _batches(values))


def task_of_robotwin(value: Any, values: Values) -> Any:
    return str(value).removeprefix("robotwin2_")


# ------------------------------------------------------------------------------------------------ lerobot


def tasks_of_metaworld(value: Any, values: Values) -> Any:
    """Meta-World's tasks: `metaworld-push-v2`, a list with commas, or a difficulty."""
    return [name.strip().removeprefix("metaworld-").replace("-v2", "-v3") for name in str(value).split(",")]


def cameras_of_lerobot(value: Any, values: Values) -> Any:
    return {"agentview": value, "wrist": value}


def rate_of_optimizer(value: Any, values: Values) -> Any:
    return values.get("optimizer.lr", values.get("scheduler.peak_lr"))


def end_of_peak(value: Any, values: Values) -> Any:
    return value / values.get("scheduler.peak_lr", values.get("optimizer.lr", value))


# ------------------------------------------------------------------------------------------------ internal


def _terms(values: Values) -> int:
    return int(values["actor.model.openpi.num_steps"]) + 1


def _rollout_epochs(values: Values) -> int:
    """RLinf's rollout epochs in a training step; algorithm.rollout_epoch is their older place."""
    return int(values.get("env.train.rollout_epoch", values.get("algorithm.rollout_epoch", 1)))


def _chunks(values: Values) -> int:
    """Chunks of an env in a rollout epoch."""
    return int(values["env.train.max_steps_per_rollout_epoch"]) // int(values["actor.model.num_action_chunks"])


def _devices(text: str | None) -> range:
    """Return the GPUs of `0-3`, `2` or `all`, which is a node of eight."""
    first, _, last = str(text).partition("-")
    return range(int(first), int(last or first) + 1) if first.isdigit() else range(8)


def _share_out(devices: str) -> dict[str, Any]:
    """Give each role devices of its own: a quarter to simulators, a quarter to policies, half to learners."""
    low, high = min(_devices(devices)), max(_devices(devices))
    quarter = (high - low + 1) // 4
    if quarter == 0:
        return {"sim": "cpu", "policy": low, "learner": high, **({} if high > low else {"share_devices": True})}
    return {
        "sim": f"{low}-{low + quarter - 1}",
        "policy": f"{low + quarter}-{low + 2 * quarter - 1}",
        "learner": f"{low + 2 * quarter}-{high}",
    }


ROBOTWIN_LIMITS = {
    "pick_dual_bottles": 100, "put_bottles_dustbin": 800, "stack_blocks_two": 400, "stack_bowls_two": 400,
    "handover_block": 400, "shake_bottle": 75, "place_container_plate": 150, "blocks_ranking_rgb": 600,
    "place_shoe": 250,
}  # fmt: skip
"""SimpleVLA-RL's step limits where they are not 200 (verl/workers/rollout/rob_rollout.py:435-455)."""


def _first(values: Values, *keys: str, default: Any = None) -> Any:
    return next((values[key] for key in keys if key in values), default)


def _suite_of_script(values: Values) -> str:
    return str(_first(values, "data.task_suite_name", "actor_rollout_ref.embodied.env.env_name"))


def _gpus_of_script(values: Values) -> int:
    return int(values.get("trainer.n_gpus_per_node", 8)) * int(values.get("trainer.nnodes", 1))


def _batches(values: Values) -> int:
    """Batches of prompts in a pass over the initial states of all tasks."""
    suite = _suite_of_script(values)
    trials = ("data.num_trials_per_task", "actor_rollout_ref.embodied.env.num_trials_per_task")
    tasks = TASKS.get(suite, 10) if suite.startswith("libero") else 1
    return int(tasks * _first(values, *trials, default=50) // values["data.train_batch_size"])


def _step_limit(values: Values) -> int:
    suite = _suite_of_script(values)
    if suite.startswith("robotwin2_"):
        return ROBOTWIN_LIMITS.get(suite.removeprefix("robotwin2_"), 200)
    return int(values.get("actor_rollout_ref.embodied.env.max_steps", 512))


def _chunks_of_script(values: Values) -> int:
    length = ("actor_rollout_ref.model.action_chunks_len", "actor_rollout_ref.embodied.action_chunks_len")
    return _step_limit(values) // int(_first(values, *length, default=8))

"""Checkpoint file of the learners: exact weights (masters, for weights that act in a narrower type), optimiser state
and version, as full tensors for any number of learners, and what trainers own in addition to the policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from vla_rl.core.trainers import Trainer
from vla_rl.toolkit.models.checkpoints.files import check_same_weights, read_pickled
from vla_rl.toolkit.trainers.trained_model import TrainedModel
from vla_rl.toolkit.trainers.trainer_state import load_owned_state, owned_state

IMPLEMENTATION = ("fused", "foreach", "capturable")
"""Options of an optimiser that depend on the device and not on the run."""


def save_state(
    trained: TrainedModel, trainers: Mapping[str, Trainer[Any]], version: int, rank: int, file: Path
) -> None:
    """Write the file, on the first rank; all ranks together where they hold shards."""
    if rank != 0 and not trained.strategy.lockstep:
        return
    strategy = trained.strategy
    weights = {name: strategy.full_tensor(tensor) for name, tensor in trained.parameters.items()}
    optimizer = trained.optimizer.state_dict()
    optimizer["state"] = _convert_state(lambda value, _: strategy.full_tensor(value), optimizer["state"])
    if rank == 0:
        owned = {name: state for name, trainer in trainers.items() if (state := owned_state(trainer))}
        state = {
            "weights": weights,
            "acting_types": {name: trained.acting_types[name] for name in weights},
            "optimizer": optimizer,
            "version": version,
            "trainers": owned,
        }
        suffix = trained.model.instruction_suffix
        torch.save(state | ({"instruction_suffix": suffix} if suffix else {}), file)


def load_state(trained: TrainedModel, trainers: Mapping[str, Trainer[Any]], file: Path) -> int:
    """Restore what `save_state` wrote; all ranks together. Return the version of the weights. Raises UserError for the
    weights of another model, or the state of another trainer."""
    state = read_pickled(file, ("weights", "optimizer", "version"))
    check_same_weights(state["weights"], trained.parameters, file)
    strategy = trained.strategy
    with torch.no_grad():
        for name, parameter in trained.parameters.items():
            parameter.copy_(strategy.local_shard(state["weights"][name], parameter))
    trained.master_weights.round_weights()
    parameters = [p for group in trained.optimizer.param_groups for p in group["params"]]
    optimizer = state["optimizer"]
    optimizer["state"] = _convert_state(
        lambda value, index: strategy.local_shard(value, parameters[index]), optimizer["state"]
    )
    # How this machine steps (fused, foreach) is its own, whatever machine saved the state.
    for saved, group in zip(optimizer["param_groups"], trained.optimizer.param_groups, strict=False):
        saved.update({name: group[name] for name in IMPLEMENTATION})
    trained.optimizer.load_state_dict(optimizer)
    for group in trained.optimizer.param_groups:
        group["weight_decay"] = trained.train.weight_decay
    for name, trainer in trainers.items():
        load_owned_state(trainer, state.get("trainers", {}).get(name, {}), str(file))
    return int(state["version"])


def _convert_state(
    convert: Callable[[Any, int], Any], state: Mapping[int, Mapping[str, Any]]
) -> dict[int, dict[str, Any]]:
    """Return an optimiser's state with `convert` applied to every value and the index of its parameter."""
    return {
        index: {name: convert(value, index) for name, value in of_parameter.items()}
        for index, of_parameter in state.items()
    }

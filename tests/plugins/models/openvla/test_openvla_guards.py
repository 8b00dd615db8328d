"""Self-tests when a model is built: what they catch, and that they leave the network as it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from openvla_cases import ENV, policy

from vla_rl.core.errors import CheckpointError
from vla_rl.plugins.models.openvla.builder import GuardError, check_network
from vla_rl.plugins.models.openvla.modeling import OpenVLAForActionPrediction
from vla_rl.toolkit.models.checkpoints.fitting import MismatchError


@pytest.fixture
def network() -> OpenVLAForActionPrediction:
    return policy(context={"seed": 4}).module.vla


def test_a_sound_network_passes_and_stays_as_it_is(network: OpenVLAForActionPrediction) -> None:
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    depth = len(network.language_model.model.layers)
    for dtype in (torch.float32, torch.bfloat16):
        for causal in (False, True):
            check_network(network.to(dtype), causal, "x")
    assert len(network.language_model.model.layers) == depth == 2
    assert list(network.state_dict()) == list(before)


def test_only_the_first_layers_are_computed(network: OpenVLAForActionPrediction) -> None:
    calls: list[Any] = []
    network.language_model.model.layers[1].register_forward_hook(lambda *_: calls.append(1))
    check_network(network, False, "x")
    assert not calls


def change_attention(network: OpenVLAForActionPrediction, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Let each Llama layer get other keyword arguments than the caller's."""
    for layer in network.language_model.model.layers:
        layer.register_forward_pre_hook(lambda _, args, given: (args, given | change(given)), with_kwargs=True)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [(False, "attends in both directions, and tokens do not see those behind"), (True, "needs causal attention")],
)
def test_attention_of_the_other_kind(network: OpenVLAForActionPrediction, wanted: bool, message: str) -> None:
    """A release of transformers that ignores `is_causal` is refused."""
    change_attention(network, lambda given: {"is_causal": not given["is_causal"]})
    with pytest.raises(GuardError, match=f"x: .*{message}.*attention implementation 'sdpa'"):
        check_network(network, wanted, "x")


@pytest.mark.parametrize("causal", [False, True])
def test_padding_that_is_seen(network: OpenVLAForActionPrediction, causal: bool) -> None:
    change_attention(
        network,
        lambda given: {"attention_mask": None, "is_causal": given["attention_mask"] is None and causal},
    )
    with pytest.raises(GuardError, match="padding is seen by other tokens"):
        check_network(network, causal, "x")


def test_logits_that_are_not_reproducible(network: OpenVLAForActionPrediction) -> None:
    attention = network.language_model.model.layers[0].self_attn
    attention.attention_dropout = 0.5
    network.train()
    with pytest.raises(GuardError, match="other logits the second time.*look for dropout"):
        check_network(network, True, "x")


def test_broken_weights(network: OpenVLAForActionPrediction) -> None:
    with torch.no_grad():
        network.projector.fc3.weight[0, 0] = float("nan")
    with pytest.raises(GuardError, match="give NaN or inf in float32"):
        check_network(network, False, "x")


# --------------------------------------------------------------------------------------------------------- statistics


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    policy().save(folder)
    return folder


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("action", {"q01": [-1.0, 0.5, -1.0], "q99": [1.0, 0.2, 1.0]}, r"action\[1\] ranges from 0.5 .* to 0.2"),
        ("action", {"q99": [1.0, float("nan"), 1.0]}, r"'q99\[1\]' is float nan, a number is expected"),
        ("action", {"mask": [True]}, "lists of different lengths: {'q01': 3, 'q99': 3, 'mask': 1}"),
        ("action", {"q01": [-1.0, -1.0, 5.0], "q99": [1.0, 1.0, 9.0]}, "dimension 2 ranges from 5 to 9.*another robot"),
        ("proprio", {"q01": [2.0, 0.0, 0.0, 0.0]}, r"proprio\[0\] ranges from 2.0"),
    ],
)
def test_statistics_that_scale_nothing(saved: Path, part: str, change: dict[str, Any], message: str) -> None:
    file = saved / "dataset_statistics.json"
    text = file.read_text()
    stats = json.loads(text)
    stats["simulator"][part].update(change)
    file.write_text(json.dumps(stats))
    try:
        with pytest.raises((CheckpointError, MismatchError), match=message):
            policy(checkpoint=str(saved))
    finally:
        file.write_text(text)


def test_statistics_without_quantiles(saved: Path) -> None:
    file = saved / "dataset_statistics.json"
    text = file.read_text()
    file.write_text(json.dumps({"table": {"action": {"min": [0.0] * 3, "max": [1.0] * 3}}}))
    try:
        with pytest.raises(MismatchError, match="action has no q01 and no q99; it has: min, max"):
            policy(checkpoint=str(saved), use_proprio=False)
    finally:
        file.write_text(text)


def test_a_dimension_that_never_moved_is_fine(saved: Path, tmp_path: Path) -> None:
    for path in saved.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    stats = json.loads((tmp_path / "dataset_statistics.json").read_text())
    stats["simulator"]["action"] |= {"q01": [0.0, -1.0, -1.0], "q99": [0.0, 1.0, 1.0]}
    (tmp_path / "dataset_statistics.json").write_text(json.dumps(stats))
    assert policy(env=attrs.evolve(ENV), checkpoint=str(tmp_path)).codec.action_dim == 3

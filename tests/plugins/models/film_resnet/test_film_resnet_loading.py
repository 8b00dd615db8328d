"""The small policy's folder: what is written, what loads, and what is refused, and the remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from film_resnet_cases import CHUNK, ENV, SMALL, observation, policy
from model_cases import noise
from safetensors.torch import load_file

from vla_rl.core.contexts import CheckContext
from vla_rl.core.errors import CheckpointError
from vla_rl.core.spec.structure import Problems
from vla_rl.core.types import EnvInfo
from vla_rl.plugins.models.film_resnet import plugin
from vla_rl.plugins.models.film_resnet.config import Bins, FilmResnetConfig, FilmValueHeadConfig, NetworkConfig
from vla_rl.toolkit.models.checkpoints.fitting import MismatchError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    policy(context={"seed": 3, "values": "chunk"}).save(path)
    return path


def check(folder: Path | str, chunk: int = CHUNK, **config: Any) -> None:
    assert plugin.check is not None
    plugin.check(FilmResnetConfig(checkpoint=str(folder), **config), CheckContext(chunk=chunk))


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_saved_policy_is_loaded_as_it_was(folder: Path) -> None:
    saved = policy(context={"seed": 3, "values": "chunk"})
    check(folder)
    check(folder, network=SMALL)
    assert sorted(p.name for p in folder.iterdir()) == [
        "config.json", "model.safetensors", "statistics.json", "value_head.safetensors"
    ]  # fmt: skip
    assert not [name for name in load_file(folder / "model.safetensors") if "value_head" in name]
    loaded = policy(checkpoint=str(folder), context={"seed": 9, "values": "chunk"})
    obs = observation(3)
    one, other = (m.sample_chunk(obs, noise(3), False) for m in (saved, loaded))
    assert torch.equal(one.actions, other.actions)
    assert torch.equal(one.log_probs, other.log_probs)
    assert torch.equal(one.values, other.values)
    again = folder.parent / "again"
    loaded.save(again)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == {p.name: p.read_bytes() for p in again.iterdir()}


def test_it_loads_without_its_critic_and_with_a_new_one(folder: Path) -> None:
    assert policy(checkpoint=str(folder)).critic is None
    (folder / "value_head.safetensors").unlink()
    assert policy(checkpoint=str(folder), context={"values": "action"}).critic is not None


def test_a_critic_of_another_shape_is_refused(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="remove the file to start with a new one"):
        policy(checkpoint=str(folder), context={"values": "chunk"}, value_head=FilmValueHeadConfig(hidden=(7,)))


def test_sizes_are_those_of_the_checkpoint(folder: Path) -> None:
    assert policy(checkpoint=str(folder)).setup.network == SMALL
    with pytest.raises(
        MismatchError, match=r"head .*9.* \(the spec: .*5.*\); leave model.network out, or train a new one"
    ):
        policy(checkpoint=str(folder), network=attrs.evolve(SMALL, head=Bins(count=5)))
    with pytest.raises(Problems, match=r"checkpoint: .*channels"):
        check(folder, network=NetworkConfig())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"action_low": (-1.0,), "action_high": (1.0,)}, "for 3-dimensional actions, the simulator takes 1"),
        ({"state_dim": 6}, "on a 4-dimensional state, the simulator's has 6"),
        ({"cameras": {"front": (64, 64)}}, "trained with 2 cameras .* would see 1 .*model.cameras"),
        ({"cameras": {}}, "needs at least one camera"),
    ],
)
def test_another_simulator_is_refused(folder: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(MismatchError, match=message):
        policy(env=attrs.evolve(ENV, **change), checkpoint=str(folder))


def test_other_settings_are_refused(folder: Path) -> None:
    with pytest.raises(MismatchError, match="chunks of 4, the spec asks for 8; set rollout.chunk to 4"):
        policy(checkpoint=str(folder), context={"chunk": 8})
    with pytest.raises(MismatchError, match="trained with a state; leave model.use_state out"):
        policy(checkpoint=str(folder), use_state=False)
    with pytest.raises(MismatchError, match="no camera 'wirst'"):
        policy(checkpoint=str(folder), cameras=("camera1", "wirst"))
    with pytest.raises(MismatchError, match="use_state needs a state"):
        policy(env=attrs.evolve(ENV, state_dim=0), use_state=True)


def test_cameras_of_other_names_take_the_places_of_training(folder: Path) -> None:
    there = attrs.evolve(ENV, cameras={"left": (64, 64), "right": (64, 64)})
    model = policy(env=there, checkpoint=str(folder), cameras=("right", "left"))
    assert model.setup.cameras == ("right", "left")


def test_a_simulator_without_a_state_gets_a_policy_without(tmp_path: Path) -> None:
    blind = attrs.evolve(ENV, state_dim=0)
    model = policy(env=blind)
    model.save(tmp_path)
    assert policy(checkpoint=str(tmp_path)).setup.state_dim == 0  # nor does it look at one that is there
    with pytest.raises(MismatchError, match="trained without a state"):
        policy(checkpoint=str(tmp_path), use_state=True)


def test_what_is_missing_or_broken_is_named(folder: Path) -> None:
    for name, content, message in (
        ("config.json", '{"model_type": "openvla"}', "holds a model of type 'openvla', not 'film_resnet'"),
        ("config.json", '{"model_type": "film_resnet"}', "config.json: network: required, but missing"),
        ("config.json", None, "has no config.json"),
        ("statistics.json", "{}", "statistics.json: action: required, but missing"),
        ("statistics.json", None, "has no statistics.json"),
        ("model.safetensors", "short", "cannot read .*model.safetensors"),
        ("model.safetensors", None, "has no model.safetensors"),
    ):
        path = folder / name
        kept = path.read_bytes()
        path.unlink() if content is None else path.write_text(content)
        with pytest.raises(Problems, match=message):
            check(folder)
        path.write_bytes(kept)
    check(folder)


def test_weights_that_do_not_fit_their_config_are_listed(folder: Path) -> None:
    setup = json.loads((folder / "config.json").read_text())
    edit(folder / "config.json", network=setup["network"] | {"hidden": [48]})
    with pytest.raises(CheckpointError, match="of another shape"):
        policy(checkpoint=str(folder))


def test_builtin_names_are_looked_up_in_the_plugins_folder() -> None:
    with pytest.raises(Problems, match="no built-in checkpoint 'builtin:nowhere'"):
        check("builtin:nowhere")


def test_action_dim_is_known_without_building(folder: Path) -> None:
    assert plugin.action_dim is not None
    assert plugin.action_dim(FilmResnetConfig(checkpoint=str(folder))) == 3
    assert plugin.action_dim(FilmResnetConfig()) is None
    assert plugin.action_dim(FilmResnetConfig(checkpoint=str(folder / "nowhere"))) is None


def test_demonstrations_scale_and_are_remembered(tmp_path: Path) -> None:
    scaling = {
        "action": {"q01": [-0.5] * 3, "q99": [0.5] * 3, "mean": [0.0] * 3, "std": [1.0] * 3},
        "state": {"q01": [0.0] * 4, "q99": [1.0] * 4, "mean": [2.0] * 4, "std": [4.0] * 4},
    }
    model = policy(context={"scaling": scaling})
    assert model.decode_actions([[[0, 4, 8]]]).tolist() == [[[-0.5, 0.0, 0.5]]]
    obs = observation(2)
    expected = (torch.as_tensor(obs.state) - 2) / 4
    torch.testing.assert_close(model._prepare_inputs(obs)[1], expected)
    model.save(tmp_path)
    loaded = policy(checkpoint=str(tmp_path))
    assert loaded.statistics == model.statistics
    assert policy(checkpoint=str(tmp_path), context={"scaling": scaling}).statistics == model.statistics
    assert policy(context={"scaling": scaling}, use_state=False).statistics.state is None


def test_bounds_of_the_simulator_scale_a_new_policy() -> None:
    env = EnvInfo(cameras=ENV.cameras, state_dim=0, action_low=(-2.0, 0.0), action_high=(2.0, 10.0), tasks=ENV.tasks)
    assert policy(env=env).decode_actions([[[0, 8]]]).tolist() == [[[-2.0, 10.0]]]


@pytest.mark.parametrize(
    "config",
    [
        {"channels": ()}, {"channels": (12,)}, {"hidden": ()}, {"hidden": (0,)}, {"image_size": 16},
        {"blocks": 0}, {"keypoints": 0}, {"words": 1}, {"instruction": 0}, {"state_waves": -1},
    ],
)  # fmt: skip
def test_sizes_that_make_no_network_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(config)) if "channels" not in config else "channels|>= 1"):
        NetworkConfig(**config)


def test_other_keys_have_ranges() -> None:
    for config in ({"shift": -1}, {"smoothing": -0.1}, {"dtype": "float64"}):
        with pytest.raises(ValueError, match=next(iter(config))):
            FilmResnetConfig(**config)
    with pytest.raises(ValueError, match="count"):
        Bins(count=1)
    with pytest.raises(ValueError, match="hidden"):
        FilmValueHeadConfig(hidden=(0,))

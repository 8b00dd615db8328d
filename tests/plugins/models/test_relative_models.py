"""Actions relative to the state, in all models that denoise: acting, scores, cloning, real-time chunks, and folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from model_cases import noise
from pi0_cases import CHUNK, OPENPI_STATS, expert, observation, openpi_folder
from pi0_cases import policy as pi0_policy
from safetensors.numpy import load_file

from reference_files import reference
from vla_rl.core.contexts import ModelContext
from vla_rl.core.errors import CheckpointError, UserError
from vla_rl.core.types import UnexecutedActions
from vla_rl.plugins.models import gr00t, pi0, smolvla
from vla_rl.plugins.models.gr00t.processor import PROCESSOR, SETTINGS, STATISTICS
from vla_rl.plugins.models.pi0.statistics import read_config, read_statistics
from vla_rl.testing import synthetic
from vla_rl.toolkit.models.checkpoints.fitting import MismatchError
from vla_rl.toolkit.models.checkpoints.lerobot import (
    PREPROCESSOR,
    FeatureScale,
    Statistics,
    model_config,
    write_processors,
)
from vla_rl.toolkit.models.checkpoints.openpi_layout import write_openpi
from vla_rl.toolkit.models.scaling import FeatureScaler
from vla_rl.toolkit.relative_actions import RelativeActions, take_offsets

WIDE = synthetic.env_info(bounds=((-99.0, 99.0),))
"""Nothing is clipped."""
PLACES: tuple[Any, ...] = (2, None, 0)
"""Each relative number of an action belongs to another place of the state, as where their names are in another order."""
BY_PLACE: tuple[Any, ...] = (0, 1, None)
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "pi0": (pi0.plugin, {"preset": "tiny"}),
    "pi05": (pi0.pi05, {"preset": "tiny"}),
    "smolvla": (smolvla.plugin, {"preset": "tiny"}),
    "gr00t n1.7": (gr00t.plugin, {"preset": "tiny_n1_7"}),
}
rng = np.random.default_rng(0)
STEPS = {"min": rng.uniform(-0.9, -0.4, (CHUNK, 3)), "max": rng.uniform(0.4, 0.9, (CHUNK, 3))}
PART = {"mean": 0.1, "std": 0.5, "q01": -0.8, "q99": 0.6, "min": -0.9, "max": 0.9}


def asked(places: tuple[Any, ...]) -> RelativeActions:
    pairs = {number: place for number, place in enumerate(places) if place is not None}
    return RelativeActions(relative_to="state", dimensions=pairs)


def scaling(places: tuple[Any, ...]) -> dict[str, dict[str, Any]]:
    """Statistics of the data as core passes them; the same numbers for any actions."""
    action: dict[str, Any] = {name: [value] * 3 for name, value in PART.items()}
    action["relative_to"] = [-1 if place is None else place for place in places]
    steps = {name: rows.reshape(-1).tolist() for name, rows in STEPS.items()}
    return {"action": action, "action_steps": steps, "state": {name: [value] * 4 for name, value in PART.items()}}


def build(name: str, places: tuple[Any, ...] = (), **config: Any) -> Any:
    """Build a model that the data scale."""
    plugin, keys = MODELS[name]
    keys = config if "checkpoint" in config else {**keys, **config}
    measured = None if "checkpoint" in config else scaling(places)
    return plugin.build(plugin.config(**keys), ModelContext(env=WIDE, chunk=CHUNK, scaling=measured))


def offsets(obs: Any, places: tuple[Any, ...]) -> Any:
    return take_offsets(np.asarray(obs.state), places)[:, None]


@pytest.fixture(scope="module", params=MODELS)
def models(request: pytest.FixtureRequest) -> tuple[str, Any, Any]:
    """A model of absolute actions, and one with equal weights and statistics of relative ones."""
    absolute, relative = (build(request.param, places) for places in ((), PLACES))
    if request.param == "gr00t n1.7":  # which scales relative actions by step
        absolute._actions = relative._actions
    return request.param, absolute, relative


def test_actions_are_those_of_the_network_plus_the_state(models: Any) -> None:
    _, plain, relative = models
    obs = observation(3, WIDE)
    for greedy in (True, False):
        before, after = (model.sample_chunk(obs, noise(3), greedy) for model in (plain, relative))
        assert torch.equal(before.log_probs, after.log_probs)
        torch.testing.assert_close(after.actions, before.actions + offsets(obs, PLACES))
        assert torch.equal(after.actions[..., 1], before.actions[..., 1])
    assert torch.equal(relative.chunk_log_probs(obs, after).log_probs, after.log_probs)


def test_demonstrations_are_made_relative(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vla_rl.toolkit.models.flow.policy.crc32", lambda data: 0)  # noise depends on the actions
    _, plain, relative = models
    obs, actions = observation(3, WIDE), expert(3) / 4
    losses = relative.imitation_loss(obs, actions + offsets(obs, PLACES)), plain.imitation_loss(obs, actions)
    torch.testing.assert_close(*losses)
    assert not torch.isclose(relative.imitation_loss(obs, actions), losses[1])


def test_a_chunk_continues_from_another_state(models: Any) -> None:
    """What is left of the last chunk was relative to an earlier state; it arrives in the simulator's units, and is
    relative to the present state in the network."""
    _, plain, relative = models
    obs = observation(2, WIDE)
    left = expert(2)[:, :3] / 4
    before, after = (
        model.continue_chunk(obs, noise(2), True, [UnexecutedActions(actions=row, delay=1) for row in rows])
        for model, rows in ((plain, left), (relative, left + offsets(obs, PLACES)))
    )
    torch.testing.assert_close(after, before + offsets(obs, PLACES), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("places", [PLACES, BY_PLACE, (None, None, 3)])
def test_a_saved_folder_says_it(models: Any, places: tuple[Any, ...], tmp_path: Path) -> None:
    """No key is needed to act with it; a key that agrees is right, and one that does not is refused."""
    name, _, _ = models
    model = build(name, places)
    model.save(tmp_path / "saved")
    again = build(name, checkpoint=str(tmp_path / "saved"))
    obs = observation(2, WIDE)
    one, two = (m.sample_chunk(obs, noise(2), True).actions for m in (model, again))
    torch.testing.assert_close(two, one, rtol=0, atol=1e-5)
    assert again.checkpoint.statistics.references == places
    assert build(name, checkpoint=str(tmp_path / "saved"), actions=asked(places))._references == places
    with pytest.raises(
        MismatchError, match=r"no relative numbers, and the statistics in .*saved are of actions with n"
    ):
        build(name, checkpoint=str(tmp_path / "saved"), actions="absolute")
    turned = {number: (place + 1) % WIDE.state_dim for number, place in enumerate(places) if place is not None}
    with pytest.raises(MismatchError, match=rf"\(to {min(turned.values())}\).*and the statistics in .*saved are of"):
        build(
            name,
            checkpoint=str(tmp_path / "saved"),
            actions=RelativeActions(relative_to="state", dimensions=turned),
        )
    unnamed = RelativeActions(relative_to="state")  # what the data of its training named, and the simulator does not
    assert build(name, checkpoint=str(tmp_path / "saved"), actions=unnamed)._references == places
    again.save(tmp_path / "twice")
    assert build(name, checkpoint=str(tmp_path / "twice"))._references == places


def test_absolute_statistics_are_not_added_to_the_state(models: Any, tmp_path: Path) -> None:
    name, absolute, _ = models
    absolute.save(tmp_path / "saved")
    with pytest.raises(MismatchError, match="numbers 0, 1 relative to the state, and the statistics .* no relative"):
        build(name, checkpoint=str(tmp_path / "saved"), actions=asked(BY_PLACE))
    plugin, _ = MODELS[name]  # with the data's statistics the folder's do not count
    config = plugin.config(checkpoint=str(tmp_path / "saved"), actions=asked(BY_PLACE))
    assert plugin.relative_actions(config, WIDE) == BY_PLACE
    model = plugin.build(config, ModelContext(env=WIDE, chunk=CHUNK, scaling=scaling(BY_PLACE)))
    model.save(tmp_path / "relative")
    assert build(name, checkpoint=str(tmp_path / "relative"))._references == BY_PLACE


def test_a_groot_checkpoint_that_the_data_scale_has_a_range_for_each_step(tmp_path: Path) -> None:
    """Relative actions of N1.7 are scaled by the data's range at each step of a chunk, as in a preset."""
    preset = build("gr00t n1.7", PLACES)
    preset.save(tmp_path / "saved")
    config = gr00t.plugin.config(checkpoint=str(tmp_path / "saved"), actions=asked(PLACES))
    model = gr00t.plugin.build(config, ModelContext(env=WIDE, chunk=CHUNK, scaling=scaling(PLACES)))
    assert model.checkpoint.statistics.action == preset.checkpoint.statistics.action
    assert len(model.checkpoint.statistics.action.by_step[0]) == CHUNK


def test_a_preset_without_data() -> None:
    """The simulator's bounds are the only range that is known: a difference is at most as large as they are wide."""
    env = synthetic.env_info(bounds=((-1.0, 3.0),))
    config = pi0.plugin.config(preset="tiny", actions=asked(BY_PLACE))
    model = pi0.plugin.build(config, ModelContext(env=env, chunk=CHUNK))
    assert model.checkpoint.statistics.action.values == ((-4.0, -4.0, -1.0), (4.0, 4.0, 3.0))
    unnamed = pi0.plugin.config(preset="tiny", actions=RelativeActions(relative_to="state"))
    with pytest.raises(MismatchError, match="neither the simulator nor the data names"):
        pi0.plugin.build(unnamed, ModelContext(env=env, chunk=CHUNK))
    named = attrs.evolve(env, action_names=("a", "b", "gripper"), state_names=("b", "a", "gripper", "z"))
    assert pi0.plugin.build(unnamed, ModelContext(env=named, chunk=CHUNK))._references == (1, 0, None)


# ------------------------------------------------------------------------------------------------- openpi and lerobot

TENSORS = load_file(reference("relative", "relative.safetensors"))
CHAINS = json.loads(reference("relative", "relative.json").read_text())["chains"]


@pytest.mark.parametrize("case", CHAINS, ids=lambda case: case["name"])
@pytest.mark.parametrize("who", ["openpi", "lerobot"])
def test_the_originals_chains(case: dict[str, Any], who: str, tmp_path: Path) -> None:
    """Each one's epsilons, by the layout of the folder that holds the statistics."""
    part = {key.split(".", 1)[1]: value for key, value in TENSORS.items() if key.startswith(case["name"] + ".")}
    references = tuple(place if relative else None for place, relative in enumerate(case["mask"]))
    statistics = read_back(part, who, case["mode"], references, tmp_path)
    action, state = (FeatureScaler(scale, torch.device("cpu")) for scale in (statistics.action, statistics.state))
    width = 32 if who == "openpi" else case["action"]
    shift = torch.from_numpy(take_offsets(part["state"], statistics.references))
    target = action.normalise_feature(torch.from_numpy(part["actions"]) - shift, width)
    absolute = action.restore_units(torch.from_numpy(part["network"])) + shift
    shown = state.normalise_feature(torch.from_numpy(part["state"]), width)
    for name, ours in (("target", target), ("absolute", absolute), ("state", shown)):
        theirs = part[f"{who}.{name}"]
        np.testing.assert_array_less(np.abs(ours.numpy() - theirs), 1e-6 * np.maximum(1, np.abs(theirs)) + 1e-12)


def read_back(part: dict[str, Any], who: str, mode: str, references: Any, folder: Path) -> Statistics:
    """Write a folder with a chain's statistics, and read it as a checkpoint."""
    names = {"mean_std": ("mean", "std"), "quantiles": ("q01", "q99")}[mode]
    numbers = {name: {key: part[f"{name}.{key}"].tolist() for key in names} for name in ("actions", "state")}
    model = "pi0" if mode == "mean_std" else "pi05"
    if who == "openpi":
        (folder / "assets/robot").mkdir(parents=True)
        (folder / "assets/robot/norm_stats.json").write_text(json.dumps({"norm_stats": numbers}))
        config = {"action_horizon": 50, "vla_rl_relative_actions": [-1 if p is None else p for p in references]}
        (folder / "config.json").write_text(json.dumps(config))
    else:
        label = {"mean_std": "MEAN_STD", "quantiles": "QUANTILES"}[mode]
        scales = [
            FeatureScale(mode=label, values=tuple(map(tuple, numbers[name].values())), dim=len(references))
            for name in ("actions", "state")
        ]
        statistics = Statistics(action=scales[0], state=scales[1], references=references)
        raw = model_config(statistics, ("top",), 224, 50, type=model, tokenizer_max_length=48)
        (folder / "config.json").write_text(json.dumps(raw))
        for name, content in write_processors(raw, statistics, (), "none", normalise_first=False).items():
            (folder / name).write_bytes(content)
    return read_statistics(folder, read_config(folder, model), None, model)


def write_steps(folder: Path, config: dict[str, Any] | None, **keys: Any) -> None:
    """Put lerobot's step into a saved folder, and keys into its config.json."""
    raw = json.loads((folder / "config.json").read_text()) | keys
    (folder / "config.json").write_text(json.dumps(raw))
    content = json.loads((folder / PREPROCESSOR).read_text())
    if config is not None:
        content["steps"].insert(2, {"registry_name": "relative_actions_processor", "config": config})
    (folder / PREPROCESSOR).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("step", "keys", "places"),
    [
        ({"enabled": True}, {}, (0, 1, 2)),
        ({"enabled": True, "exclude_joints": ["grip"], "action_names": ["x", "y", "Gripper"]}, {}, (0, 1, None)),
        ({"enabled": True, "exclude_joints": ["y"], "action_names": None}, {}, (0, 1, 2)),
        ({"enabled": False, "exclude_joints": ["y"]}, {}, ()),
        ({"exclude_joints": [], "action_names": []}, {}, ()),  # off unless it says otherwise
        (None, {"use_relative_actions": True, "action_feature_names": ["x", "gripper", "y"]}, (0, None, 2)),
        (None, {"use_relative_actions": True, "relative_exclude_joints": []}, (0, 1, 2)),
        (None, {"use_relative_actions": False}, ()),
    ],
)
def test_lerobots_folders(step: Any, keys: dict[str, Any], places: tuple[Any, ...], tmp_path: Path) -> None:
    pi0_policy(env=WIDE).save(tmp_path)
    write_steps(tmp_path, step, **keys)
    model = pi0_policy(env=WIDE, checkpoint=str(tmp_path))
    assert model._references == places
    assert pi0.plugin.relative_actions(pi0.plugin.config(checkpoint=str(tmp_path)), WIDE) == places


@pytest.mark.parametrize(
    ("step", "keys", "message"),
    [
        (
            {"enabled": False},
            {"use_relative_actions": True},
            "pre-processing switches 'relative_actions_processor' off",
        ),
        (None, {"use_delta_joint_actions_aloha": True}, "'use_delta_joint_actions_aloha' is true, which lerobot never"),
        ({"enabled": "yes"}, {}, "'enabled' is str 'yes', true or false"),
        ({"enabled": True, "action_names": [1]}, {}, "int 1, a text is expected"),
    ],
)
def test_lerobots_folders_that_contradict(step: Any, keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    pi0_policy(env=WIDE).save(tmp_path)
    write_steps(tmp_path, step, **keys)
    with pytest.raises(CheckpointError, match=message):
        pi0_policy(env=WIDE, checkpoint=str(tmp_path))


def test_what_lerobot_reads_of_our_folder(tmp_path: Path) -> None:
    build("pi0", BY_PLACE).save(tmp_path / "by_place")
    raw = json.loads((tmp_path / "by_place/config.json").read_text())
    names = ["relative_0", "relative_1", "absolute_2"]
    assert raw["use_relative_actions"] is True and raw["action_feature_names"] == names
    before, after = (
        json.loads((tmp_path / "by_place" / f"policy_{part}processor.json").read_text())["steps"]
        for part in ("pre", "post")
    )
    step = {"enabled": True, "exclude_joints": ["absolute_2"], "action_names": names}
    order = [entry["registry_name"] for entry in before]
    assert before[2] == {"registry_name": "relative_actions_processor", "config": step}
    assert order.index("normalizer_processor") > 2  # differences are scaled
    scaled = before[order.index("normalizer_processor")]
    assert (tmp_path / "by_place" / scaled["state_file"]).is_file()
    assert [entry["registry_name"] for entry in after][:2] == ["unnormalizer_processor", "absolute_actions_processor"]
    build("pi0", PLACES).save(tmp_path / "moved")  # lerobot refuses a step that it does not know
    raw = json.loads((tmp_path / "moved/config.json").read_text())
    step = json.loads((tmp_path / "moved" / PREPROCESSOR).read_text())["steps"][2]
    assert "use_relative_actions" not in raw
    assert step == {"registry_name": "vla_rl_relative_actions_processor", "config": {"state_index": [2, -1, 0]}}


def test_openpis_folders_do_not_say_it(tmp_path: Path) -> None:
    """The key says it for one that openpi wrote, as RLinf's `extra_delta_transform`; ours has it in config.json."""
    weights = reference("pi0", "model.safetensors")
    folder = openpi_folder(tmp_path / "openpi", weights)
    assert pi0_policy(WIDE, checkpoint=str(folder))._references == ()
    model = pi0_policy(WIDE, checkpoint=str(folder), actions=asked(BY_PLACE))
    assert model._references == BY_PLACE
    model.save(tmp_path / "lerobot")
    write_openpi(tmp_path / "lerobot", tmp_path / "again", "robot")
    raw = json.loads((tmp_path / "again/config.json").read_text())
    assert raw["vla_rl_relative_actions"] == [0, 1, -1]
    obs = observation(2, WIDE)
    again = pi0_policy(WIDE, checkpoint=str(tmp_path / "again"))
    one, two = (m.sample_chunk(obs, noise(2), True).actions for m in (model, again))
    torch.testing.assert_close(two, one, rtol=0, atol=1e-4)
    with pytest.raises(MismatchError, match="no relative numbers, and the statistics in .*again are of actions with n"):
        pi0_policy(WIDE, checkpoint=str(tmp_path / "again"), actions="absolute")
    narrow = attrs.evolve(WIDE, state_dim=1)
    with pytest.raises(UserError, match=r"relative to number 1 of the state, which has 1 numbers \(an action has 3\)"):
        pi0_policy(narrow, checkpoint=str(folder), use_state=False, actions=RelativeActions(
            relative_to="state", dimensions=(0, 1)))  # fmt: skip
    with pytest.raises(
        MismatchError, match="relative to the first 2 numbers of the state; this simulator takes 3 and i"
    ):
        pi0_policy(narrow, checkpoint=str(tmp_path / "again"), use_state=False)


def test_relative_statistics_are_not_compared_with_the_simulators_range(tmp_path: Path) -> None:
    """LIBERO's are outside it: the hand hangs upside down, and so turns by 3.1 relative to its own angle."""
    actions = {"mean": [-3.1, -3.1, 0.3], "std": [0.1, 0.1, 0.2]}
    stats = {**OPENPI_STATS, "actions": actions}
    folder = openpi_folder(tmp_path / "far", reference("pi0", "model.safetensors"), stats)
    with pytest.raises(MismatchError, match="they belong to another robot or other units"):
        pi0_policy(checkpoint=str(folder))
    pi0_policy(checkpoint=str(folder), actions=asked(BY_PLACE))


# --------------------------------------------------------------------------------------------------------------- GR00T


@pytest.fixture
def groot_folder(tmp_path: Path) -> Path:
    """A folder as NVIDIA's processor writes one: an arm of two joints relative to the state's key of that name, whose
    numbers are its third and fourth, and an absolute gripper."""
    build("gr00t n1.7").save(tmp_path)
    content = json.loads((tmp_path / PROCESSOR).read_text())
    settings = content[SETTINGS]
    (robot,) = settings["modality_configs"].values()
    robot["state"]["modality_keys"] = ["base", "arm"]
    robot["action"] |= {
        "modality_keys": ["reach", "gripper"],
        "action_configs": [
            {"rep": "RELATIVE", "type": "NON_EEF", "format": "DEFAULT", "state_key": "arm"},
            {"rep": "ABSOLUTE", "type": "NON_EEF", "format": "DEFAULT", "state_key": None},
        ],
    }
    settings |= {"use_relative_action": True, "use_percentiles": True}
    ranges = {"min": [-2.0] * 2, "max": [2.0] * 2, "q01": [-1.0] * 2, "q99": [1.0] * 2}
    differences = {name: rows[:, :2].tolist() for name, rows in STEPS.items()}
    one = {name: values[:1] for name, values in ranges.items()}
    (tag,) = settings["modality_configs"]
    statistics = {
        "state": {"base": ranges, "arm": ranges},
        "action": {"reach": ranges, "gripper": one},
        "relative_action": {"reach": differences},
    }
    (tmp_path / PROCESSOR).write_text(json.dumps(content))
    (tmp_path / STATISTICS).write_text(json.dumps({tag: statistics}))
    return tmp_path


def edit_action(folder: Path, **form: Any) -> None:
    content = json.loads((folder / PROCESSOR).read_text())
    (robot,) = content[SETTINGS]["modality_configs"].values()
    robot["action"]["action_configs"][0] |= form
    (folder / PROCESSOR).write_text(json.dumps(content))


def test_groots_folder(groot_folder: Path) -> None:
    """Each step of a chunk has its own range, [min, max] of the differences even with percentiles; the gripper's is by
    percentiles at all steps."""
    model = build("gr00t n1.7", checkpoint=str(groot_folder))
    assert model._references == (2, 3, None)
    obs = observation(2, WIDE)
    actions = torch.from_numpy(expert(2))
    offset = torch.from_numpy(offsets(obs, (2, 3, None)))
    low, high = (torch.from_numpy(STEPS[end]).float() for end in ("min", "max"))
    scaled = ((actions - low) / (high - low) * 2 - 1).clamp(-1, 1)[..., :2]
    found = model._normalise_actions(actions + offset, offset)
    torch.testing.assert_close(found[..., :2], scaled, rtol=0, atol=1e-6)
    torch.testing.assert_close(found[..., 2], actions[..., 2].clamp(-1, 1), rtol=0, atol=1e-6)
    back = model._restore_actions(found, offset)
    inside = (scaled.abs() < 1).all(-1)
    torch.testing.assert_close(back[inside], (actions + offset)[inside], rtol=0, atol=1e-6)
    swapped = build("gr00t n1.7", checkpoint=str(groot_folder), state_keys=("arm", "base"))
    assert swapped._references == (0, 1, None)
    edit_action(groot_folder, rep="ActionRepresentation.RELATIVE")
    assert build("gr00t n1.7", checkpoint=str(groot_folder))._references == (2, 3, None)
    edit_action(groot_folder, rep="ABSOLUTE")
    assert build("gr00t n1.7", checkpoint=str(groot_folder))._references == ()


def test_groots_folders_that_do_not_fit(groot_folder: Path) -> None:
    def refused(match: str, **config: Any) -> None:
        with pytest.raises((CheckpointError, MismatchError), match=match):
            build("gr00t n1.7", checkpoint=str(groot_folder), **config)

    refused(
        "action 'reach' are relative to the state 'arm', which the policy does not see .* base", state_keys=("base",)
    )
    plugin, _ = MODELS["gr00t n1.7"]
    config = plugin.config(checkpoint=str(groot_folder))
    with pytest.raises(CheckpointError, match="the actions reach are relative to the state, and with imitation.statis"):
        plugin.relative_actions(config, WIDE)
    edit_action(groot_folder, state_key="arms")
    refused(r"relative to the state 'arms', which the policy does not see .*; it sees: base \(2\), arm \(2\)")
    edit_action(groot_folder, state_key=3)
    refused("JSON objects whose 'state_key' is a text")
    edit_action(groot_folder, type="EEF", format="XYZ_ROT6D", state_key="arm")
    refused("action 'reach' is a pose of an end effector relative to its own axes, which is not supported; joints")
    edit_action(groot_folder, type="NON_EEF")
    statistics = json.loads((groot_folder / STATISTICS).read_text())
    (ranges,) = statistics.values()
    for rows, message in (
        ([0.0, 0.0], "0' is float 0.0, a list"),
        ([], r"'min' is a list, a list of 2 numbers for each step of a chunk is expected"),
        ([[0.0]] * CHUNK, "a list of 2 numbers for each step"),
        ([[5.0, 5.0]] * CHUNK, "below the 5.0"),
    ):
        ranges["relative_action"]["reach"]["min"] = rows
        (groot_folder / STATISTICS).write_text(json.dumps(statistics))
        refused(message)
    del ranges["relative_action"]["reach"]
    (groot_folder / STATISTICS).write_text(json.dumps(statistics))
    refused("'reach' is missing")


def test_a_shorter_chunk_than_the_statistics(groot_folder: Path) -> None:
    """Statistics of few steps bound the chunk."""
    statistics = json.loads((groot_folder / STATISTICS).read_text())
    (ranges,) = statistics.values()
    ranges["relative_action"]["reach"] = {name: rows[: CHUNK - 1, :2].tolist() for name, rows in STEPS.items()}
    (groot_folder / STATISTICS).write_text(json.dumps(statistics))
    with pytest.raises(MismatchError, match=f"chunks of {CHUNK - 1} actions, the spec asks for {CHUNK}"):
        build("gr00t n1.7", checkpoint=str(groot_folder))


def test_groots_files_have_no_place_for_some() -> None:
    plugin = gr00t.plugin
    relative = {"actions": asked(BY_PLACE)}
    with pytest.raises(MismatchError, match="GR00T N1.5 has no actions relative to the state; take N1.7"):
        plugin.build(plugin.config(preset="tiny", **relative), ModelContext(env=WIDE, chunk=CHUNK))
    blind = plugin.config(preset="tiny_n1_7", use_state=False, **relative)
    with pytest.raises(MismatchError, match="this policy sees none; leave model.use_state out, or model.actions"):
        plugin.build(blind, ModelContext(env=WIDE, chunk=CHUNK))

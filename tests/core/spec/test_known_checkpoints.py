"""Known checkpoints: their tables are complete, a spec takes their keys, and may not contradict them."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from vla_rl.core import catalogue
from vla_rl.core.errors import PluginError, SpecError
from vla_rl.core.spec.known_checkpoints import FACTS, FILES, KnownCheckpoint, known_checkpoints
from vla_rl.core.spec.sections import RolloutSpec
from vla_rl.core.spec.spec import checkpoint_record, load_spec, parse_spec
from vla_rl.core.spec.structure import Structurer, keys_of
from vla_rl.runtime.run_folder.spec_file import load_run_spec

ROWS = list(known_checkpoints().rows.values())
OFT = "moojink/openvla-7b-oft-finetuned-libero-spatial"
BASE = "RLinf/RLinf-OpenVLAOFT-LIBERO-130-Base-Lora"


def spec_of(row: str, **changes: object) -> dict[str, object]:
    sections = {
        "name": "toy",
        "model": {"type": "openvla_oft", "checkpoint": row},
        "env": {"type": "tabletop", "num_envs": 8},
        "rollout": {"episodes": 8, "group_size": 4},
        "algorithm": {"type": "grpo"},
        "train": {"steps": 1, "lr": 1e-5, "micro_batch": 8},
        "hooks": [],
    }
    for path, value in changes.items():
        section, _, key = path.partition("__")
        sections[section] = {**sections[section], key: value}
    return sections


def all_keys(row: KnownCheckpoint) -> dict[str, object]:
    return {**row.keys, **{key: value for keys in row.env_keys.values() for key, value in keys.items()}}


def test_there_are_many_and_of_every_family():
    assert len(ROWS) >= 25
    assert {name for row in ROWS for name in row.model_types} == {
        "openvla",
        "openvla_oft",
        "pi0",
        "pi05",
        "smolvla",
        "gr00t",
    }


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_value_names_its_source(row):
    values = {"type": row.type, **all_keys(row), **row.facts}
    for key, known in values.items():
        assert known.source.strip(), key
        for source in known.source.split(";"):
            repository, _, where = source.strip().partition(" ")
            is_file = "@" in repository and repository.count("/") == 1 and ("." in where or where == "LICENSE")
            assert is_file or source.strip().startswith(("https://", "arXiv:")), f"{row.name}: {key}: {source}"
        assert known.location.rpartition(":")[2].isdigit()
    assert set(row.facts) <= set(FACTS) and row.facts


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_keys_are_those_of_the_plugins_and_of_the_sections(row):
    """The plugins of model and simulator read the row's keys; a chunk is what `rollout` takes."""
    for name in row.model_types:
        plugin = catalogue.load("model", name)
        for env in (None, *row.env_keys):
            keys = {key: known.value for key, known in row.keys_with(env).items()}
            model = {key.removeprefix("model."): value for key, value in keys.items() if key.startswith("model.")}
            Structurer().read_class({"checkpoint": row.name, **model}, plugin.config)
            of_env = {key.removeprefix("env.") for key in keys if key.startswith("env.")}
            assert not of_env or of_env <= keys_of(catalogue.load("env", env).config).keys()
            assert {key for key in keys if not key.startswith(("model.", "env."))} <= {"rollout.chunk"}
        for key in (*row.tell, *row.required):
            assert key.removeprefix("model.") in keys_of(plugin.config)
    assert set(row.env_keys) <= set(catalogue.installed_plugins("env"))


@pytest.mark.parametrize("plugin", sorted(known_checkpoints().tell))
def test_what_to_tell_of_other_checkpoints_are_keys(plugin):
    keys = keys_of(catalogue.load("model", plugin).config)
    for key in known_checkpoints().tell[plugin]:
        section, _, rest = key.partition(".")
        assert rest in (keys if section == "model" else keys_of(RolloutSpec))


def test_a_spec_takes_the_keys():
    spec = parse_spec(spec_of(OFT))
    model = spec.model.config
    assert (model.head, model.gripper, model.center_crop, model.use_proprio) == ("l1", "rlds", True, True)
    assert model.unnorm_key == "libero_spatial_no_noops" and spec.rollout.chunk == 8
    assert model.cameras is None  # `tabletop` has no camera of LIBERO
    record = checkpoint_record(spec)
    assert record["name"] == OFT and record["keys"]["model.head"]["value"] == "l1"
    assert record["keys"]["model.head"]["source"].startswith("moojink/openvla-oft@")


def test_keys_of_a_simulator_go_with_it():
    spec = parse_spec(spec_of(OFT, env__type="libero", env__suite="libero_spatial"))
    assert spec.model.config.cameras == ("agentview", "wrist")


@pytest.mark.parametrize("name", [f"{OFT}@main", f"/data/{OFT}", f"/c/models--{OFT.replace('/', '--')}/snapshots/1a"])
def test_a_checkpoint_is_known_by_its_name_wherever_it_lies(name):
    assert known_checkpoints(name).find_row(name).name == OFT
    assert known_checkpoints("nowhere/of-this-name").rows == {}


def test_a_contradiction_is_refused_with_who_says_so(tmp_path):
    file = tmp_path / "spec.yaml"
    file.write_text(
        f"name: toy\nmodel:\n  type: openvla_oft\n  checkpoint: {OFT}\n  gripper: keep\nenv: {{type: tabletop, num_envs: 8}}\n"
        "rollout: {episodes: 8, group_size: 4, chunk: 4}\nalgorithm: {type: grpo}\n"
        "train: {steps: 1, lr: 1e-5, micro_batch: 8}\n"
    )
    with pytest.raises(SpecError) as failure:
        load_spec(file)
    gripper, chunk = failure.value.errors
    assert gripper.startswith(
        f"{file}:5: model.gripper: 'keep' contradicts what is known of {OFT}: 'rlds' (says moojink/"
    )
    assert "run_libero_eval.py:265-275; in the table" in gripper and "known_checkpoints.yaml:" in gripper
    assert chunk.startswith(f"{file}:7: rollout.chunk: 4 contradicts")


def test_values_that_mean_the_same_and_nulls_do_not_contradict():
    spec = parse_spec(spec_of(OFT, model__unnorm_key="libero_spatial", model__gripper=None))
    assert spec.model.config.unnorm_key == "libero_spatial" and spec.model.config.gripper == "rlds"
    assert "known" not in checkpoint_record(spec)["keys"]["model.unnorm_key"]


def test_another_plugin_is_refused():
    with pytest.raises(
        SpecError, match=r"model.type: str 'pi0', and moojink/\S+ is a checkpoint of openvla_oft \(says"
    ):
        parse_spec(spec_of(OFT, model__type="pi0"))


def test_what_a_plugin_cannot_run_is_refused(tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text(
        f"{TABLE}    unsupported: {{value: its gripper has two fingers, source: 'paper:5'}}\n"
    )
    monkeypatch.setenv(FILES, str(tmp_path / "mine.yaml"))
    with pytest.raises(SpecError, match="its gripper has two fingers .*says"):
        parse_spec(spec_of("acme/second"))


def test_a_base_may_be_read_by_several_plugins():
    for plugin in ("openvla", "openvla_oft"):
        spec = parse_spec(spec_of("openvla/openvla-7b", model__type=plugin, rollout__chunk=1))
        assert checkpoint_record(spec)["keys"] == {}


def test_no_other_spec_has_a_record():
    assert checkpoint_record(parse_spec(spec_of("builtin:tabletop", rollout__chunk=4))) is None
    assert checkpoint_record(parse_spec(spec_of("some/other", rollout__chunk=4))) is None


TABLE = """\
sources: {paper: "arXiv:1"}
checkpoints:
  acme/first:
    type: {value: openvla_oft, source: "paper:table 1"}
    keys: {model.gripper: {value: rlds, source: "https://acme.example/card"}}
    facts: {trained_on: {value: tabletop, source: "paper:2"}, licence: {value: MIT, source: "paper:3"}}
  acme/second:
    like: acme/first
    keys: {rollout.chunk: {value: 4, source: "paper:4"}}
"""


def test_a_file_of_ones_own_adds_rows(tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text(TABLE)
    monkeypatch.setenv(FILES, str(tmp_path / "mine.yaml"))
    spec = parse_spec(spec_of("acme/second"))
    assert spec.model.config.gripper == "rlds" and spec.rollout.chunk == 4
    row = known_checkpoints().rows["acme/second"]
    assert row.keys["rollout.chunk"].source == "arXiv:1 4" and set(row.facts) == {"licence"}
    assert row.location == f"{tmp_path / 'mine.yaml'}:7"


def test_a_file_of_ones_own_replaces_rows(tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text(TABLE.replace("acme/first", OFT).replace("like: acme/first", f"like: {OFT}"))
    monkeypatch.setenv(FILES, str(tmp_path / "mine.yaml"))
    assert set(known_checkpoints().rows[OFT].keys) == {"model.gripper"}


def test_a_package_of_another_distribution_adds_rows(tmp_path, monkeypatch):
    (tmp_path / "acme_checkpoints").mkdir()
    (tmp_path / "acme_checkpoints/__init__.py").write_text("raise RuntimeError('not to be imported')\n")
    (tmp_path / "acme_checkpoints/known_checkpoints.yaml").write_text(TABLE)
    (tmp_path / "acme-1.dist-info").mkdir()
    (tmp_path / "acme-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1\n")
    (tmp_path / "acme-1.dist-info/entry_points.txt").write_text("[vla_rl.checkpoints]\nacme = acme_checkpoints\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert known_checkpoints().rows["acme/first"].name == "acme/first"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            'source: "paper:4"',
            'source: ""',
            r"mine.yaml:9: checkpoints.acme/second.keys.rollout.chunk.source: is empty",
        ),
        ('source: "paper:4"', "note: 1", r"mine.yaml:9: .*source: required, but missing"),
        ('"paper:4"', '"papers:4"', r"mine.yaml:9: .*'papers' is none of `sources`; did you mean 'paper'\?"),
        ("trained_on", "traned_on", r"mine.yaml:6: .*unknown fact; did you mean 'trained_on'\?"),
        ("like: acme/first", "like: acme/third", r"mine.yaml:8: .*no row 'acme/third' stands before this one"),
        ("    like: acme/first\n", "", r"mine.yaml:7: checkpoints.acme/second: has neither `type` nor `like`"),
        ("sources:", "sourcess:", r"mine.yaml:1: sourcess: unknown key; did you mean 'sources'\?"),
        ("keys: {rollout", "keys: {{rollout", r"mine.yaml:10: not valid YAML"),
    ],
)
def test_a_wrong_table_is_refused_with_its_line(tmp_path, monkeypatch, old, new, message):
    (tmp_path / "mine.yaml").write_text(TABLE.replace(old, new, 1))
    monkeypatch.setenv(FILES, str(tmp_path / "mine.yaml"))
    with pytest.raises(PluginError, match=message):
        known_checkpoints()


def test_a_table_that_is_not_there_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv(FILES, str(tmp_path / "none.yaml"))
    with pytest.raises(PluginError, match="none.yaml cannot be read"):
        known_checkpoints()


def test_a_recorded_spec_stays_as_it_is(tmp_path, monkeypatch):
    """A run continues although a table has changed since; other processes read it too."""
    spec = parse_spec(spec_of(BASE))
    spec.dump(tmp_path / "spec.yaml")
    (tmp_path / "mine.yaml").write_text(TABLE.replace("acme/first", BASE).replace("value: rlds", "value: keep"))
    monkeypatch.setenv(FILES, str(tmp_path / "mine.yaml"))
    again = load_run_spec(tmp_path)
    assert again == spec and pickle.loads(pickle.dumps(again)) == spec
    assert checkpoint_record(again)["keys"]["model.gripper"]["known"] == "keep"
    with pytest.raises(SpecError, match="model.gripper: 'rlds' contradicts"):
        load_run_spec(tmp_path, [f"model.checkpoint={BASE}"])


def test_tables_are_next_to_the_plugins():
    folders = {Path(row.location.rpartition(":")[0]).parent.name for row in ROWS}
    assert folders == {"openvla", "pi0", "smolvla", "gr00t"}

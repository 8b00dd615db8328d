"""What a run says about the checkpoint that its spec names."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from vla_rl.core.catalogue import load
from vla_rl.core.contexts import ModelContext
from vla_rl.core.errors import SpecError
from vla_rl.core.spec.spec import load_spec
from vla_rl.runtime.checks.known_checkpoints import checkpoint_lines, checkpoint_warnings
from vla_rl.runtime.checks.run import check_spec
from vla_rl.testing import synthetic

SPEC = """\
name: toy
model: {{type: {type}, checkpoint: {checkpoint}{keys}}}
env: {{type: libero, suite: libero_spatial, num_envs: 8}}
rollout: {{episodes: 8, group_size: 4{chunk}}}
algorithm: {{type: grpo}}
train: {{steps: 1, lr: 0.00001, micro_batch: 8}}
"""
BASE = "RLinf/RLinf-OpenVLAOFT-LIBERO-130-Base-Lora"


def spec_of(
    checkpoint: str,
    *overrides: str,
    type: str = "openvla_oft",  # noqa: A002
    keys: str = "",
    chunk: str = ", chunk: 8",
):
    Path("spec.yaml").write_text(SPEC.format(type=type, checkpoint=checkpoint, keys=keys, chunk=chunk))
    return load_spec("spec.yaml", overrides)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def texts(spec) -> list[str]:
    return [text for _, text in checkpoint_warnings(spec)]


def test_a_known_checkpoint_is_announced_once(caplog):
    with caplog.at_level(logging.WARNING):
        check_spec(spec_of(BASE, chunk=""), training=True)
    (line,) = [record.getMessage() for record in caplog.records if BASE in record.getMessage()]
    assert line.startswith(f"checkpoint {BASE} is known, and goes with model.unnorm_key=libero_130_no_noops_trajall,")
    assert "rollout.chunk=8" in line and line.endswith(f"(vla-rl models {BASE}: who says so)")


def test_limits_of_a_checkpoint_are_said():
    spec = spec_of("RLinf/RLinf-OpenVLAOFT-ManiSkill-Base-Main")
    assert any("its task comes with RLinf, not with ManiSkill" in line for line in checkpoint_lines(spec))


def test_what_its_sources_do_differently_is_to_be_told():
    name = "Haozhan72/Openvla-oft-SFT-libero-spatial-traj1"
    (text,) = texts(spec_of(name))
    assert text.startswith(
        f"no source settles model.append_stop_token of {name}; set it: true (the default) as SimpleV"
    )
    assert texts(spec_of(name, keys=", append_stop_token: false")) == []


@pytest.mark.parametrize("name", ["RLinf/RLinf-Pi05-LIBERO-SFT", "lerobot/pi0_libero_finetuned"])
def test_a_checkpoint_without_its_tokenizer_is_refused_as_a_run_would_be(name, tmp_path, caplog):
    """On the hub; in a folder the plugin looks for the file itself."""
    kind = "pi05" if "Pi05" in name else "pi0"
    for keys in ("", ", tokenizer: null"):
        with pytest.raises(SpecError, match=f"{name} comes without what model.tokenizer names: PaliGemma's") as error:
            check_spec(spec_of(name, type=kind, keys=keys), training=True)
    commands = [line.strip() for line in str(error.value).splitlines()]
    assert "hf download google/paligemma-3b-pt-224 tokenizer.json --local-dir paligemma" in commands
    assert any("Gemma's licence" in line for line in commands)

    missing = tmp_path / "paligemma"
    spec = spec_of(name, type=kind, keys=f", tokenizer: {missing}")
    with pytest.raises(SpecError, match=rf"model\.tokenizer: no tokenizer at {missing}"):
        check_spec(spec, training=True)
    missing.mkdir()
    (missing / "tokenizer.json").touch()
    check_spec(spec, training=True)
    assert not [record for record in caplog.records if "tokenizer" in record.getMessage()]


@pytest.mark.parametrize("kind", ["smolvla", "pi0", "pi05"])
def test_the_folders_number_of_executed_actions_is_the_default_of_the_chunk(kind, caplog):
    """lerobot's `n_action_steps`: a policy that executes 50 actions instead of 1 is another policy."""
    plugin = load("model", kind)
    extra = {"state_in_prompt": "exact"} if kind == "pi05" else {}
    policy = plugin.build(
        plugin.config(preset="tiny", **extra), ModelContext(env=synthetic.env_info(action_dim=7), chunk=4)
    )
    policy.save("folder")
    written = json.loads(Path("folder/config.json").read_text())
    assert written["n_action_steps"] == 4
    Path("folder/config.json").write_text(json.dumps(written | {"n_action_steps": 2}))

    spec = spec_of("folder", type=kind, chunk="")
    assert spec.rollout.chunk == 2
    assert list(checkpoint_lines(spec)) == ["rollout.chunk is 2, as the checkpoint's config.json says (n_action_steps)"]
    assert texts(spec) == []
    other = spec_of("folder", type=kind, chunk=", chunk: 4")
    assert other.rollout.chunk == 4 and list(checkpoint_lines(other)) == []
    (text,) = texts(other)
    assert text.startswith("4 actions of a chunk are executed, and 2 by the checkpoint's config.json (n_action_steps)")

    del written["n_action_steps"]
    Path("folder/config.json").write_text(json.dumps(written))
    with pytest.raises(SpecError, match="rollout.chunk: required"):
        spec_of("folder", type=kind, chunk="")


def test_statistics_of_one_suite_are_refused_with_a_simulator_of_several():
    pytest.importorskip("libero")
    plugin = load("model", "openvla_oft")
    config = plugin.config(preset="fast", use_proprio=False, unnorm_key="libero_goal_no_noops")
    plugin.build(config, ModelContext(env=synthetic.env_info(action_dim=7), chunk=8)).save("folder")
    file = Path("folder/dataset_statistics.json")
    entry = json.loads(file.read_text())["libero_goal_no_noops"]
    file.write_text(json.dumps({f"libero_{suite}_no_noops": entry for suite in ("spatial", "object", "goal", "10")}))
    keys = ", unnorm_key: libero_goal_no_noops, cameras: [agentview]"
    both = ("env.suite=null", "env.suites={libero_spatial: null, libero_goal: null}")
    for overrides, remedy in (((), "set unnorm_key: libero_spatial_no_noops"), (both, "run one suite at a time")):
        with pytest.raises(SpecError, match=rf"model\.unnorm_key: statistics 'libero_goal_no_noops' .*; {remedy}"):
            check_spec(spec_of("folder", *overrides, keys=keys), training=True)
    check_spec(spec_of("folder", "env.suite=libero_goal", keys=keys), training=True)


def test_what_no_source_gives_is_to_be_told():
    name = "moojink/openvla-7b-oft-finetuned-libero-spatial-object-goal-10"
    (text,) = texts(spec_of(name))
    assert text.startswith(f"no source settles model.unnorm_key of {name}; set it: the suite that is run")
    assert texts(spec_of(name, keys=", unnorm_key: libero_goal_no_noops")) == []


def test_an_unknown_checkpoint_has_to_be_told_keys():
    (text,) = texts(spec_of("acme/vla", keys=", unnorm_key: x, cameras: [agentview]"))
    assert text.startswith(
        "acme/vla is none of the known checkpoints (vla-rl models); the spec does not tell model.head"
    )
    assert "action_head--*_checkpoint.pt" in text and "unnorm_key" not in text and "rollout.chunk" not in text
    given = ", unnorm_key: x, cameras: [agentview], head: l1, gripper: rlds, center_crop: true"
    assert texts(spec_of("acme/vla", keys=given)) == []


@pytest.mark.parametrize("kind", ["openvla", "pi0", "pi05", "smolvla", "gr00t"])
def test_every_family_says_what_it_wants_to_be_told(kind):
    (text,) = texts(spec_of("acme/vla", type=kind))
    assert "the spec does not tell model." in text


def test_a_folder_that_is_called_after_a_known_one_is_pointed_out():
    """`hf download OWNER/NAME --local-dir NAME` makes such a folder; nothing proves that it is that one."""
    name = BASE.partition("/")[2]
    Path(name).mkdir()
    (text,) = texts(spec_of(name, keys=", gripper: rlds"))
    assert text.startswith(f"a folder of this name is known as {BASE}, which goes with model.unnorm_key=")
    assert "model.gripper" not in text and "model.append_stop_token=false (here null)" in text
    Path("other").mkdir()
    assert texts(spec_of("other")) == []


def test_a_built_in_checkpoint_needs_no_words():
    spec = spec_of("builtin:tabletop", "env={type: tabletop, num_envs: 8}", chunk=", chunk: 4")
    assert texts(spec) == [] and list(checkpoint_lines(spec)) == []


PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "public-checkpoint.md"


def test_the_specs_of_the_page_are_read(monkeypatch):
    spec, table = (block.partition("```")[0] for block in PAGE.read_text("utf-8").split("```yaml\n")[1:])
    Path("page.yaml").write_text(spec)
    loaded = load_spec("page.yaml")
    (line, *_) = checkpoint_lines(loaded)
    printed = PAGE.read_text("utf-8").split("\n    checkpoint ")[1].split("\n\n")[0]
    said = " ".join(part.strip() for part in printed.splitlines())
    assert line.startswith(f"checkpoint {said.partition(' (vla-rl models')[0]}")
    Path("mine.yaml").write_text(table)
    monkeypatch.setenv("VLA_RL_CHECKPOINTS", "mine.yaml")
    with_own = spec_of("acme/vla", chunk="")
    assert with_own.model.config.cameras == ("agentview", "wrist") and with_own.rollout.chunk == 8
    assert ["model.center_crop" in text for text in texts(with_own)] == [True]

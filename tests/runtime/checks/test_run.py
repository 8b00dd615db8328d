"""What a run would end with after its first rollout is refused before it starts, with the line of the key."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import vla_rl
from vla_rl.cli.main import app
from vla_rl.core.errors import SpecError
from vla_rl.core.plan import Cluster
from vla_rl.core.spec.spec import load_spec
from vla_rl.runtime.checks.run import check_spec
from vla_rl.runtime.start import clone, run

SPEC = """\
name: toy
plugins: [vla_rl.testing.scripted]
model: {type: linear}
env: {type: tabletop, num_envs: 8}
rollout: {chunk: 4, episodes: 8, max_steps: 12}
trainer: {type: off_policy, min_data: 8}
runtime: {backend: local}
train: {steps: 4, lr: 0.1, micro_batch: 8}
hooks: []
"""
DAGGER = SPEC.replace("{type: off_policy, min_data: 8}", "{type: dagger, augment: {random_hue: 0.1, cameras: [nose]}}")
GRPO = SPEC.replace("trainer: {type: off_policy, min_data: 8}", "algorithm: {type: ppo}")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def spec_of(text: str, *overrides: str):
    Path("spec.yaml").write_text(text)
    return load_spec("spec.yaml", overrides)


def refusal(text: str, *overrides: str, **flags: bool) -> str:
    with pytest.raises(SpecError) as caught:
        check_spec(spec_of(text, *overrides), **({"training": True} | flags))
    (line,) = caught.value.errors
    return line


def test_demonstrations_without_data():
    said = refusal(SPEC.replace("min_data: 8", "min_data: 8, demonstrations: {share: 0.5}"))
    assert said == (
        "spec.yaml:6: trainer.demonstrations: 0.5 is the share of demonstrations in a batch, and there are none; name a "
        "recording in imitation.data, or leave it out"
    )


def test_cameras_that_the_simulator_does_not_have():
    said = refusal(DAGGER)
    assert said == (
        "spec.yaml:6: trainer.augment.cameras.0: the simulator has no camera 'nose'; it has: overhead, wrist"
    )
    imitation = "imitation={expert: {episodes: 2}, steps: 4, lr: 0.1, augment: {random_hue: 0.1, cameras: [wirst]}}"
    said = refusal(GRPO, imitation, training=False, imitation=True)
    assert said.startswith(
        "override: imitation.augment.cameras.0: the simulator has no camera 'wirst'; did you mean 'wr"
    )


def test_cameras_of_a_simulator_that_is_known_before_it_is_built():
    libero = DAGGER.replace("type: tabletop", "type: libero, suite: libero_spatial")
    with pytest.raises(SpecError, match=r"augment.cameras.0: the simulator has no camera 'nose'; it has: agentview"):
        check_spec(spec_of(libero), training=True)


def test_cameras_of_a_simulator_that_has_to_be_built(tmp_path):
    """The plugin `scripted` does not tell its cameras before it is built: the run ends before the first rollout."""
    text = DAGGER.replace("type: tabletop", "type: scripted")
    check_spec(spec_of(text), training=True)
    with pytest.raises(SpecError, match=r"spec.yaml:6: trainer.augment.cameras.0: .* no camera 'nose'; it has: main"):
        run(spec_of(text), tmp_path / "run")


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("rewards={type: person}", "override: rewards: a person watches one robot at a time, and there are 8 envs"),
        (
            "env={type: gym_hil, num_envs: 8, person: {type: keyboard}}",
            "override: env: person.type: keyboard with 8 envs, and a person holds one robot at a time",
        ),
    ],
)
def test_a_person_at_several_envs(override, text):
    pytest.importorskip("gym_hil")
    overrides = [override] if "rewards" in override else [override, "rollout.max_steps=null"]
    assert text in refusal(GRPO, *overrides)


def test_graphs_on_a_cpu():
    said = refusal(GRPO.replace("max_steps: 12", "max_steps: 12, compile: graphs"))
    assert said.startswith("spec.yaml:5: rollout.compile: graphs needs CUDA, and the policy is on 'cpu'; set rollout")


@pytest.mark.parametrize("learns", [{"training": True}, {"training": False, "imitation": True}])
def test_compile_keys_that_contradict_each_other(learns):
    text = GRPO + "imitation: {expert: {episodes: 2}, steps: 4, lr: 0.1}\n"
    said = refusal(text, "train.compile=off", "rollout.compile=blocks", **learns)
    assert said.startswith("override: train.compile: off and rollout.compile: blocks contradict each other in a worker")
    check_spec(spec_of(text, "train.compile=off", "rollout.compile=blocks"), training=False)  # nothing learns


def test_graphs_that_the_placement_moves():
    cluster = Cluster(cpus=8, gpus=1, memory=64 << 30, gpu_memory=80 << 30)
    overrides = ["runtime.backend=ray", "rollout.compile=graphs"]
    place = "placement={type: collocated, offload: {learner: true}}"
    with pytest.raises(SpecError, match=r"rollout.compile: graphs needs weights that stay where they are"):
        check_spec(spec_of(GRPO, *overrides, place), training=True, cluster=cluster)
    check_spec(spec_of(GRPO, *overrides), training=True, cluster=cluster)


# --------------------------------------------------------------------------------------- demonstrations with a rollout


DATA = "imitation: {data: {type: lerobot, folder: nowhere}}\n"


def checked(text: str) -> tuple[int, str]:
    """Return exit status and output of `vla-rl check`. `vla_rl.check` raises the same."""
    Path("spec.yaml").write_text(text)
    result = CliRunner().invoke(app, ["check", "spec.yaml"])
    if result.exit_code == 2:
        with pytest.raises(SpecError) as refused:
            vla_rl.check("spec.yaml")
        assert str(refused.value) in result.output
    return result.exit_code, result.output


def test_a_recording_for_off_policy_needs_no_steps_and_is_looked_at():
    text = SPEC.replace("min_data: 8", "min_data: 8, demonstrations: {share: 0.5}") + DATA
    code, said = checked(text)
    assert code == 2 and "imitation.data" in said and "nowhere" in said
    assert "steps" not in said and "lr" not in said


def test_a_clone_needs_steps_and_a_rate(tmp_path):
    code, said = checked(GRPO + DATA)
    assert code == 2
    assert "spec.yaml:10: imitation.steps: required by vla-rl sft" in said and "imitation.lr: required by" in said
    with pytest.raises(SpecError, match=r"imitation.steps: required by vla-rl sft"):
        clone(spec_of(SPEC + DATA), tmp_path / "run")
    with pytest.raises(SpecError, match=r"imitation.expert: is cloned by vla-rl sft, which also needs steps and lr"):
        spec_of(GRPO + "imitation: {expert: {episodes: 2}}\n")


def test_check_looks_at_the_rollouts_of_a_spec_that_also_clones():
    text = SPEC.replace("min_data: 8", "min_data: 8, demonstrations: {share: 0.5}")
    code, said = checked(text + "imitation: {expert: {episodes: 2}, steps: 4, lr: 0.1}\n")
    assert code == 2 and "spec.yaml:6: trainer.demonstrations: 0.5 is the share" in said


@pytest.mark.parametrize("trainer", ["off_policy", "dsrl", "offline"])
def test_layers_of_a_billion_are_refused(trainer):
    text = SPEC.replace("type: off_policy, min_data: 8", f"type: {trainer}, hidden: [1000000000]")
    if trainer == "offline":  # a trainer of `imitation`
        text = f"{GRPO}imitation: {{data: {{type: lerobot, folder: x}}, trainer: {{type: offline, hidden: [1000000000]}}}}\n"
    with pytest.raises(SpecError, match=r"trainer.hidden.* must be <= 16384") as caught:
        spec_of(text)
    assert len(caught.value.errors) == 1

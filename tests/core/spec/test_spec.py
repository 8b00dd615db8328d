"""Specs: what they accept, and every way in which one can be wrong."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from vla_rl.core.errors import SpecError
from vla_rl.core.spec.source import apply_override, parse_yaml
from vla_rl.core.spec.spec import Spec, find_missing_packages, load_spec, make_component, parse_spec

TOY = """
import attrs
from attrs import field, frozen, validators as v
from pathlib import Path
from typing import Literal
from vla_rl import AlgorithmPlugin, EnvPlugin, HookPlugin, ModelPlugin, PlacementPlugin

@frozen(kw_only=True)
class Nested:
    lower: float = field(default=0.1, validator=v.ge(0))
    upper: float = field(default=0.9)
    @upper.validator
    def _ordered(self, attribute, value):
        if value < self.lower:
            raise ValueError(f"{value} is below lower {self.lower}")

@frozen(kw_only=True)
class Config:
    width: int = 3
    filter: Nested | None = None
    sizes: dict[str, int] = field(factory=dict)
    where: str | int = 0
    pair: tuple[int, int] = (1, 2)
    names: tuple[str, ...] = ()
    mode: Literal["a", "b"] = "a"
    path: Path | None = None
    _hidden: bool = True

@frozen(kw_only=True)
class Taken:
    num_envs: int = 1

def build(config, context):
    raise AssertionError("checking builds nothing")

def toy(declaration, config=Config):
    return declaration(config=config, build=build, summary="toy")

vla_rl_plugins = {
    "model": {"toy": toy(ModelPlugin)},
    "env": {"toy": toy(EnvPlugin), "taken": toy(EnvPlugin, Taken)},
    "algorithm": {"toy": toy(AlgorithmPlugin)},
    "placement": {"toy": toy(PlacementPlugin)},
    "hook": {"toy": toy(HookPlugin)},
}
"""

GOOD = """\
name: test
plugins: [toy.py]
model: {type: toy}
env: {type: toy, num_envs: 8, sizes: {front: 64}}
rollout: {chunk: 4, episodes: 16, group_size: 4}
algorithm:
  type: toy
  filter: {lower: 0.2, upper: 1}
placement: {type: toy}
train: {steps: 2, lr: 1e-6, micro_batch: 4}
hooks: [{type: toy, where: here}]
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "toy.py").write_text(TOY)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(text: str = GOOD, *overrides: str) -> Spec:
    Path("spec.yaml").write_text(text)
    return load_spec("spec.yaml", overrides)


def errors(text: str, *overrides: str) -> list[str]:
    with pytest.raises(SpecError) as caught:
        read(text, *overrides)
    return list(caught.value.errors)


def test_a_good_spec():
    spec = read()
    assert spec.env.num_envs == 8
    assert spec.env.config.sizes == {"front": 64}
    assert spec.rollout.auto_reset is None
    assert spec.algorithm.config.filter.upper == 1.0
    assert type(spec.algorithm.config.filter.upper) is float
    assert spec.train.lr == 1e-6
    assert spec.hooks[0].config.where == "here"
    assert spec.runtime.backend == "ray"
    assert spec.bc_warmup is None
    assert list(find_missing_packages(spec)) == []


def test_plugins_of_an_override_are_relative_to_the_working_directory(folder, tmp_path_factory, monkeypatch):
    """Paths of the spec stay relative to its folder."""
    there = tmp_path_factory.mktemp("there")
    (folder / "toy.py").rename(folder / "kept.py")
    (there / "toy.py").write_text((folder / "kept.py").read_text())
    (folder / "spec.yaml").write_text(GOOD)
    monkeypatch.chdir(there)
    assert load_spec(folder / "spec.yaml", ["plugins=[toy.py]"]).plugins == (str(there / "toy.py"),)
    assert load_spec(folder / "spec.yaml", ["plugins.0=toy.py"]).plugins == (str(there / "toy.py"),)
    (folder / "kept.py").rename(folder / "toy.py")
    assert load_spec(folder / "spec.yaml").plugins == (str(folder / "toy.py"),)


def test_to_dict_and_dump_read_back_to_an_equal_spec(folder):
    spec = read(GOOD, "model.path=~/x", "model.hidden=false", "bc_warmup={episodes: 3, epochs: 2, lr: 1e-3}")
    data = spec.to_dict()
    assert data["env"] == {"type": "toy", "num_envs": 8, **data["env"]}
    assert data["plugins"] == [str(folder / "toy.py")], "a path is absolute, so that any process finds it"
    assert data["model"]["hidden"] is False
    assert parse_spec(data) == spec
    spec.dump(folder / "out.yaml")
    assert load_spec(folder / "out.yaml") == spec


def test_another_process_can_unpickle_a_spec(folder, bare_fork_server):
    (folder / "spec.pickle").write_bytes(pickle.dumps(read()))
    code = "import pickle; print(pickle.load(open('spec.pickle', 'rb')).env.config.sizes)"
    result = bare_fork_server.run_python("-c", code, check=True)
    assert result.stdout.strip() == "{'front': 64}"


def test_every_error_of_a_file_at_once():
    text = (
        GOOD.replace("num_envs: 8", "num_envs: 1.7")
        .replace("upper: 1", "uper: 1")
        .replace("episodes: 16", "episodes: true")
        .replace("lr: 1e-6", "lr: -1")
        .replace("where: here", "where: [1]")
        .replace("steps: 2, ", "")
    )
    assert errors(text) == [
        "spec.yaml:4: env.num_envs: expected int, got float 1.7",
        "spec.yaml:5: rollout.episodes: expected int, got bool True",
        "spec.yaml:8: algorithm.filter.uper: unknown key; did you mean 'upper'?",
        "spec.yaml:10: train.steps: required, but missing",
        "spec.yaml:10: train.lr: 'lr' must be > 0: -1.0",
        "spec.yaml:11: hooks.0.where: expected str or int, got a list",
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name: test\n", "", "spec.yaml:1: name: required, but missing"),
        ("name: test", "name: 3", "spec.yaml:1: name: expected str, got int 3; put it in quotes"),
        (
            "name: test",
            "name: a/b",
            "spec.yaml:1: name: 'a/b' must be letters, digits and any of _ . + - after the first",
        ),
        ("name: test", "name: test\nname: t", "spec.yaml:2: name: duplicate key, already given in line 1"),
        ("name: test", "name: test\nseeds: 1", "spec.yaml:2: seeds: unknown key; did you mean 'seed'?"),
        ("model: {type: toy}", "model: {}", "spec.yaml:3: model.type: required, but missing"),
        (
            "model: {type: toy}",
            "model: toy",
            "spec.yaml:3: model: expected a mapping such as {type: ...}, got str 'toy'",
        ),
        ("model: {type: toy}", "model:", "spec.yaml:3: model: expected a mapping such as {type: ...}, got nothing"),
        ("model: {type: toy}", "model: {type: toy, pair: [1]}", "spec.yaml:3: model.pair: expected 2 items, got 1"),
        (
            "model: {type: toy}",
            "model: {type: toy, names: x}",
            "spec.yaml:3: model.names: expected a list, got str 'x'",
        ),
        (
            "model: {type: toy}",
            "model: {type: toy, names: [a, 1]}",
            "spec.yaml:3: model.names.1: expected str, got int 1; put it in quotes",
        ),
        (
            "model: {type: toy}",
            "model: {type: toy, mode: A}",
            "spec.yaml:3: model.mode: expected one of 'a', 'b', got str 'A'",
        ),
        (
            "model: {type: toy}",
            "model: {type: toy, hidden: 1}",
            "spec.yaml:3: model.hidden: expected bool (true or false), got int 1",
        ),
        (
            "front: 64",
            "front: x",
            "spec.yaml:4: env.sizes.front: expected int, got str 'x'",
        ),
        (
            "env: {type: toy, num_envs: 8",
            "env: {type: taken, num_envs: 8",
            "spec.yaml:4: env.type: plugin 'taken' has a setting named 'num_envs', which is core's; rename it",
        ),
        ("num_envs: 8", "numenvs: 8", "spec.yaml:4: env.num_envs: required, but missing"),
        (
            "episodes: 16, group_size: 4",
            "auto_reset: {steps: 16, mode: deferre}",
            "spec.yaml:5: rollout.auto_reset.mode: expected one of 'immediate', 'deferred', got str 'deferre'; did you mean 'deferred'?",
        ),
        (
            "episodes: 16, group_size: 4",
            "auto_reset: immediate",
            "spec.yaml:5: rollout.auto_reset: expected a mapping with keys of (steps, mode), got str 'immediate'",
        ),
        (
            "episodes: 16, group_size: 4",
            "steps: 16, auto_reset: {steps: 16}",
            "spec.yaml:5: rollout.steps: unknown key; now auto_reset: {steps: ...}",
        ),
        (
            "group_size: 4",
            "group_size: 3",
            "spec.yaml:5: rollout.group_size: 3 does not divide rollout.episodes 16; use 2 or 4, or rollout.episodes 15 or 18",
        ),
        (
            "group_size: 4",
            "group_size: 11",
            "spec.yaml:5: rollout.group_size: 11 does not divide rollout.episodes 16; use 8 or 16, or rollout.episodes 11 or 22",
        ),
        (
            "episodes: 16",
            "episodes: 14",
            "spec.yaml:5: rollout.group_size: 4 does not divide rollout.episodes 14; use 2 or 7, or rollout.episodes 12 or 16",
        ),
        (
            "episodes: 16, ",
            "",
            "spec.yaml:5: rollout.episodes: give either episodes, such as 64, or auto_reset, such as {steps: 64}",
        ),
        (
            "episodes: 16",
            "episodes: 16, auto_reset: {steps: 16}",
            "spec.yaml:5: rollout.episodes: give either episodes, such as 64, or auto_reset, such as {steps: 64}",
        ),
        (
            "episodes: 16, group_size: 4",
            "auto_reset: {steps: 10}",
            "spec.yaml:5: rollout.auto_reset.steps: 10 is not a multiple of chunk 4",
        ),
        (
            "chunk: 4, episodes: 16, group_size: 4",
            "chunk: 0, auto_reset: {steps: 10}",
            "spec.yaml:5: rollout.chunk: 'chunk' must be >= 1: 0",
        ),
        ("upper: 1", "upper: 0.1", "spec.yaml:8: algorithm.filter.upper: 0.1 is below lower 0.2"),
        (
            "micro_batch: 4",
            "micro_batch: 4, global_batch: 2",
            "spec.yaml:10: train.global_batch: 2 is less than micro_batch 4",
        ),
        (
            "micro_batch: 4",
            "micro_batch: 4, global_batch: 8, mini_batches: 2",
            "spec.yaml:10: train.mini_batches: 2 is given besides global_batch; give one of them",
        ),
        (
            "hooks: [{type: toy, where: here}]",
            "hooks: {type: toy}",
            "spec.yaml:11: hooks: expected a list such as [{type: ...}], got a mapping",
        ),
        (
            "hooks: [{type: toy, where: here}]",
            "hooks: [{type: toy}, {type: toy, where: here}, {type: toy}]",
            "spec.yaml:11: hooks.2: 'toy' is listed twice with the same settings; it would do everything twice",
        ),
        (
            "plugins: [toy.py]",
            "plugins: [toy.py, ./toy]",
            "spec.yaml:2: plugins.1: './toy' is neither a dotted module name nor the path of a .py file",
        ),
        (
            "plugins: [toy.py]",
            "plugins: [toy.py, toy.py]",
            "spec.yaml:2: plugins.1: 'FOLDER/toy.py' is listed twice",
        ),
        (
            "algorithm:\n  type: toy",
            "algorithm:\n  type: grpo\n  preset: [paper]",
            "spec.yaml:8: algorithm.preset: 'grpo' has no preset ['paper']; there are: 'paper', 'rlinf', 'simplevla'",
        ),
        (
            "plugins: [toy.py]",
            "plugins: [toy.py, nope.sub]",
            "spec.yaml:2: plugins.1: no module named 'nope.sub'; give the path of its .py file, or put its folder on PYTHONPATH",
        ),
    ],
)
def test_one_error(old, new, message):
    assert old in GOOD
    assert message in [error.replace(str(Path.cwd()), "FOLDER") for error in errors(GOOD.replace(old, new))]


def test_an_unknown_plugin_says_what_is_installed():
    (error,) = errors(GOOD.replace("model: {type: toy}", "model: {type: toys}"))
    assert error.startswith(
        "spec.yaml:3: model.type: no model named 'toys'; did you mean 'toy'?\n    installed models: "
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "spec.yaml:1: is empty; a spec has the keys name, seed, plugins, model"),
        ("# only a comment\n", "is empty"),
        ("- a\n- b\n", "expected a mapping with the keys of a spec, got a list"),
        ("a: [", "spec.yaml:1: not valid YAML: "),
    ],
)
def test_no_spec_at_all(text, message):
    assert message.split(":")[-1] in errors(text)[0]


@pytest.mark.parametrize("text", [GOOD.encode("utf-16"), GOOD.encode() + b"# caf\xe9", b"\x80\x04\x95"])
def test_a_file_that_is_not_utf_8(text):
    Path("spec.yaml").write_bytes(text)
    with pytest.raises(SpecError, match="spec.yaml: is not UTF-8 text .*; save it again as UTF-8"):
        load_spec("spec.yaml")


def test_a_folder_as_spec(folder):
    with pytest.raises(SpecError, match="is a folder, and not that of a run"):
        load_spec(folder)


def test_what_could_not_be_read_is_not_missed_as_well():
    found = errors(GOOD.replace("env: {type: toy, num_envs: 8, sizes: {front: 64}}", "env: {<<: {type: toy}, a: 1}"))
    assert len(found) == 1 and "spec.yaml:4: env: merge keys (`<<:`) are not part of YAML 1.2" in found[0]


def test_a_file_that_is_not_there():
    with pytest.raises(SpecError, match="nope.yaml: no such file"):
        load_spec("nope.yaml")


def test_overrides():
    spec = read(
        GOOD, "algorithm.filter.lower=0.3", "train.lr=1e-4", "hooks.0.where=7", "env.num_envs=4", "rollout.auto_reset=null",
        "bc_warmup.episodes=3", "bc_warmup.epochs=1", "bc_warmup.lr=1",
    )  # fmt: skip
    assert spec.algorithm.config.filter.lower == 0.3
    assert spec.train.lr == 1e-4
    assert spec.hooks[0].config.where == 7
    assert spec.env.num_envs == 4
    assert spec.bc_warmup is not None
    assert read(GOOD, "hooks=[]").hooks == ()


@pytest.mark.parametrize("text", ["off", "no", "1:30", "012", "1e-4", "true", "null"])
def test_an_override_means_what_the_line_in_a_file_means(text):
    data: dict[str, Any] = {}
    apply_override(data, f"key={text}")
    assert repr(data) == repr(parse_yaml(f"key: {text}").data)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.filtr.lower=1", "override: algorithm.filtr: unknown key; did you mean 'filter'?"),
        ("train.lrr=1", "override: train.lrr: unknown key; did you mean 'lr'?"),
        ("trian.lr=1", "override: trian.lr: unknown key 'trian'; did you mean 'train'?"),
        ("train.lr=fast", "override: train.lr: expected float, got str 'fast'"),
        ("train.lr=[", "override: train.lr: not valid YAML: "),
        ("train", "override: 'train' is not of the form path=value"),
        ("name.x=1", "override: name.x: name is str 'test', which has no 'x'"),
        ("placement.0.type=toy", "override: placement.0.type: the spec lists no placement; give the whole list"),
        ("env..num_envs=1", "override: 'env..num_envs' has a dot without a key before and after it"),
        ("algorithm.mode=[a]", "override: algorithm.mode: expected one of 'a', 'b', got a list"),
        ("hooks.3.where=1", "override: hooks.3.where: hooks has 1 items; '3' is none of 0, 1, ..."),
    ],
)
def test_a_wrong_override(override, message):
    found = errors(GOOD.replace("placement: {type: toy}\n", ""), override)
    assert any(error.startswith(message) for error in found), found


def test_an_override_that_another_key_does_not_allow():
    assert any("4 does not divide rollout.episodes 6" in error for error in errors(GOOD, "rollout.episodes=6"))


def test_components_from_python(folder):
    made = make_component("algorithm", "toy", [str(folder / "toy.py")], filter={"lower": 0.3})
    assert made.config.filter.lower == 0.3
    with pytest.raises(ValueError, match="filtr: unknown key; did you mean 'filter'"):
        make_component("algorithm", "toy", [str(folder / "toy.py")], filtr={})


def test_defaults_are_the_installed_plugins():
    text = GOOD.replace("placement: {type: toy}\n", "").replace("hooks: [{type: toy, where: here}]\n", "")
    spec = read(text)
    assert spec.placement.type == "collocated"
    assert [hook.type for hook in spec.hooks] == ["console", "jsonl", "tensorboard"]


def test_no_error_needs_torch(folder, bare_fork_server):
    Path("spec.yaml").write_text(GOOD.replace("lower", "lowr"))
    code = """
import sys
from vla_rl.core.spec.spec import load_spec
try:
    load_spec("spec.yaml")
except Exception as exc:
    print(type(exc).__name__, {"torch", "ray", "transformers", "numpy"} & set(sys.modules))
"""
    result = bare_fork_server.run_python("-c", code, check=True)
    assert result.stdout.strip() == "SpecError set()"


def test_a_spec_in_python_is_checked_as_well():
    spec = read()
    data: dict[str, Any] = {
        key: getattr(spec, key) for key in ("name", "model", "env", "rollout", "algorithm", "train")
    }
    assert Spec(**data).hooks[0].type == "console"
    with pytest.raises(ValueError, match="'nope nope' must be letters"):
        Spec(**{**data, "name": "nope nope"})


@pytest.mark.parametrize("number", [999_999_937, 10**30])
@pytest.mark.parametrize(
    "key",
    [
        "env.num_envs", "rollout.episodes", "rollout.chunk", "rollout.group_size", "rollout.max_steps", "rollout.lag",
        "rollout.resample.max_rounds", "rollout.task_sampling.window", "asynchrony.max_lag", "asynchrony.replay.uses",
        "asynchrony.replay.capacity", "eval.repeats", "eval.episodes_per_task", "train.epochs", "train.micro_batch",
        "train.keep_checkpoints", "runtime.restarts", "imitation.batch", "imagination.per_real", "imagination.buffer",
    ],
)  # fmt: skip
def test_work_without_end_is_refused_with_a_number(key, number):
    """At once: the test would take minutes otherwise."""
    found = errors(GOOD, "rollout.task_sampling.type=weighted", f"{key}={number}")
    (said,) = [error for error in found if error.startswith(f"override: {key}: ")]
    assert "must be <= " in said or "expected a number of 63 bits at most" in said


def test_sizes_near_a_large_prime_are_found_at_once():
    (said,) = errors(GOOD, "rollout.episodes=999983", "rollout.group_size=4")
    assert said == (
        "override: rollout.group_size: 4 does not divide rollout.episodes 999983; use 1 or 999983, or rollout.episodes "
        "999980 or 999984"
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.lr=1e30", "train.lr: 'lr' must be <= 10: 1e+30"),
        ("train.lr=1e-300", "train.lr: 'lr' must be >= 1e-12: 1e-300"),
        ("train.lr=1" + 400 * "0", "train.lr: 10000000000000000000... has 1329 bits; use a smaller number"),
        ("rollout.temperature=1e300", "rollout.temperature: 'temperature' must be <= 1000.0: 1e+300"),
        ("rollout.reward_coef=0", "rollout.reward_coef: 0 makes every reward 0, and there is nothing to learn"),
        ("rollout.reward_coef=1e300", "rollout.reward_coef: 1e+300 is not within what float32 holds"),
        ("train.max_grad_norm=1e30", "train.max_grad_norm: 'max_grad_norm' must be <= 1000000.0"),
        ("runtime.deadline_s=1e20", "runtime.deadline_s: 'deadline_s' must be <= 2592000.0"),
        ("seed=1" + 30 * "0", "seed: expected a number of 63 bits at most, got one of 100"),
        ("name=" + 300 * "x", "name: has 300 characters, and names a folder; there may be 200"),
        ('model.path="a\\0b"', "model.path: expected text, got str 'a\\x00b', which has a NUL byte in it"),
        ("hooks." + 5000 * "9" + ".type=toy", "hooks has 1 items"),
        ("hooks.²=toy", "hooks has 1 items; '²' is none of 0, 1, ..."),
        (".".join(100 * ["model"]) + "=1", "has 100 keys; a spec is nested at most 64 deep"),
        (f"hooks=[{', '.join(f'{{type: toy, where: {i}}}' for i in range(200))}]", "has 200 hooks; there may be 100"),
    ],
)  # fmt: skip
def test_a_value_beyond_reason(override, message):
    assert any(message in error for error in errors(GOOD, override))


def test_many_unknown_keys_are_counted():
    found = errors(GOOD, "train={" + ", ".join(f"k{i}: 1" for i in range(3_000)) + "}")
    assert "override: train.k20: unknown key, as are 2979 others" in found and len(found) < 30


def test_a_file_without_end_is_not_read():
    with pytest.raises(SpecError, match="it has more than 4,000,000 characters"):
        load_spec("/dev/zero")

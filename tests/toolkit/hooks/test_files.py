"""Where hooks write: plain names in the run folder, which nothing else writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from vla_rl.core.errors import SpecError, UserError
from vla_rl.core.spec.spec import parse_spec
from vla_rl.runtime.checks.run import check_spec
from vla_rl.toolkit.hooks.files import check_outside

SPEC = {
    "name": "scripted",
    "plugins": ["vla_rl.testing.scripted"],
    "model": {"type": "linear"},
    "env": {"type": "scripted", "num_envs": 4},
    "rollout": {"chunk": 2, "episodes": 4, "group_size": 4},
    "algorithm": {"type": "grpo"},
    "runtime": {"backend": "local"},
    "train": {"steps": 1, "lr": 1e-3, "micro_batch": 8},
}


def check(*hooks) -> None:
    check_spec(parse_spec({**SPEC, "hooks": list(hooks)}), training=True)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        *((name, "is a file of the run itself") for name in ("spec.yaml", "Spec.YAML", "results.json", "checkpoints")),
        ("spec-until_step_000004.yaml", "is a file of the run itself"),
        *(
            (name, "is not the name of a file")
            for name in ("../../x", "/tmp/x", "a/b.jsonl", "", " ", ".", "..", "a\nb")
        ),
        *((name, "begins or ends with a dot or a space") for name in (".lock", "x.", " x", "x ")),
        ("é" * 101, "is longer than 200 bytes"),
    ],
)
def test_a_hook_writes_no_file_that_is_not_its_own(name, why):
    with pytest.raises(SpecError, match=rf"(?s)hooks.0.file: .*{why}.*give a plain name, such as 'metrics.jsonl'"):
        check({"type": "jsonl", "file": name})


@pytest.mark.parametrize("name", ["metrics.jsonl", "loss curves.txt", "méthode-2.jsonl", "my.spec.yaml"])
def test_any_other_plain_name_is_taken(name):
    check({"type": "jsonl", "file": name})


@pytest.mark.parametrize(
    ("hooks", "file"),
    [
        ([{"type": "jsonl"}, {"type": "jsonl", "file": "Metrics.jsonl"}], "Metrics.jsonl"),
        ([{"type": "jsonl", "file": "videos"}, {"type": "console"}, {"type": "video"}], "videos"),
        ([{"type": "video"}, {"type": "video", "every": 2}], "videos"),
    ],
)
def test_two_hooks_do_not_write_one_file(hooks, file):
    last = len(hooks) - 1
    with pytest.raises(SpecError, match=rf"hooks.{last}: .* writes {file} in the run folder, and so does hooks\[0\]"):
        check(*hooks)
    check({"type": "jsonl"}, {"type": "jsonl", "file": "again.jsonl"}, {"type": "video"}, {"type": "tensorboard"})


def test_a_third_party_hook_does_not_write_what_the_run_does(tmp_path):
    (tmp_path / "greedy.py").write_text(
        "import attrs\n"
        "from vla_rl.core.declarations import HookPlugin\n"
        "@attrs.frozen(kw_only=True)\n"
        "class Config: pass\n"
        "class Greedy: pass\n"
        "plugin = HookPlugin(config=Config, build=lambda config: Greedy(), summary='writes results.json',\n"
        "                files=lambda config: ['results.json'])\n"
        "vla_rl_plugins = {'hook': {'greedy': plugin}}\n"
    )
    spec = {**SPEC, "plugins": [*SPEC["plugins"], str(tmp_path / "greedy.py")], "hooks": [{"type": "greedy"}]}
    with pytest.raises(SpecError, match=r"hooks.0: 'greedy' would write results.json .*the run's own"):
        check_spec(parse_spec(spec), training=True)


@pytest.mark.parametrize("path", [".", "checkpoints/mine", "../run/episodes"])
def test_a_folder_of_a_hook_is_not_one_of_the_run(tmp_path, path):
    run = tmp_path / "run"
    with pytest.raises(UserError, match="folder: .*choose another folder"):
        check_outside(run, run / path, "folder")
    check_outside(run, run / "lerobot", "folder")
    check_outside(run, tmp_path / "elsewhere", "folder")
    check_outside(run, Path("elsewhere"), "folder")

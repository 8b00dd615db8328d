"""Benchmarks of several suites, their pages, and two policies on the same states."""

from __future__ import annotations

import json
import re
from html import unescape
from importlib.util import find_spec
from pathlib import Path

import pytest
from scipy.stats import binomtest
from typer.testing import CliRunner

from vla_rl.cli.benchmark.paired import Pair, compare_episodes, read_episodes
from vla_rl.cli.benchmark.run import _env_type
from vla_rl.cli.benchmark.suites import PACKAGE, load_benchmark, mean_of
from vla_rl.cli.main import app
from vla_rl.core.errors import UserError
from vla_rl.core.spec.shipped_files import names_in
from vla_rl.core.spec.spec import load_spec
from vla_rl.core.types import TaskInfo
from vla_rl.plugins.envs.tabletop import config

EXAMPLE = str(Path(__file__).parents[3] / "examples" / "tabletop_grpo.yaml")
SHORT = ["runtime.backend=local", "env.num_envs=16", "eval.episodes_per_task=2"]


def vla_rl(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


def refusal(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 2
    return result.output


@pytest.mark.parametrize("name", names_in(PACKAGE))
def test_a_shipped_benchmark_names_keys_of_its_simulator(name):
    benchmark = load_benchmark(name)
    assert benchmark.suites and all(
        "=" in override for override in benchmark.suite_overrides(next(iter(benchmark.suites)))
    )
    assert all(0 <= rate <= 100 for published in benchmark.published for rate in published.rates.values())
    assert all(published.source for published in benchmark.published)


@pytest.mark.skipif(find_spec("metaworld") is None, reason="needs pip install -e '.[metaworld]'")
def test_meta_worlds_fifty_tasks_are_each_in_one_suite():
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS

    tasks = [task for keys in load_benchmark("metaworld").suites.values() for task in keys["env.tasks"]]
    assert sorted(tasks) == sorted(ALL_V3_ENVIRONMENTS)


@pytest.mark.sim
@pytest.mark.skipif(find_spec("libero") is None, reason="needs pip install -e '.[libero]'")
def test_suites_of_libero_are_installed():
    from vla_rl.plugins.envs.libero.suites import Suite

    for name in ("libero", "libero_pro"):
        for keys in load_benchmark(name).suites.values():
            Suite(keys["env.suite"])


def test_suites_are_played_kept_and_shown(tmp_path):
    arguments = ["eval", EXAMPLE, *SHORT, "--benchmark", "tabletop", "--folder", str(tmp_path)]
    first = vla_rl(*arguments, "--suite", "Put")
    assert "Put" in first and "Pick" not in first and "mean" not in first
    second = vla_rl(*arguments)
    assert re.search(r"Put .*n=8  \(was there\)", second) and re.search(r"Pick .*n=8\n", second)
    assert "mean of Pick, Put" in second
    pick = json.loads((tmp_path / "pick.json").read_text())
    assert pick["success"]["n"] == len(pick["episodes"]) == 8 and len(pick["tasks"]) == 4
    page = (tmp_path / "index.html").read_text()
    assert "<h1>Tabletop</h1>" in page and "pick_red" in page and "put_red" in page
    other = vla_rl(*arguments, "--suite", "Put", "eval.greedy=false")
    assert "was there" not in other
    assert "all" in vla_rl("compare", str(tmp_path), str(tmp_path))


def test_a_page_says_what_was_changed_of_the_benchmark(tmp_path):
    changes = ["env.tasks=[put_red]", "rollout.max_steps=8"]
    file = tmp_path / "mine.yaml"
    file.write_text(
        "title: Mine\nenv: tabletop\nchange: {rollout.max_steps: null, eval.episodes_per_task: 1}\n"
        "suites: {Put: {env.tasks: [put_red]}, Pick: {env.tasks: [pick_red, pick_blue]}}\n"
        "published: [{policy: other, rates: {Put: 90}, source: a paper}]\n"
    )
    arguments = ["eval", EXAMPLE, *SHORT[:2], "--benchmark", str(file)]
    vla_rl(*arguments, "--folder", str(tmp_path / "as_it_is"))
    page = (tmp_path / "as_it_is" / "index.html").read_text()
    assert "<td>measured here</td>" in page and "changed" not in page
    vla_rl(*arguments, *changes, "--folder", str(tmp_path / "changed"))
    page = unescape((tmp_path / "changed" / "index.html").read_text())
    assert "<td>measured here, changed (below)</td>" in page
    assert (
        "Ours are of a changed benchmark: Put with rollout.max_steps=8; "
        'Pick with rollout.max_steps=8, env.tasks=["put_red"].' in page
    )


def test_groups_of_suites_have_means_which_the_mean_is_of(tmp_path):
    file = tmp_path / "mine.yaml"
    text = (
        "title: Mine\nenv: tabletop\nsuites: {Put: {env.tasks: [put_red]}, Red: {env.tasks: [pick_red]}, Blue: "
        "{env.tasks: [pick_blue]}}\ngroups: {Pick: [Red, Blue]}\nmean: [Put, Pick]\n"
        "published: [{policy: other, rates: {Put: 90, Pick: 60}, source: a paper}]\n"
    )
    file.write_text(text)
    said = vla_rl("eval", EXAMPLE, *SHORT, "--benchmark", str(file), "--folder", str(tmp_path / "results"))
    rates = {
        name: 100 * json.loads((tmp_path / "results" / f"{name}.json").read_text())["success"]["rate"]
        for name in ("put", "red", "blue")
    }
    pick = (rates["red"] + rates["blue"]) / 2
    assert f"mean of Put, Pick: {(rates['put'] + pick) / 2:.1f} %" in said
    page = (tmp_path / "results" / "index.html").read_text()
    assert "<th>Blue</th><th>Pick</th><th>mean</th>" in page and f"<td>{pick:.1f}</td>" in page
    assert "<td>90.0</td><td>–</td><td>–</td><td>60.0</td><td>75.0</td>" in page
    file.write_text(text.replace("[Red, Blue]", "[Red, Green]"))
    assert "names a suite 'Green' that it does not have: Put, Red, Blue" in refusal(
        "eval", EXAMPLE, *SHORT, "--benchmark", str(file)
    )


def test_rl4vlas_protocol_has_fifteen_sub_settings_in_three_groups():
    benchmark = load_benchmark("maniskill_ood")
    assert {name: len(suites) for name, suites in benchmark.groups.items()} == {
        "Vision": 5,
        "Semantics": 7,
        "Execution": 3,
    }
    played = [suite for suites in benchmark.groups.values() for suite in suites]
    assert sorted([*played, "In distribution"]) == sorted(benchmark.suites)
    sets = [(keys["env.task"], keys["env.kwargs"]["obj_set"]) for keys in benchmark.suites.values()]
    assert len(set(sets)) == 16
    assert benchmark.suite_keys("Vision: table")["env.eval_states"] == 256
    (best,) = [figures for figures in benchmark.published if figures.policy == "OpenVLA, RLinf's PPO"]
    assert mean_of(best.rates, benchmark.mean) == pytest.approx(best.mean, abs=0.01), "theirs is that of the groups"


def test_success_is_shown_by_category_where_tasks_have_any(tmp_path, monkeypatch):
    """LIBERO-Plus has thousands of tasks: the terminal and the page show its dimensions and levels instead."""
    task_info = TaskInfo
    categories = {"pick_red": ("pick",), "pick_blue": ("pick", "pick, blue")}
    monkeypatch.setattr(
        config, "TaskInfo", lambda name, **of: task_info(name=name, categories=categories.get(name, ()), **of)
    )
    said = vla_rl("eval", EXAMPLE, *SHORT, "--benchmark", "tabletop", "--folder", str(tmp_path), "--suite", "Pick")
    assert "n=8" in said
    result = json.loads((tmp_path / "pick.json").read_text())
    assert {name: rate["n"] for name, rate in result["categories"].items()} == {"pick": 4, "pick, blue": 2}
    both = sum(result["tasks"][name]["rate"] for name in categories) / 2
    assert result["categories"]["pick"]["rate"] == both
    page = (tmp_path / "index.html").read_text()
    assert "<td>pick, blue</td>" in page and "<th>category</th>" in page and "<td>pick_red</td>" not in page


def test_optional_suites_are_left_out_with_the_reason(tmp_path):
    file = tmp_path / "mine.yaml"
    suites = "{Pick: {env.tasks: [pick_red]}, Other: {env.tasks: [pick_gold]}}"
    file.write_text(f"title: Mine\nenv: tabletop\nsuites: {suites}\noptional: [Other]\n")
    arguments = ["eval", EXAMPLE, *SHORT, "--benchmark", str(file), "--folder", str(tmp_path / "results")]
    said = vla_rl(*arguments)
    assert re.search("Other is left out: .*pick_gold", said) and re.search(r"Pick .*n=2\n", said)
    assert "pick_gold" in refusal(*arguments, "--suite", "Other"), "one that is asked for is refused"
    file.write_text("title: Mine\nenv: tabletop\nsuites: {A: {}}\noptional: [B]\n")
    assert "names a suite 'B' that it does not have: A" in refusal(*arguments)


def test_a_benchmarks_keys_may_complete_the_spec():
    """The command line gives env.plus.sample=200, which excludes the env.suite of the run."""

    def spec_with(changes):
        if not changes:
            raise UserError("give one of suite, suites and plus")
        return load_spec(Path(EXAMPLE), changes)

    assert _env_type(load_benchmark("tabletop"), "Pick", spec_with) == "tabletop"


def test_one_evaluation_is_compared_by_its_states(tmp_path):
    files = [str(tmp_path / f"{n}.json") for n in (2, 1)]
    for n, file in zip((2, 1), files, strict=True):
        vla_rl("eval", EXAMPLE, *SHORT, f"eval.episodes_per_task={n}", "env.tasks=[pick_red]", "--output", file)
    printed = vla_rl("compare", *files).splitlines()
    assert [line.split()[0] for line in printed] == ["success", "all", "pick_red"]
    assert all(line.endswith("1.0000      1") for line in printed[1:])


@pytest.mark.parametrize(("first_only", "second_only"), [(1, 9), (9, 1), (0, 0), (3, 3), (30, 12), (0, 200)])
def test_mcnemars_test_is_the_binomial_one(first_only, second_only):
    pair = Pair(n=400, first=0, second=0, first_only=first_only, second_only=second_only)
    n = first_only + second_only
    expected = binomtest(first_only, n).pvalue if n else 1.0
    assert pair.p == pytest.approx(expected, rel=1e-9)


def test_pairs_are_of_the_states_that_both_played():
    first = {("", "a", 1, 0): True, ("", "a", 2, 0): True, ("", "b", 3, 0): False}
    second = {("", "a", 1, 0): False, ("", "b", 3, 0): True, ("", "b", 4, 0): True}
    pairs = compare_episodes(first, second)
    assert pairs["all"] == Pair(n=2, first=1, second=1, first_only=1, second_only=1)
    assert pairs["a"] == Pair(n=1, first=1, second=0, first_only=1, second_only=0)
    with pytest.raises(UserError, match="no evaluation state in common"):
        compare_episodes(first, {("Spatial", "a", 1, 0): True})


def test_a_mean_is_of_all_its_suites():
    assert mean_of({"a": 1.0, "b": 2.0}, ("a", "b")) == 1.5
    assert mean_of({"a": 1.0}, ("a", "b")) is None
    assert mean_of({"a": 1.0}, ()) is None


def test_what_is_not_an_evaluation_is_refused(tmp_path):
    (tmp_path / "results.json").write_text('{"success": 1}')
    with pytest.raises(UserError, match="is not an evaluation"):
        read_episodes(tmp_path / "results.json")
    with pytest.raises(
        UserError, match=r"nowhere.json does not exist; `vla-rl eval RUN --output .*nowhere.json` writes it"
    ):
        read_episodes(tmp_path / "nowhere.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no evaluation"):
        read_episodes(tmp_path / "empty")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("title: x\nenv: tabletop\nsuits: {}", "suits"),
        ("title: x\nenv: tabletop\nsuites: {A: {}}\nmean: [B]", "names a suite 'B' that it does not have: A"),
        ("title: [", "mine.yaml:1: not valid YAML"),
    ],
)
def test_a_file_that_holds_no_benchmark(tmp_path, text, said):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    assert said in refusal("eval", EXAMPLE, "--benchmark", str(file))


def test_wrong_choices_name_the_available_ones():
    assert "did you mean 'libero'" in refusal("eval", EXAMPLE, "--benchmark", "libro")
    assert "runs env 'libero', the spec has 'tabletop'" in refusal("eval", EXAMPLE, "--benchmark", "libero")
    assert "--output is for a single evaluation" in refusal(
        "eval", EXAMPLE, "--benchmark", "tabletop", "--output", "x.json"
    )
    assert "name it: --benchmark" in refusal("eval", EXAMPLE, "--suite", "Pick")
    assert "did you mean 'Pick'" in refusal("eval", EXAMPLE, "--benchmark", "tabletop", "--suite", "Pik")


@pytest.mark.parametrize("end", ["", "/checkpoints/step_000001"])
def test_runs_are_compared_by_two_evaluations(tmp_path, monkeypatch, end):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        Path(name, "checkpoints", "step_000001", "model").mkdir(parents=True)
        Path(name, "spec.yaml").touch()
    Path("kept.json").write_text("{}")
    files = ["a.json", "b.json"] if not end else ["a-step_000001.json", "b-step_000001.json"]
    said = refusal("compare", f"a{end}", f"b{end}")
    evaluations = [f"vla-rl eval {name}{end} --output {file}" for name, file in zip("ab", files, strict=True)]
    assert all(f"  {command}\n" in said for command in evaluations) and f"  vla-rl compare {' '.join(files)}" in said
    said = refusal("compare", f"a{end}", "kept.json")
    assert "vla-rl eval b" not in said and f"  vla-rl compare {files[0]} kept.json" in said

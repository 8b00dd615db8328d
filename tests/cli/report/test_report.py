"""`vla-rl report`: a page that needs nothing but itself, of whole runs and of broken ones."""

from __future__ import annotations

import json
import re
import shutil
from base64 import b64encode
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

from chromium import needs_chromium
from vla_rl.cli import model_card
from vla_rl.cli.main import app
from vla_rl.cli.report.charts import MAX_POINTS, SCREEN, axis_ticks, format_number, success_chart
from vla_rl.cli.report.gather import Point, read_report_data
from vla_rl.cli.report.timeline import draw_timelines
from vla_rl.core.spec.spec import parse_spec
from vla_rl.core.spec.yaml import dump_yaml
from vla_rl.runtime.start import run

SPEC = {
    "name": "shown",
    "plugins": ["vla_rl.testing.scripted"],
    "model": {"type": "linear"},
    "env": {"type": "scripted", "num_envs": 8},
    "rollout": {"chunk": 2, "episodes": 16, "group_size": 4},
    "algorithm": {"type": "grpo"},
    "runtime": {"backend": "local"},
    "train": {"steps": 4, "lr": 3e-2, "micro_batch": 16},
    "eval": {"every": 2, "episodes_per_task": 4},
    "hooks": [{"type": "jsonl"}],
}
VOID = {"meta", "wbr"}


class Page(HTMLParser):
    """Counts elements, and checks that they are closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.text = [], [], ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text += data + " "

    def count(self, tag, css=None):
        return sum(t == tag and (css is None or css in a.get("class", "").split()) for t, a in self.elements)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    home = tmp_path_factory.mktemp("report") / "run"
    run(parse_spec(SPEC), home, resume=False)
    (home / "videos").mkdir()
    for step, outcome in ((0, "failure"), (4, "success")):
        episodes = []
        for episode in range(2):
            video = home / "videos" / f"step_{step:06d}_ep{episode}_{outcome}.mp4"
            video.write_bytes(bytes([step, episode]) * 500)
            episodes.append({"file": video.name, "task": f"task-{episode}", "instruction": f"move block {episode}"})
        (home / "videos" / f"step_{step:06d}.json").write_text(json.dumps({"episodes": episodes}))
    return home


def made(*arguments):
    result = CliRunner().invoke(app, ["report", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_whole_run(folder):
    assert str(folder / "report.html") in made(folder)
    text = (folder / "report.html").read_text()
    page, results = Page(text), json.loads((folder / "results.json").read_text())
    for value in ("shown", "linear on scripted (8 envs) with grpo", "4 of 4 steps", "task-0", "torch", "num_envs: 8"):
        assert value in page.text
    assert f"{100 * results['success']['rate']:.1f} %" in page.text
    assert page.count("circle") == 2 * 3, "evaluations at steps 0, 2 and 4, for screens and for phones"
    assert page.count("path", "band") == 2
    assert page.count("rect", "learner") == 2, "the last step has one update"
    assert page.count("rect", "sim") >= 8
    assert f"{100 * results['roles']['learner']['busy']:.1f} %" in page.text
    films = [a["src"] for t, a in page.elements if t == "video"]
    assert films[0] == "data:video/mp4;base64," + b64encode(bytes([4, 0]) * 500).decode(), "the last evaluation first"
    assert len(films) == 4


def test_captions_of_videos_name_the_task_and_the_instruction(folder):
    made(folder)
    captions = re.findall(r"<video .*?<figcaption>(.*?)</figcaption>", (folder / "report.html").read_text())
    assert [re.sub(r"<[^>]*>", " ", caption).split() for caption in captions] == [
        ["move", "block", "0", "task-0,", "step", "4,", "episode", "0", "success"],
        ["move", "block", "1", "task-1,", "step", "4,", "episode", "1", "success"],
        ["move", "block", "0", "task-0,", "step", "0,", "episode", "0", "failure"],
        ["move", "block", "1", "task-1,", "step", "0,", "episode", "1", "failure"],
    ]


def test_videos_without_a_list_are_shown_with_what_their_names_say(folder, tmp_path):
    home = tmp_path / "run"
    shutil.copytree(folder, home, symlinks=True)
    for file in (home / "videos").glob("*.json"):
        file.unlink()
    made(home)
    page = Page((home / "report.html").read_text())
    assert page.count("video") == 4 and "step 4, episode 0" in page.text


def test_a_list_of_videos_that_no_run_writes_is_named(folder, tmp_path):
    home = tmp_path / "run"
    shutil.copytree(folder, home, symlinks=True)
    (home / "videos" / "step_000004.json").write_text('{"episodes": [{"file": "a.mp4", "task": 3}]}')
    result = CliRunner().invoke(app, ["report", str(home)])
    assert result.exit_code == 2 and "'task' is int 3, a text is expected" in result.output.replace("\n", " ")


def test_wide_charts_have_a_form_for_phones(folder):
    made(folder)
    page = Page((folder / "report.html").read_text())
    widths = {kind: {a["viewbox"].split()[2] for t, a in page.elements if t == "svg" and a["class"] == kind}
              for kind in ("screen", "phone")}  # fmt: skip
    assert widths == {"screen": {"960"}, "phone": {"340"}}, "340 fits into a window of 390 pixels with its margins"
    assert page.count("svg", "screen") == page.count("svg", "phone") >= 2


def test_no_chart_is_cut_off_by_a_narrow_window(folder):
    """Charts take the width of their box, none stands in a box that scrolls, and what is drawn is inside of it."""
    made(folder)
    text = (folder / "report.html").read_text()
    style, body = re.search(r"<style>(.*?)</style>", text, flags=re.DOTALL)[1], text.partition("<body>")[2]
    assert re.search(r"^svg \{[^}]*width: 100%; height: auto;", style, flags=re.MULTILINE)
    assert not re.search(r"svg[^{]*\{[^}]*(min-width|overflow)", style)
    scrolling = re.findall(r'<div class="(?:card )?scroll">(.*?)</div>', body, flags=re.DOTALL)
    assert scrolling and not any("<svg" in part for part in scrolling)
    charts = re.findall(r'<svg class="[a-z]*" viewBox="0 0 (\d+) (\d+)"[^>]*>(.*?)</svg>', body, flags=re.DOTALL)
    assert len(charts) >= 4
    for width, height, drawn in charts:
        for path in re.findall(r' d="([^"]*)"', drawn):
            points = re.findall(r"[ML]([\d.-]+) ([\d.-]+)", path)
            assert all(0 <= float(x) <= float(width) and 0 <= float(y) <= float(height) for x, y in points)


def test_a_phone_shows_times_of_roles_and_long_lines_of_the_spec_whole(folder):
    """A role's shares stand below each other, each with its title; code continues on the next line."""
    made(folder)
    text = (folder / "report.html").read_text()
    (table,) = re.findall(r'<table class="roles">.*?</table>', text)
    titles = re.findall(r"<th>([^<]+)</th>", table)[1:]
    assert titles[0] == "busy" and titles[-1] == "bubbles"
    assert re.findall(r'<td data-title="([^"]+)">', table) == titles * table.count('<td class="name">')
    narrow = text.partition("@media (max-width: 640px)")[2].partition("@media")[0]
    assert ".roles td[data-title]::before { content: attr(data-title);" in narrow
    assert re.search(r"^pre \{[^}]*white-space: pre-wrap; overflow-wrap: anywhere;", text, flags=re.MULTILINE)


@needs_chromium
@pytest.mark.parametrize("width", [390, 1280])
def test_long_names_and_times_stay_in_their_places(folder, tmp_path, tab, width):
    name = "LIVING_ROOM_SCENE1_pick_up_the_alphabet_soup_and_the_cream_cheese_box_and_put_them_in_the_basket"
    shutil.copytree(folder, tmp_path / "run")
    file, videos = tmp_path / "run" / "results.json", tmp_path / "run" / "videos" / "step_000004.json"
    results, listed = json.loads(file.read_text()), json.loads(videos.read_text())
    rates = {name: results["success"], "short": results["success"]}
    file.write_text(json.dumps(results | {"tasks": rates, "tasks_before": rates, "wall_seconds": 360_599.0}))
    videos.write_text(json.dumps({"episodes": [video | {"task": name} for video in listed["episodes"]]}))
    made(tmp_path / "run")
    tab.set_width(width)
    tab.open((tmp_path / "run" / "report.html").as_uri())
    inside = "(it) => it.scrollWidth <= it.clientWidth"
    for css in ("html", ".scroll", ".tile b", ".where"):
        assert tab.value(f"[...document.querySelectorAll('{css}')].every({inside})"), css
    assert tab.value("Math.max(...[...document.querySelectorAll('.tile b')].map((it) => it.offsetHeight))") < 40
    assert tab.value(
        "[...document.querySelectorAll('.where')].every((it) =>"
        " it.children[0].getBoundingClientRect().right <= it.children[1].getBoundingClientRect().left)"
    )


@pytest.mark.parametrize(
    ("before", "after", "css"),
    [(0.5, 0.6, "better"), (0.5, 0.5, ""), (0.5, 0.4, "worse"), (None, 0.3, "better"), (None, 0.0, "")],
)
def test_a_success_is_green_where_it_rose(folder, tmp_path, before, after, css):
    def rate(value):
        return None if value is None else {"rate": value, "low": 0.0, "high": 1.0, "n": 10}

    for name in ("spec.yaml", "metrics.jsonl"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "results.json").write_text(json.dumps({"success": rate(after), "success_before": rate(before)}))
    made(tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert f'<div class="tile {css}"><span>success</span><b>{100 * after:.1f} %' in text


@pytest.mark.parametrize("last", [0, 2])
def test_an_unfinished_run_says_after_which_step_its_success_was_measured(folder, tmp_path, last):
    (tmp_path / "spec.yaml").write_bytes((folder / "spec.yaml").read_bytes())
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] <= last))
    made(tmp_path)
    text = (tmp_path / "report.html").read_text()
    titles = re.findall(r'<div class="tile ([a-z]*)"><span>([^<]*)</span>', text)
    expected = [("", "success after step 2")] * (last == 2) + [("", "before training")]
    assert titles[: len(expected)] == expected and "success" not in dict(titles).values()


def test_the_page_fetches_nothing(folder):
    made(folder)
    text = (folder / "report.html").read_text()
    page = Page(text)
    assert "default-src 'none'" in next(a["content"] for t, a in page.elements if a.get("http-equiv"))
    assert page.count("script") == page.count("link") == page.count("img") == 0
    assert all(a.get(name, "data:").startswith("data:") for _, a in page.elements for name in ("src", "href"))
    assert not re.search(r"url\(|@import", text)


def test_videos_are_bounded(folder, tmp_path):
    made(folder, "--output", tmp_path / "small.html", "--video-mb", "0.0025")
    page = Page((tmp_path / "small.html").read_text())
    assert page.count("video") == 2
    assert "2 more in" in page.text


def test_a_run_that_has_just_begun(tmp_path):
    spec = {**SPEC, "env": {"type": "scripted", "num_envs": 8}, "name": "begun"}
    parse_spec(spec).dump(tmp_path / "spec.yaml")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time/step": 2.0, "env/success_rate": 0.5, "rollout/epi')
    made(tmp_path)
    page = Page((tmp_path / "report.html").read_text())
    assert "0 of 4 steps so far; the run has no results yet" in page.text
    assert "No metrics.jsonl" in page.text


def test_what_a_run_says_is_text(tmp_path):
    parse_spec(SPEC).dump(tmp_path / "spec.yaml")
    rate = {"rate": 0.5, "low": 0.4, "high": 0.6, "n": 9}
    results = {"success": rate, "tasks": {"<script>alert(1)</script>": rate}, "notes": ["a < b & c"]}
    (tmp_path / "results.json").write_text(json.dumps(results))
    made(tmp_path)
    page = Page((tmp_path / "report.html").read_text())
    assert page.count("script") == 0
    assert "<script>alert(1)</script>" in page.text


EVIL = "</script></title></style><script>alert('1')</script>\"'><img src=x onerror=alert(2)>"
RATE = {"rate": 0.5, "low": 0.4, "high": 0.6, "n": 9}


def test_whatever_files_of_a_run_say_is_text(folder, tmp_path):
    """Names of roles, tasks, causes, calls, processes, packages, metrics and files."""
    home = tmp_path / f"run {EVIL.replace('/', '')}"
    shutil.copytree(folder, home, symlinks=True)
    spec = parse_spec(SPEC).to_dict() | {"name": EVIL, "train": {"steps": EVIL}, "model": {"type": EVIL}}
    (home / "spec.yaml").write_text(dump_yaml(spec))
    usage = {"workers": 1, "busy": 0.5, "bubbles": 0.1, "waits_for": {EVIL: 0.4}}
    results = {"success": RATE, "success_before": RATE, "tasks": {EVIL: RATE, "b": RATE}, "tasks_before": {EVIL: RATE}}
    results |= {"roles": {EVIL: usage}, "notes": [EVIL, "\ud800"], "imagination": {"paused": EVIL}, "env_steps": 9}
    (home / "results.json").write_text(json.dumps(results))
    (home / "environment.json").write_text(json.dumps({"versions": {EVIL: EVIL}, "argv": [EVIL], "gpus": EVIL}))
    trace = json.loads((home / "trace.json").read_text())
    for event in trace["traceEvents"]:
        event.setdefault("args", {})["name"] = EVIL
        if event.get("cat") == "work":
            event["name"] = EVIL
    (home / "trace.json").write_text(json.dumps(trace))
    (home / "videos" / f"step_9{EVIL.replace('/', '')}_ep{EVIL.replace('/', '')}_a.mp4").write_bytes(b"0")
    (home / "imagined").mkdir()
    (home / "imagined" / "update_x.png").write_bytes(b"0")
    lines = [{"step": n, "time/step": 1.0, "world_model/updates": n, EVIL: 1.0, "loss/total": EVIL} for n in range(5)]
    (home / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    made(home, "--output", tmp_path / "report.html")
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert page.count("script") == page.count("img") == 0
    assert {name for _, attributes in page.elements for name in attributes if name.startswith("on")} == set()
    assert page.text.count("alert(2)") > 12
    card = model_card.render_card(read_report_data(home), 4, "title")
    assert "<script" not in card and "<img" not in card


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("results.json", "[1]", r"results\.json holds a list, a JSON object is expected"),
        ("results.json", '{"success": ', r"results\.json: it is not JSON: .*ends too early"),
        ("results.json", {"success": 0.5}, "'success' is float 0.5, a JSON object is expected"),
        ("results.json", {"success": {**RATE, "low": "0"}}, "success: 'low' is str '0', a number is expected"),
        ("results.json", {"success": {**RATE, "n": "<b>"}}, "success: 'n' is str '<b>', a whole number"),
        ("results.json", {"tasks": [RATE]}, "'tasks' is a list, a JSON object is expected"),
        ("results.json", {"tasks": {"a": {}}}, "tasks: a: 'rate' is missing"),
        ("results.json", {"roles": {"sim": {"workers": 1}}}, "roles: sim: 'busy' is missing"),
        ("results.json", {"roles": ["sim"]}, "'roles' is a list, a JSON object"),
        ("results.json", {"env_steps": -1}, "'env_steps' is int -1, a whole number from 0 on"),
        ("results.json", {"wall_seconds": float("inf")}, "'wall_seconds' is float inf, a number from 0 on"),
        ("results.json", {"notes": 3}, "'notes' is not a list"),
        ("results.json", {"missing": 3}, "'missing' is int 3, a list"),
        ("results.json", {"checkpoint": "acme/vla"}, "'checkpoint' is str 'acme/vla', a JSON object"),
        ("results.json", {"checkpoint": {"keys": {"model.gripper": 1}}}, "keys: 'model.gripper' is int 1"),
        ("environment.json", "3", r"environment\.json holds int 3, a JSON object"),
        ("trace.json", {"traceEvents": 3}, "'traceEvents' is not a list"),
    ],
)
def test_files_that_no_run_writes_are_named(tmp_path, file, content, message):
    parse_spec(SPEC).dump(tmp_path / "spec.yaml")
    (tmp_path / file).write_text(content if isinstance(content, str) else json.dumps(content))
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 2 and re.search(message, result.output.replace("\n", " ")), result.output


def test_metrics_and_calls_that_no_run_writes_are_left_out(folder, tmp_path):
    home = tmp_path / "run"
    shutil.copytree(folder, home, symlinks=True)
    whole = read_report_data(home)
    odd = [3, {"step": -1}, {"step": "1"}, {"step": 2.5}, {"step": 1, "eval/success_rate": 0.5}, {"step": 10**40}]
    with (home / "metrics.jsonl").open("ab") as lines:
        lines.write(
            "".join(json.dumps(line) + "\n" for line in odd).encode() + b'\xff\xfe\n{"step": 9, "loss/total": NaN}\n'
        )
    trace = json.loads((home / "trace.json").read_text())
    last = dict(trace["traceEvents"][-1])
    trace["traceEvents"] += [3, {}, {"ph": "X"}, {**last, "ts": "1"}, {**last, "tid": [1]}, {**last, "tid": 77}]
    (home / "trace.json").write_text(json.dumps(trace))
    (home / "spec.yaml").write_text("name: odd\ntrain: [1]\nmodel: 3\n")
    again = read_report_data(home)
    assert again.steps == whole.steps and again.evaluations == whole.evaluations
    made(home)
    page = Page((home / "report.html").read_text())
    assert "? on ? (? envs) with ?" in page.text and page.count("rect", "learner") == 2


def test_success_of_tasks_is_next_to_what_it_was_before(tmp_path):
    parse_spec(SPEC).dump(tmp_path / "spec.yaml")
    before, after = ({"rate": rate, "low": 0.0, "high": 1.0, "n": 9} for rate in (0.125, 0.75))
    results = {"success": after, "success_before": before, "tasks": {"left": after, "right": after}}
    (tmp_path / "results.json").write_text(json.dumps({**results, "tasks_before": {"left": before}}))
    made(tmp_path)
    text = " ".join(Page((tmp_path / "report.html").read_text()).text.split())
    assert "task before after" in text
    assert "all 12.5 % 75.0 %" in text and "left 12.5 % 75.0 %" in text and "right 75.0 %" in text
    assert "before training after training lines: 95 % Wilson intervals" in text


def test_keys_of_a_known_checkpoint_stand_with_their_sources(tmp_path):
    parse_spec(SPEC).dump(tmp_path / "spec.yaml")
    keys = {
        "model.gripper": {"value": "rlds", "source": "https://example.org/eval.py#L3"},
        "rollout.chunk": {"value": 4, "known": 8, "source": EVIL},
    }
    (tmp_path / "results.json").write_text(json.dumps({"checkpoint": {"name": "acme/vla", "keys": keys}}))
    made(tmp_path)
    page = Page((tmp_path / "report.html").read_text())
    text = " ".join(page.text.split())
    assert 'Keys that go with acme/vla key value source model.gripper "rlds" https://example.org/eval.py#L3' in text
    assert "rollout.chunk 4, known as 8" in text
    assert page.count("script") == page.count("img") == 0


def bars(text):
    """(task, [(class, width in per cent) of each of its bars]) of the page's table of tasks."""
    rows = re.findall(r"<tr><td>([^<]*)</td>(.*?)</tr>", re.search(r'<table class="success.*?</table>', text)[0])
    return {
        task: [
            (css, float(width)) for css, width in re.findall(r'class="rate (\w+)".*?<b style="width:([\d.]+)%"', row)
        ]
        for task, row in rows
    }


def test_bars_show_each_task_before_and_after_training(folder, tmp_path):
    made(folder)
    results = json.loads((folder / "results.json").read_text())
    drawn = bars((folder / "report.html").read_text())
    assert list(drawn) == ["all", *results["tasks"]] and len(drawn) > 2
    for task in results["tasks"]:
        before, after = results["tasks_before"][task]["rate"], results["tasks"][task]["rate"]
        assert drawn[task] == [("before", pytest.approx(100 * before)), ("after", pytest.approx(100 * after))]
    alone = {name: value for name, value in results.items() if name not in ("success_before", "tasks_before")}
    (tmp_path / "spec.yaml").write_bytes((folder / "spec.yaml").read_bytes())
    (tmp_path / "results.json").write_text(json.dumps(alone))
    made(tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert [css for row in bars(text).values() for css, _ in row] == ["after"] * len(drawn)
    assert "before training" not in Page(text).text


def test_a_folder_without_a_run(tmp_path):
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 2
    assert "it has no spec.yaml" in result.output


def test_a_resumed_run_counts_each_step_once(tmp_path):
    parse_spec(SPEC).dump(tmp_path / "spec.yaml")
    lines = [
        {"step": s, "time/step": t, "env/success_rate": 0.25, "rollout/episodes": 16}
        for s, t in ((1, 1), (2, 1), (2, 5))
    ]
    lines.append(
        {"step": 2, "eval/success_rate": 0.5, "eval/success_low": 0.3, "eval/success_high": 0.7, "eval/episodes": 8}
    )
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = read_report_data(tmp_path)
    assert found.metric_series("time/step") == [(1, 1), (2, 5)]
    assert [p.n for p in found.evaluations] == [8]
    first = found.rollout_points[0]
    assert (first.low, first.high) == pytest.approx((0.1018, 0.4950), abs=1e-3), "Wilson, 4 of 16"


def test_axes():
    assert axis_ticks(0.0, 1.0, 5) == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert axis_ticks(13, 13, 3)
    assert axis_ticks(0.417, 0.485, 3) == pytest.approx([0.42, 0.44, 0.46, 0.48]), "0.45 alone gives no scale"
    assert [format_number(v) for v in (0, 0.00031, 1234.5, 1e6, -0.5)] == ["0", "3e-4", "1,234", "1e6", "-0.5"]
    many = [Point(step=i, rate=0.5, low=0.4, high=0.6, n=9) for i in range(5000)]
    line = re.search(r'class="line" d="([^"]*)"', success_chart(many, [], 4999, SCREEN))
    assert line is not None
    assert line[1].count("L") == MAX_POINTS - 1


def test_the_timeline_draws_the_last_iteration_and_a_close_look():
    def slice_(pid, tid, category, name, start, length, **args):
        return {
            "ph": "X",
            "pid": pid,
            "tid": tid,
            "cat": category,
            "name": name,
            "ts": start,
            "dur": length,
            "args": args,
        }

    names = [
        {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}}
        for pid, tid, role in ((1, 1, "sim"), (2, 2, "policy"), (3, 3, "learner"))
        for kind, name in (("process_name", f"worker {pid - 1}"), ("thread_name", role))
    ]
    work = [
        event
        for i in range(20)
        for event in (
            slice_(2, 2, "work", "act", 1000 * i, 400, lane=[0]),
            slice_(1, 1, "work", "step", 1000 * i + 500, 400, lane=0),
        )
    ]
    spans = [slice_(0, 4, "iteration", "training 1", -9e4, 9e4), slice_(0, 4, "iteration", "training 2", 0, 2e4)]
    (whole_title, whole), (near_title, near) = draw_timelines({"traceEvents": [*names, *spans, *work]})
    assert whole_title.startswith("Step 2")
    assert near_title == "The begin of its rollout, 8 ms"
    assert (whole.count('class="policy lane0"'), near.count('class="policy lane0"')) == (2 * 20, 2 * 9)
    assert "worker 0: sim" in whole
    assert "worker 2" not in whole, "it did nothing"
    assert draw_timelines({}) == []

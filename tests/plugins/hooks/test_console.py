from __future__ import annotations

import io
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from rich.console import Console

from vla_rl.core.types import Episode
from vla_rl.plugins.hooks.console import plugin
from vla_rl.plugins.hooks.console.config import ConsoleConfig
from vla_rl.plugins.hooks.console.screen import Screen
from vla_rl.plugins.hooks.console.status import Status, format_duration, rate_style
from vla_rl.testing.events import METRICS, a_run, an_evaluation

RATE = {"rate": 0.95, "n": 200, "low": 0.91, "high": 0.97}
RESULTS: dict[str, Any] = {
    "success": RATE,
    "success_before": {"rate": 0.5, "n": 200, "low": 0.43, "high": 0.57},
    "tasks": {"reach": RATE, "push [x]": RATE},
    "tasks_before": {"reach": {"rate": 0.25, "n": 100, "low": 0.18, "high": 0.34}},
    "wall_seconds": 187.2,
}


def play(hook: Any, folder: Path, results: dict[str, Any]) -> None:
    run = a_run(folder)
    hook.on_run_start(run=run)
    hook.on_eval_end(step=0, evaluation=an_evaluation(0))
    for phase in ("rollout", "update"):
        hook.on_progress(phase=phase, done=3, total=4)
    hook.on_update_end(step=1, metrics=METRICS)
    hook.on_fault(step=1, message="sim worker 2 [gpu] died")
    hook.on_checkpoint(run=run, folder=folder / "checkpoints" / "step_000001")
    hook.on_run_end(run=run, results=results)


def test_a_log_file_gets_one_line_for_each_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    play(plugin.build(ConsoleConfig()), tmp_path, RESULTS)
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if line.startswith("step 1/10"))
    assert "success 75.0 % [63.2, 84.0] n=64" in line  # Wilson, 48 of 64
    assert "1,234 env steps/s, env 25% policy 50% learner 25%" in line
    assert "kl 0.0045" in line
    assert "\x1b" not in out
    assert "fault at step 1: sim worker 2 [gpu] died" in out
    assert "checkpoint checkpoints/step_000001" in out
    all_tasks = next(line for line in out.splitlines() if line.startswith("all"))
    assert all_tasks.split()[:5] == ["all", "50.0", "%", "95.0", "%"]
    reach, push = (next(line for line in out.splitlines() if line.startswith(name)) for name in ("reach", "push"))
    assert reach.split()[:5] == ["reach", "25.0", "%", "95.0", "%"] and push.startswith("push [x]")
    assert push.split()[2:4] == ["95.0", "%"]
    assert "3:07" in out


@pytest.mark.parametrize(
    ("step", "split"),
    [
        (4.0, "env 25% policy 50% learner 25%,"),
        (16.0, "env 6% policy 12% learner 6% messages 75%,"),  # a slow network
        (2.0, "env 25% policy 50% learner 25%,"),  # roles that work at the same time
    ],
)
def test_the_time_of_messages_has_its_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], step: float, split: str
) -> None:
    hook: Any = plugin.build(ConsoleConfig(mode="plain"))
    hook.on_run_start(run=a_run(tmp_path))
    hook.on_update_end(step=1, metrics={**METRICS, "time/step": step})
    assert split in capsys.readouterr().out


def test_the_table_of_roles_fits_into_a_narrow_terminal(tmp_path: Path) -> None:
    waits = {"sim": 0.2, "policy": 0.31, "learner": 0.12, "messages": 0.1}
    usage = {"workers": 2, "busy": 0.123, "waits_for": waits, "bubbles": 0.07}
    roles = dict.fromkeys(("sim", "policy", "learner"), usage)
    sink = io.StringIO()
    hook: Any = Screen(ConsoleConfig(mode="plain"), Console(file=sink, width=60))
    hook.on_run_end(run=a_run(tmp_path), results={**RESULTS, "roles": roles})
    assert "…" not in sink.getvalue()
    for name, share in (("busy", "12.3"), ("waits: messages", "10.0"), ("bubbles", "7.0")):
        (line,) = [line for line in lines_of(sink) if line.startswith(name)]
        assert line.split()[-6:] == [share, "%"] * 3


def test_a_run_whose_rollouts_are_ahead_says_how_far(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hook = plugin.build(ConsoleConfig())
    hook.on_run_start(run=a_run(tmp_path))
    ahead = {"rollout/ready_tickets": 12.0, "rollout/running_tickets": 1064.0, "time/step": 4.0, "time/rollout": 1.0}
    hook.on_update_end(step=1, metrics={**METRICS, **ahead, "policy/lag_mean": 0.8, "policy/lag_max": 1.0})
    out = capsys.readouterr().out
    assert "policy lag 0.8 (most 1), ready 12, running 1,064, learner waited 25%" in out


def test_a_terminal_gets_a_panel_that_goes_away_at_the_end(tmp_path: Path) -> None:
    sink = io.StringIO()
    console = Console(file=sink, force_terminal=True, width=100, height=30)
    hook: Any = Screen(ConsoleConfig(mode="live"), console)
    run = a_run(tmp_path)
    hook.on_run_start(run=run)
    hook.on_update_end(step=4, metrics=METRICS)
    hook.on_progress(phase="rollout", done=3, total=4)
    hook._live.refresh()
    screen = sink.getvalue()
    for piece in ("4 of 10", "3 of 4", "rollout", "75.0 %", "1,234 env steps/s", "to go"):
        assert piece in screen
    hook.on_run_end(run=run, results=RESULTS)
    assert hook._live is None
    assert sink.getvalue().rstrip().endswith("\x1b[0m")
    assert "\x1b[?25h" in sink.getvalue()  # the cursor is back


def test_a_run_without_evaluation_has_a_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hook: Any = plugin.build(ConsoleConfig(mode="plain"))
    run = a_run(tmp_path)
    hook.on_run_start(run=run)
    hook.on_update_end(step=1, metrics={"loss/total": 1.0})
    hook.on_run_end(run=run, results={})
    out = capsys.readouterr().out
    assert "step 1/10" in out and "demo finished" in out and "before" not in out


def test_long_names_of_tasks_leave_their_figures_on_a_narrow_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    long = "pick_up_the_black_bowl_between_the_plate_and_the_ramekin_and_place_it_on_the_plate"
    play(plugin.build(ConsoleConfig()), tmp_path, {**RESULTS, "tasks": {long: RATE, "reach": RATE}})
    lines = capsys.readouterr().out.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("pick_up"))
    assert lines[first].split()[1:] == ["95.0", "%", "91.0", "to", "97.0", "200"]
    last = next(i for i, line in enumerate(lines) if line.startswith("reach"))
    assert "".join(line.split()[0] for line in lines[first:last]) == long
    assert max(map(len, lines[first:last])) <= 80


def test_the_name_of_an_only_task_is_not_shown_and_takes_no_room(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    only = {**RESULTS, "tasks": {"pick_up_the_black_bowl_on_the_cookie_box": RATE}}
    play(plugin.build(ConsoleConfig()), tmp_path, only)
    out = capsys.readouterr().out
    assert "pick_up" not in out
    assert "━" in next(line for line in out.splitlines() if line.startswith("all"))


def test_time_to_go_follows_the_pace_and_leaves_the_first_evaluation_out(tmp_path: Path) -> None:
    now = [0.0]
    status = Status(a_run(tmp_path, steps=10), now=lambda: now[0])
    assert status.remaining_s is None
    now[0] = 100.0
    status.note_evaluation(an_evaluation(0))
    now[0] = 104.0
    status.note_update(1, METRICS)
    assert status.remaining_s == pytest.approx(36.0)
    now[0] = 106.0
    assert status.remaining_s == pytest.approx(34.0)
    assert status.elapsed_s == 106.0


def test_the_warm_up_has_a_line_and_no_part_in_the_pace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hook: Any = plugin.build(ConsoleConfig(mode="plain"))
    hook.on_run_start(run=a_run(tmp_path))
    metrics = {
        "bc_warmup/samples": 1200.0,
        "bc_warmup/expert_success": 0.96,
        "bc_warmup/loss": 0.4321,
        "time/bc_warmup": 12.2,
    }
    hook.on_update_end(step=0, metrics=metrics)
    assert "warm-up: loss 0.432 on 1,200 samples, of an expert with success 96%, 12 s" in capsys.readouterr().out
    status = Status(a_run(tmp_path))
    status.note_update(0, metrics)
    assert status.remaining_s is None


@pytest.mark.parametrize(("seconds", "text"), [(None, "-"), (5, "0:05"), (65.4, "1:05"), (3725, "1:02:05")])
def test_clock(seconds: float | None, text: str) -> None:
    assert format_duration(seconds) == text


def lines_of(sink: io.StringIO) -> list[str]:
    return sink.getvalue().splitlines()


def test_a_long_phase_says_how_far_it_is_at_intervals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, sink = [0.0], io.StringIO()
    monkeypatch.setattr("vla_rl.plugins.hooks.console.screen.Status", partial(Status, now=lambda: now[0]))
    hook: Any = Screen(ConsoleConfig(mode="plain", every_s=30.0), Console(file=sink, width=200))
    hook.on_run_start(run=a_run(tmp_path))
    hook.on_update_end(step=2, metrics=METRICS)
    before = len(lines_of(sink))
    hook.on_progress(phase="rollout", done=0, total=0)
    for now[0], done in ((29.0, 30), (30.0, 48), (31.0, 50), (90.0, 96)):
        hook.on_progress(phase="rollout", done=done, total=128)
    hook.on_progress(phase="update", done=0, total=0)
    now[0] = 155.0
    hook.on_progress(phase="update", done=0, total=0)
    assert lines_of(sink)[before:] == [
        "step 3 rollout: 48 of 128 chunk steps, 0:30",
        "step 3 rollout: 96 of 128 chunk steps, 1:30",
        "step 3 update: 1:05",
    ]


def test_the_first_line_names_the_devices(tmp_path: Path) -> None:
    sink = io.StringIO()
    hook: Any = Screen(ConsoleConfig(mode="plain"), Console(file=sink, width=200))
    hook.on_run_start(run=evolve(a_run(tmp_path), devices="sim cpu x2, policy cuda:0, learner cuda:0 (NVIDIA H200)"))
    assert lines_of(sink)[0] == "devices: sim cpu x2, policy cuda:0, learner cuda:0 (NVIDIA H200)"


@pytest.mark.parametrize(
    ("rate", "before", "style"),
    [
        (0.0, None, "bold"),
        (0.1, None, "bold green"),
        (0.0, 0.0, "bold"),
        (0.4, 0.3, "bold green"),
        (0.3, 0.4, "bold red"),
        (0.0, 0.4, "bold red"),
    ],
)
def test_only_what_is_better_is_green(rate: float, before: float | None, style: str) -> None:
    assert rate_style(rate, before) == style


def test_an_evaluation_without_success_is_not_green(tmp_path: Path) -> None:
    sink = io.StringIO()
    hook: Any = Screen(ConsoleConfig(mode="plain"), Console(file=sink, force_terminal=True, highlight=False))
    hook.on_run_start(run=a_run(tmp_path))
    hook.on_eval_end(step=0, evaluation=an_evaluation(0, successes=0))
    assert "0.0 %" in sink.getvalue() and "\x1b[1;32m" not in sink.getvalue()
    hook.on_eval_end(step=1, evaluation=an_evaluation(1, successes=9))
    assert "\x1b[1;32m" in sink.getvalue()


def test_late_actions_of_an_evaluation_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hook: Any = plugin.build(ConsoleConfig(mode="plain"))
    hook.on_run_start(run=a_run(tmp_path))
    episode = Episode(
        number=0, episode=0, task="reach", state=0, steps=4, total_reward=1.0, success_once=True, success_at_end=True, truncated=False
    )  # fmt: skip
    for late in (0, 3):
        episodes = (evolve(episode, late_actions=late),)
        hook.on_eval_end(step=0, evaluation=evolve(an_evaluation(0), episodes=episodes))
    in_time, too_late = capsys.readouterr().out.strip().splitlines()[-2:]
    assert "late" not in in_time
    assert too_late.endswith("; 75% of actions late")


@pytest.mark.parametrize("mode", ["plain", "live"])
def test_metrics_of_an_algorithm_are_shown_where_they_are_asked_for(tmp_path: Path, mode: Any) -> None:
    out = io.StringIO()
    config = ConsoleConfig(mode=mode, metrics=("mine/*", "policy/magin", "policy/margin"))
    screen = Screen(config, Console(file=out, width=120, force_terminal=mode == "live"))
    screen.on_run_start(run=a_run(tmp_path))
    for step in (1, 2):
        screen.on_update_end(step=step, metrics={**METRICS, "mine/far": 12.5, "mine/near": 0.25, "policy/margin": 3.0})
    if screen._live is not None:
        screen._live.refresh()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert re.search(r"mine/far 12.5,? +mine/near 0.25,? +policy/margin 3", text)
    assert text.count("console: no metric is called 'policy/magin'; did you mean 'policy/margin'?") == 1
    screen.on_close()

"""The command line as a user meets it: in another process."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vla_rl import check_env
from vla_rl.cli.console import report_errors
from vla_rl.cli.main import app, main
from vla_rl.core.errors import PluginError, UserError

SPEC = """
name: toy
model: {type: openvla_oft, preset: tiny}
env: {type: tabletop, num_envs: 8}
rollout: {chunk: 4, episodes: 8, group_size: 8}
algorithm: {type: grpo}
train: {steps: 1, lr: 1e-4, micro_batch: 8}
"""


@pytest.fixture
def vla_rl(fork_server):
    """Run a command in another process; -> its status and output."""
    return partial(fork_server.run_python, "-m", "vla_rl.cli.main", timeout=60)


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    file = tmp_path / "spec.yaml"
    file.write_text(SPEC)
    return file


def test_the_installed_script_names_every_command():
    script = Path(sys.executable).with_name("vla-rl")
    result = subprocess.run([script, "--help"], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0
    for command in ("run", "check", "eval", "check-env", "plugins", "new-plugin", "doctor"):
        assert f"  {command} " in result.stdout


def test_check_says_ok(spec, vla_rl):
    result = vla_rl("check", str(spec), "train.steps=7")
    assert result.stderr == ""
    assert "ok: openvla_oft on tabletop (8 envs) with grpo, 7 steps, collocated on ray" in result.stdout


def test_check_shows_the_resolved_spec(spec, tmp_path, vla_rl):
    result = vla_rl("check", str(spec), "--show")
    shown = tmp_path / "shown.yaml"
    shown.write_text(result.stdout)
    assert "deadline_s: 600.0" in result.stdout
    assert vla_rl("check", str(shown)).returncode == 0


def test_a_wrong_spec_is_a_message_and_no_traceback(spec, vla_rl):
    result = vla_rl("check", str(spec), "train.lrr=3", "rollout.episodes=7")
    assert result.returncode == 2
    assert "override: train.lrr: unknown key; did you mean 'lr'?" in result.stderr
    assert "rollout.group_size: 8 does not divide rollout.episodes 7" in result.stderr
    assert "Traceback" not in result.stderr
    assert "Traceback" in vla_rl("check", str(spec), "train.lrr=3", "--debug").stderr


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["rollout.group_size=1"],
            "algorithm 'grpo' compares trajectories of a group: it needs rollout.group_size >= 2",
        ),
        (["train.value_lr=0.1"], "train.value_lr: 0.1 is for a critic, and algorithm 'grpo' has none"),
        (
            ["train.critic_warmup_steps=2"],
            "train.critic_warmup_steps: 2 is for a critic, and algorithm 'grpo' has none",
        ),
        (["algorithm={type: srpo, encoder: /nowhere}"], "algorithm.encoder: '/nowhere' is neither a folder"),
        (["algorithm={type: ppo, huber_delta: .inf}"], "huber_delta: expected a finite number, got inf"),
        (["rollout.reward_coef=.nan"], "rollout.reward_coef: expected a finite number, got nan"),
    ],
)
def test_check_tells_what_a_run_would_refuse(spec, overrides, message, vla_rl):
    result = vla_rl("check", str(spec), *overrides)
    assert result.returncode == 2
    assert message in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize("command", ["run", "check", "eval"])
def test_a_missing_file_is_a_message(command, vla_rl):
    result = vla_rl(command, "nowhere")
    assert result.returncode == 2
    assert "nowhere" in result.stderr
    assert "Traceback" not in result.stderr


def test_plugins_as_json(vla_rl):
    rows = json.loads(vla_rl("plugins", "--json").stdout)
    (tabletop,) = [row for row in rows if row["name"] == "tabletop"]
    assert tabletop["kind"] == "env"
    assert tabletop["dist"] == "vla-rl"
    assert tabletop["ready"] is True


def test_version():
    from vla_rl import __version__

    assert CliRunner().invoke(app, ["--version"]).output == f"{__version__}\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [(PluginError("no"), 2), (KeyboardInterrupt(), 130), (type("Stop", (UserError,), {"exit_code": 7})(), 7)],
)
def test_exit_codes(error, code):
    import typer

    @report_errors
    def command() -> None:
        raise error

    with pytest.raises(typer.Exit) as caught:
        command()
    assert caught.value.exit_code == code


def test_a_bug_is_not_hidden():
    @report_errors
    def command() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        command()


def test_check_env_prints_a_table():
    result = CliRunner().invoke(app, ["check-env", "tabletop", "image_size=32", "--num-envs", "3"])
    assert result.exit_code == 0, result.output
    assert "tabletop: 3 envs, chunks of 4, cpu" in result.output and "keeps to the contract" in result.output
    for section in ("reset_states", "determinism", "envs apart", "expert"):
        assert f"✓   {section}" in result.output


def test_check_env_shows_progress_where_it_takes_long(monkeypatch):
    from vla_rl.cli import check_env

    said, until = io.StringIO(), time.monotonic() + 60
    monkeypatch.setattr(sys, "stderr", said)
    monkeypatch.setattr(check_env, "FIRST_S", 2.0)
    with check_env.show_progress("check-env slow") as on_section:
        on_section("states")
        while not said.getvalue() and time.monotonic() < until:
            time.sleep(0.01)
    assert said.getvalue() == "check-env slow: states\n", "the next line comes half a minute later"
    monkeypatch.setattr(check_env, "FIRST_S", 60.0)
    with check_env.show_progress("check-env quick") as on_section:
        on_section("states")
    assert said.getvalue() == "check-env slow: states\n"


def test_check_env_reports_what_it_found():
    double = ["scripted", "fault=nan", "--plugin", "vla_rl.testing.scripted"]
    result = CliRunner().invoke(app, ["check-env", *double])
    assert result.exit_code == 1
    assert "✗   first reset" in result.output
    assert "expected finite numbers, got NaN or inf in 2 of 2 envs" in " ".join(result.output.split())


def test_another_interpreter_finds_the_same(capfd):
    double = {"overrides": ["fault=nan"], "plugins": ["vla_rl.testing.scripted"], "seconds": 0.0}
    here = check_env("scripted", **double)
    double["overrides"].append(f"python={sys.executable}")
    there = check_env("scripted", **double)
    assert [(s.name, s.findings) for s in there.sections] == [(s.name, s.findings) for s in here.sections]
    with pytest.raises(UserError, match="there is no device 'banana'"):
        check_env("scripted", **double, device="banana")
    assert "Traceback" not in capfd.readouterr().err


def test_check_env_says_what_it_did_not_see():
    result = CliRunner().invoke(app, ["check-env", "scripted", "--plugin", "vla_rl.testing.scripted"])
    assert result.exit_code == 0
    assert "not seen: an effect of number 1 of an action" in result.output
    assert "keeps to the contract; 1 not seen" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tabletopp"], "did you mean 'tabletop'?"),
        (["tabletop", "image_siz=32"], "image_siz: unknown key; did you mean 'image_size'?"),
        (["tabletop", "image_size"], "'env.image_size' is not of the form path=value"),
    ],
)
def test_check_env_with_wrong_settings(arguments, message, vla_rl):
    result = vla_rl("check-env", *arguments)
    assert result.returncode == 2 and message in result.stderr


def test_check_env_names_the_plugin_and_its_keys_where_some_are_missing(vla_rl):
    result = vla_rl("check-env", "gymnasium", "id=Pendulum-v1")
    assert result.returncode == 2
    assert result.stderr.startswith("env 'gymnasium' cannot be set up:\n  instruction: required, but missing\n")
    assert "  instruction: str, required\n    Instruction that the policy gets.\n" in result.stderr
    assert "  train_states: int, default 200\n    Number of initial states (seeds) in the train split" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_checkpoint_for_another_robot_is_refused_with_both_numbers(spec, vla_rl):
    result = vla_rl("check", str(spec), "model={type: openvla_oft, checkpoint: builtin:tabletop}", "env.type=libero",
                    "env.suite=libero_goal")  # fmt: skip
    assert result.returncode == 2
    assert "its actions have 3 numbers, and those of env 'libero' have 7" in result.stderr


@pytest.mark.parametrize(("encoding", "printed"), [("ascii", "✓ ü".encode() + b"\xff"), ("latin-1", b"? \xfc?")])
def test_letters_that_a_terminal_cannot_show_end_no_command(monkeypatch, encoding, printed):
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding=encoding))
    monkeypatch.setattr(sys, "argv", ["vla-rl", "--version"])
    monkeypatch.setattr("vla_rl.version.__version__", "✓ ü\udcff")
    with pytest.raises(SystemExit):
        main()
    sys.stdout.flush()
    assert out.getvalue() == printed + b"\n"

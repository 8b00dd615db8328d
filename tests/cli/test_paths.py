"""Paths that commands are given: tried before the first episode, and what is wrong with one is said in a sentence."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from typer.testing import CliRunner

import vla_rl
from vla_rl.cli.main import app
from vla_rl.core.paths import check_file, check_folder, path_error, read_text, write_whole

SPEC: dict[str, Any] = {
    "name": "paths",
    "plugins": ["vla_rl.testing.scripted"],
    "model": {"type": "linear"},
    "env": {"type": "tabletop", "num_envs": 2, "image_size": 16, "tasks": ["pick_red"]},
    "rollout": {"chunk": 4, "episodes": 4, "group_size": 2, "max_steps": 4},
    "algorithm": {"type": "grpo", "filter_identical": False},
    "runtime": {"backend": "local"},
    "train": {"steps": 1, "lr": 1e-1, "micro_batch": 32},
    "eval": {"before": False, "episodes_per_task": 2},
    "hooks": [],
}
LONG = "x" * 300


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vla_rl.run(SPEC, tmp_path_factory.mktemp("paths") / "run").folder


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("kept")
    Path("full").mkdir()
    Path("full", "other").touch()
    return tmp_path


def said_by(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit), result.exception
    return " ".join(result.output.split())


@pytest.fixture
def no_play(monkeypatch: pytest.MonkeyPatch) -> None:
    def played(*_: object, **__: object) -> None:
        raise AssertionError("an episode was played before the output was tried")

    monkeypatch.setattr("vla_rl.cli.evaluate.evaluate", played)


@pytest.mark.usefixtures("no_play")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--output", "nowhere/x.json"], "--output nowhere/x.json cannot be written: there is no folder nowhere; make it"),
        (["--output", "full"], "--output full cannot be used: it is a folder and not a file"),
        (["--output", "file/x.json"], "--output file/x.json cannot be used: a part of it is a file and not a folder"),
        (["--output", LONG], "cannot be used: a name in it is too long"),
        (["--output", "a\0b"], "embedded null"),  # in the words of the Python version
        (["--record", "/proc/x"], "--record /proc/x cannot be used: there is no such file or folder"),
        (["--record", "file"], "--record file cannot be used: it is a file and not a folder"),
        (["--benchmark", "tabletop", "--folder", "/proc/x"], "--folder /proc/x cannot be used: there is no such file"),
        (["--benchmark", "tabletop", "--folder", "file"], "--folder file cannot be used: it is a file and not a folder"),
    ],
)  # fmt: skip
def test_an_output_is_tried_before_the_first_episode(run, options, message):
    assert message in said_by("eval", run, *options)
    assert Path("file").read_text() == "kept" and [file.name for file in Path("full").iterdir()] == ["other"]


@pytest.mark.usefixtures("no_play")
def test_a_file_in_the_way_of_a_suites_result_stays(run):
    Path("full", "pick.json").write_text("{")
    said = said_by("eval", run, "--benchmark", "tabletop", "--folder", "full")
    assert "full/pick.json is not a suite's result, and one would replace it" in said


@pytest.mark.parametrize("device", ["/dev/full"])
def test_a_result_that_cannot_be_written_is_printed(run, device):
    result = CliRunner().invoke(app, ["eval", str(run), "--output", device])
    assert result.exit_code == 2
    text, _, rest = result.stdout.partition("\n}\n")
    assert json.loads(text + "\n}")["success"]["n"] == 2 and "all" in rest
    assert "/dev/full cannot be used: its disk is full" in result.stderr and "printed above" in result.stderr


def test_episodes_that_cannot_be_recorded_leave_their_result(run, monkeypatch):
    pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install -e '.[data]'")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("vla_rl.toolkit.data.lerobot._write_table", full)
    result = CliRunner().invoke(app, ["eval", str(run), "--record", "set", "--output", "kept.json"])
    assert result.exit_code == 2 and "n=2" in result.stdout
    assert json.loads(Path("kept.json").read_text())["success"]["n"] == 2
    assert "the episodes ran, but not recorded: its disk is full" in result.stderr


def test_an_export_that_meets_a_full_disk_leaves_nothing_half(run, monkeypatch):
    def full(source: str, target: str) -> None:
        Path(target).write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device", source, None, target)

    monkeypatch.setattr("shutil.copy2", full)
    result = CliRunner().invoke(app, ["export", str(run), "--to", "given"])
    assert result.exit_code == 2 and "--to given cannot be used: its disk is full" in result.stderr
    assert not Path("given").exists()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["export", "RUN", "--to", "/proc/x"], "--to /proc/x cannot be used"),
        (["export", "RUN", "--to", "file/x"], "--to file/x cannot be used"),
        (["export", "RUN", "--to", LONG], "cannot be used: a name in it is too long"),
        (["export", LONG, "--to", "x"], "RUN|CHECKPOINT xxx"),
        (["report", "RUN", "--output", "nowhere/x.html"], "there is no folder nowhere"),
        (["report", "RUN", "--output", "full"], "--output full cannot be used: it is a folder and not a file"),
        (["report", "RUN", "--output", "/dev/full"], "--output /dev/full cannot be used: its disk is full"),
        (["report", LONG], "a name in it is too long"),
        (["eval", LONG], "a name in it is too long"),
        (["serve", LONG], "a name in it is too long"),
        (["compare", LONG, LONG], "FIRST xxx"),
        (["plan", "RUN", "--profile", LONG], "--profile xxx"),
        (["new-plugin", "env", "shelf", "/proc/x/y"], "FOLDER /proc/x/y cannot be used"),
        (["new-plugin", "env", "shelf", "file/y"], "FOLDER file/y cannot be used"),
        (["report", "RUN", "--output", "loop"], "--output loop cannot be used: its links lead to each other"),
        (["eval", "RUN", "--output", "loop"], "--output loop cannot be used: its links lead to each other"),
        (["eval", "loop"], "loop cannot be used: its links lead to each other"),
        (["eval", "RUN", "--benchmark", "text"], "text:1: expected a mapping with keys of (title, env"),
        (["eval", "RUN", "--benchmark", "binary"], "binary: is not UTF-8 text"),
        (["eval", "RUN", "--benchmark", "/dev/zero"], "no benchmark '/dev/zero'"),
        (["compare", "/dev/zero", "text"], "/dev/zero is not an evaluation"),
        (["plan", "RUN", "--profile", "text"], "text is not JSON"),
        (["plan", "RUN", "--profile", "trace"], "trace is not a run's trace (TypeError"),
        (["check", "RUN", "plugins=[~no-such-user/a.py]"], "no file"),
        (["check", "RUN", 'plugins=["a\\0b.py"]'], "which has a NUL byte in it"),
        (["check", "RUN", "hooks=[{type: lerobot, folder: /proc/x}]"], "hooks.0.folder: the data set's folder /proc/x"),
    ],
)
def test_no_path_is_a_traceback(run, monkeypatch, command, message):
    monkeypatch.setattr("vla_rl.cli.benchmark.paired.LONGEST_RESULT", 1000)  # else a device without an end takes long
    Path("loop").symlink_to("loop")
    Path("text").write_text("just text")
    Path("binary").write_bytes(b"\xff\xfe")
    Path("trace").write_text('{"traceEvents": 1}')
    assert message in said_by(*(run if word == "RUN" else word for word in command))


def test_closed_streams_cause_no_traceback_and_no_file_gets_their_number(tmp_path):
    code = (
        "from vla_rl.cli import console, main\n"
        "console.open_closed_streams()\n"
        "with open('new', 'w') as file:\n"
        "    print(file.fileno(), file=file)\n"
        "main.main()"
    )
    command = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-c", code, "examples"]
    closed = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True)
    assert (closed.returncode, closed.stderr) == (0, b"")
    assert int((tmp_path / "new").read_text()) > 2


def test_python_says_the_same(run):
    with pytest.raises(vla_rl.UserError, match="what xxx.* cannot be used: a name in it is too long"):
        vla_rl.evaluate(LONG)
    with pytest.raises(vla_rl.UserError, match="to /proc/x cannot be used"):
        vla_rl.export(run, "/proc/x")
    with pytest.raises(vla_rl.UserError, match="folder .* NUL byte"):
        vla_rl.run(SPEC, "a\0b")


def test_an_error_about_another_file_is_a_bug():
    given = {"--to": Path("full")}
    assert path_error(FileNotFoundError(errno.ENOENT, "no", "/elsewhere/x"), given) is None
    assert path_error(FileNotFoundError(errno.ENOENT, "no", "full/of_ours"), given) is None
    assert path_error(ValueError("embedded null byte"), given) is None and path_error(KeyError("full"), given) is None
    assert "you may not do that there" in str(path_error(PermissionError(errno.EACCES, "no", "full/x"), given))
    assert "its disk is full" in str(path_error(OSError(errno.ENOSPC, "no"), given))


def test_what_is_tried_is_left_as_it_was(folder):
    check_file("--output", Path("new"))
    check_file("--output", Path("file"))
    check_file("--output", Path("/dev/null"))
    check_folder("--to", Path("a/b/c"))
    check_folder("--to", Path("full"))
    assert sorted(file.name for file in folder.iterdir()) == ["file", "full"] and Path("file").read_text() == "kept"


def test_a_link_and_a_device_stay_what_they_are(folder):
    Path("link").symlink_to("file")
    write_whole(Path("link"), "new")
    assert Path("link").is_symlink() and Path("file").read_text() == "new"
    write_whole(Path("/dev/null"), "gone")
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("where", ["import", "check", "build"])
def test_a_plugin_that_raises_what_is_not_an_exception(folder, where):
    lines = {name: f"    raise GeneratorExit('{name}')" if name == where else "    pass" for name in ("check", "build")}
    Path("odd.py").write_text(
        "from attrs import frozen\nfrom vla_rl import HookPlugin\n"
        + ("raise GeneratorExit('import')\n" if where == "import" else "")
        + "@frozen\nclass Config:\n    pass\n"
        + f"def check(config, context):\n{lines['check']}\ndef build(config):\n{lines['build']}\n"
        + "vla_rl_plugins = {'hook': {'odd': HookPlugin(config=Config, build=build, check=check, summary='')}}\n"
    )
    Path("spec.yaml").write_text(
        json.dumps({**SPEC, "plugins": [*SPEC["plugins"], "odd.py"], "hooks": [{"type": "odd"}]})
    )
    assert f"GeneratorExit: {where}" in said_by("check", "spec.yaml")


# ------------------------------------------------------------------------------------------------- what is read


def test_a_pipe_without_a_writer_is_not_a_table(monkeypatch):
    os.mkfifo("pipe.yaml")
    Path("spec.yaml").write_text(json.dumps(SPEC))
    assert "pipe.yaml: cannot be read: it is a pipe, and no process writes to it" in said_by("check", "pipe.yaml")
    assert "it is a pipe, and no process writes to it" in said_by("plan", "spec.yaml", "--gpu", "pipe.yaml")
    monkeypatch.setenv("VLA_RL_CHECKPOINTS", "pipe.yaml")
    assert "table of known checkpoints pipe.yaml cannot be read" in said_by("models")


@pytest.mark.parametrize("text", ["", "short", "x" * 300_000])
def test_a_pipe_with_a_writer_is_read_to_its_end(text):
    """The shell opens such a pipe for `--gpu <(generate)`."""
    reading, writing = os.pipe()

    def write():
        with os.fdopen(writing, "w") as pipe:
            pipe.write("begin " + text)

    Thread(target=write).start()
    try:
        assert read_text(Path(f"/dev/fd/{reading}")) == "begin " + text
    finally:
        os.close(reading)


def test_a_gpu_file_that_is_not_text():
    Path("spec.yaml").write_text(json.dumps(SPEC))
    Path("gpu.yaml").write_bytes(b"tflops: \xff\xfe")
    assert "--gpu gpu.yaml is not UTF-8 text (invalid start byte at byte 8)" in said_by(
        "plan", "spec.yaml", "--gpu", "gpu.yaml"
    )

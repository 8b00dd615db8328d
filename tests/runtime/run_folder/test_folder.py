"""What a run folder survives: lost links, damaged checkpoints, attempts that failed, kills in the middle of a save."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from scripted_runs import read_metrics, scripted_spec
from typer.testing import CliRunner

from vla_rl.cli.main import app
from vla_rl.core.errors import CheckpointError, UserError
from vla_rl.core.run.state import State
from vla_rl.core.spec.spec import parse_spec
from vla_rl.runtime.run_folder.folder import RunFolder, checkpoint_in, read_state
from vla_rl.runtime.run_folder.manifest import write_manifest
from vla_rl.runtime.start import run
from vla_rl.testing.scripted import SimulatorFault
from vla_rl.toolkit.hooks.files import belongs_to_run
from vla_rl.toolkit.models.checkpoints.files import save_tensors

SIX = {"train": {"steps": 6, "checkpoint_every": 2, "keep_checkpoints": 2}, "eval": {"before": False}}
LEARNER, STATE = "trainer/learner.pt", "trainer/state.json"


def steps(folder: Path) -> list[dict]:
    return [line for line in read_metrics(folder) if "loss/total" in line]


def resume(folder: Path, **changes) -> None:
    run(parse_spec(scripted_spec(**{**SIX, **changes})), folder, True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of six steps, with checkpoints of steps 4 and 6."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(parse_spec(scripted_spec(**SIX)), folder, False)
    return folder


@pytest.fixture
def killed(whole, tmp_path):
    """A copy, which looks as after a kill at the end."""
    (copy := shutil.copytree(whole, tmp_path / "killed", symlinks=True)).joinpath("results.json").unlink()
    return copy


@pytest.mark.parametrize("link", ["missing", "dangling", "older"])
def test_the_newest_checkpoint_is_found_without_the_link(killed, whole, link):
    last = killed / "checkpoints" / "last"
    last.unlink()
    if link != "missing":
        last.symlink_to({"dangling": "step_000099", "older": "step_000004"}[link])
    assert RunFolder(killed).latest_checkpoint() == killed / "checkpoints" / "step_000006"
    resume(killed)
    assert steps(killed) == steps(whole)
    assert last.resolve().name == "step_000006"


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_files_of_a_checkpoint_can_be_read_by_whom_the_umask_says(tmp_path, umask):
    def write(model: Path, trainer: Path) -> None:
        save_file({"a": torch.ones(1)}, model / "model.safetensors")  # as a plugin may, which makes it 0600
        (trainer / "learner.pt").touch()

    before = os.umask(umask)
    try:
        saved = RunFolder(tmp_path).save_checkpoint(State(step=1), write, keep=2)
        save_tensors({"a": torch.ones(1)}, tmp_path / "head.safetensors")
    finally:
        os.umask(before)
    files = [tmp_path / "head.safetensors", *(file for file in saved.rglob("*") if file.is_file())]
    assert {"head.safetensors", "model.safetensors", "learner.pt"} < {file.name for file in files}
    assert {oct(file.stat().st_mode & 0o777) for file in files} == {oct(0o666 & ~umask)}


# -------------------------------------------------------------------------------------- copies by cp -rL, buckets, zips


def entries(folder: Path) -> list[str]:
    return sorted(entry.name for entry in (folder / "checkpoints").iterdir())


def test_a_copy_in_which_the_link_is_a_folder_continues(killed, whole):
    last = killed / "checkpoints" / "last"
    last.unlink()
    shutil.copytree(killed / "checkpoints" / "step_000006", last)
    shutil.copytree(last, killed / "checkpoints" / ".last")  # of a kill between the link and its renaming
    resume(killed, train={**SIX["train"], "steps": 7})
    assert last.is_symlink() and last.resolve().name == "step_000007"
    assert entries(killed) == ["last", "step_000006", "step_000007"]
    assert [line["step"] for line in steps(killed)] == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("text", ["step_000006", "a note of mine " * 20])
def test_a_copy_in_which_the_link_is_a_text_continues(killed, text):
    last = killed / "checkpoints" / "last"
    last.unlink()
    last.write_text(text)
    resume(killed)
    assert last.resolve().name == "step_000006"
    assert ("kept_last" in entries(killed)) == (text != "step_000006")


def test_a_folder_last_that_is_the_only_copy_becomes_a_checkpoint(killed, whole, tmp_path):
    checkpoints = killed / "checkpoints"
    (checkpoints / "last").unlink()
    (checkpoints / "step_000006").rename(checkpoints / "last")
    shutil.rmtree(checkpoints / "step_000004")
    with pytest.raises(UserError, match="already holds a run"):
        run(parse_spec(scripted_spec(**SIX)), killed, False)
    assert checkpoint_in(killed) == checkpoints / "last"
    state, trainer = RunFolder(killed).restore_checkpoint()
    assert state.step == 6
    assert trainer.parent == checkpoints / "step_000006"
    assert entries(killed) == ["step_000006"]


def test_a_folder_last_mends_the_checkpoint_that_it_is_a_copy_of(killed, whole):
    checkpoints = killed / "checkpoints"
    (checkpoints / "last").unlink()
    shutil.copytree(checkpoints / "step_000006", checkpoints / "last")
    flip(checkpoints / "step_000006" / LEARNER)
    state, _ = RunFolder(killed).restore_checkpoint()
    assert state.step == 6
    assert entries(killed) == ["damaged_step_000006", "step_000004", "step_000006"]


@pytest.mark.parametrize("what", ["half", "another"])
def test_a_folder_last_that_is_nowhere_else_is_never_deleted(killed, what, caplog):
    checkpoints = killed / "checkpoints"
    last = checkpoints / "last"
    last.unlink()
    shutil.copytree(checkpoints / "step_000006", last)
    if what == "half":
        (last / LEARNER).unlink()
        (last / "manifest.json").unlink()
    else:  # of another run
        (last / "model" / "notes.txt").write_text("mine")
        write_manifest(last)
    (checkpoints / "kept_last").mkdir()
    state, _ = RunFolder(killed).restore_checkpoint()
    assert state.step == 6
    assert entries(killed) == ["kept_last", "kept_last2", "step_000004", "step_000006"]
    assert (checkpoints / "kept_last2" / "trainer" / "state.json").exists()
    assert "kept as kept_last2" in caplog.text


def test_the_name_last_means_the_newest_checkpoint_without_the_link_too(killed, whole):
    (killed / "checkpoints" / "last").unlink()
    assert checkpoint_in(killed / "checkpoints" / "last") == killed / "checkpoints" / "step_000006"
    assert checkpoint_in(whole / "checkpoints" / "last") == whole / "checkpoints" / "step_000006"


def test_a_disk_without_links_has_checkpoints(tmp_path, monkeypatch, caplog):
    def no_links(self, target):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", no_links)
    folder = RunFolder(tmp_path)
    for step in (1, 2):
        folder.save_checkpoint(State(step=step), lambda model, trainer: None, keep=2)
    assert entries(tmp_path) == ["step_000001", "step_000002"]
    assert folder.restore_checkpoint()[0].step == 2
    assert caplog.text.count("no link") == 1
    assert (
        f"model.checkpoint takes its own name, such as {tmp_path / 'checkpoints' / 'step_000001' / 'model'}"
        in caplog.text
    )


def test_a_disk_without_modes_has_checkpoints(tmp_path, monkeypatch):
    def no_modes(self, mode):
        raise PermissionError(1, "Operation not permitted")

    def write(model: Path, trainer: Path) -> None:
        (model / "weights").touch()

    monkeypatch.setattr(Path, "chmod", no_modes)
    RunFolder(tmp_path).save_checkpoint(State(step=1), write, keep=2)
    assert entries(tmp_path) == ["last", "step_000001"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError(1, "Operation not permitted"), "Operation not permitted\n(.|\n)*mend that, and resume"),
        (OSError(28, "No space left on device"), "No space left on device\n(.|\n)*make room, and resume"),
        (
            RuntimeError("basic_ios::clear: iostream error"),
            r"the disk seems to be full \(basic_ios(.|\n)*make room, and resume",
        ),
    ],
)
def test_a_save_that_fails_on_a_disk_with_little_room_says_why(tmp_path, monkeypatch, error, said):
    def write(model: Path, trainer: Path) -> None:
        raise error

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2**20))
    with pytest.raises(CheckpointError, match=said):
        RunFolder(tmp_path).save_checkpoint(State(step=1), write, keep=2)


def test_a_save_that_fails_for_another_reason_does_not_ask_for_room(tmp_path, monkeypatch):
    def write(model: Path, trainer: Path) -> None:
        raise ValueError("a tensor without a name")

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2**40))
    with pytest.raises(CheckpointError, match="a tensor without a name(.|\n)*mend that, and resume the run"):
        RunFolder(tmp_path).save_checkpoint(State(step=1), write, keep=2)


@pytest.mark.parametrize("there", [False, True])
def test_a_folder_that_is_not_a_run_is_not_resumed(tmp_path, there):
    folder = tmp_path / "typo"
    if there:
        folder.mkdir()
        (folder / "notes.txt").write_text("mine")
    with pytest.raises(
        UserError, match=r"nothing to resume: .*typo (does not exist|holds no run)(.|\n)*leave out --resume"
    ):
        resume(folder)
    assert folder.exists() == there
    assert [p.name for p in folder.glob("*")] == ["notes.txt"] * there


def test_a_run_without_a_checkpoint_starts_over_and_keeps_its_metrics(killed, whole, caplog):
    shutil.rmtree(killed / "checkpoints")
    before = (killed / "metrics.jsonl").read_bytes()
    resume(killed)
    assert "has no checkpoint yet: it starts over at step 0" in caplog.text
    assert steps(killed) == steps(whole)
    assert (killed / "metrics-1.jsonl").read_bytes() == before


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def put(file: Path) -> None:
    file.write_bytes(bytes(range(64)))


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        (STATE, cut, r"state.json has \d+ bytes and had \d+"),
        (LEARNER, cut, r"learner.pt has \d+ bytes and had \d+"),
        (LEARNER, Path.unlink, "learner.pt is missing"),
        (LEARNER, flip, "learner.pt has other content than was written"),
        ("model/config.json", flip, "model/config.json has other content than was written"),
        ("model/model-2.safetensors", put, "model/model-2.safetensors is not in manifest.json: it was put there later"),
        ("manifest.json", Path.unlink, "manifest.json is missing, which is written last"),
        ("manifest.json", cut, "manifest.json cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(killed, whole, caplog, file, damage, message):
    damage(killed / "checkpoints" / "step_000006" / file)
    state, trainer = RunFolder(killed).restore_checkpoint()
    assert state.step == 4 and trainer.parent.name == "step_000004"
    assert re.search(rf"step_000006 is damaged: .*{message}", caplog.text)
    assert "kept as damaged_step_000006; continuing from step_000004" in caplog.text
    assert (killed / "checkpoints" / "last").resolve().name == "step_000004"
    caplog.clear()
    RunFolder(killed).restore_checkpoint()
    assert not caplog.records


def change_state(checkpoint: Path, **values) -> None:
    """Other values in state.json, and a manifest that agrees."""
    file = checkpoint / STATE
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    (checkpoint / "manifest.json").unlink()
    write_manifest(checkpoint)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"step": -7}, "'step' is int -7, a whole number from 0 on is expected"),
        ({"step": 6.0}, r"'step' is float 6\.0, a whole number"),
        ({"step": True}, "'step' is bool True, a whole number"),
        ({"evaluated": -2}, "'evaluated' is int -2, a whole number from -1 on"),
        ({"wall_seconds": float("nan")}, "'wall_seconds' is float nan, a number from 0 on"),
        ({"tickets": [1]}, "'tickets' is a list, a JSON object"),
        ({"tickets": {"trained": -1}}, "tickets: 'trained' is int -1"),
        ({"tickets": {"train": 1}}, "'train' is not known; did you mean 'trained'"),
        ({"last": {"success": {"rate": "high"}}}, "success: 'rate' is str 'high', a number is expected"),
        ({"mode": 3}, "'mode' is int 3, a text"),
        ({"stepp": 3}, "'stepp' is not known; did you mean 'step'"),
    ],
)
def test_a_state_that_cannot_be_is_refused(whole, tmp_path, values, message):
    checkpoint = tmp_path / "step_000006"
    shutil.copytree(whole / "checkpoints" / "step_000006", checkpoint)
    assert read_state(checkpoint).step == 6
    change_state(checkpoint, **values)
    with pytest.raises(CheckpointError, match=rf"state\.json.*: {message}"):
        read_state(checkpoint)


def test_a_state_without_later_keys_has_their_defaults(whole, tmp_path):
    """A checkpoint of an earlier version lacks keys."""
    checkpoint = tmp_path / "step_000006"
    shutil.copytree(whole / "checkpoints" / "step_000006", checkpoint)
    state = json.loads((checkpoint / STATE).read_text())
    (checkpoint / STATE).write_text(json.dumps({key: state[key] for key in ("step", "mode")}))
    (checkpoint / "manifest.json").unlink()
    write_manifest(checkpoint)
    assert read_state(checkpoint) == State(step=6, mode="training")


def test_a_manifest_names_only_its_own_files(whole, tmp_path):
    checkpoint = tmp_path / "step_000006"
    shutil.copytree(whole / "checkpoints" / "step_000006", checkpoint)
    for entries, message in (
        ({"../../etc/passwd": {"size": 1, "sha256": "x"}}, "names the file .* which is not inside"),
        ({"a": {"size": -1, "sha256": "x"}}, "a: 'size' is int -1"),
        ([], "holds a list, a JSON object is expected"),
    ):
        (checkpoint / "manifest.json").write_text(json.dumps(entries))
        with pytest.raises(CheckpointError, match=message):
            read_state(checkpoint)


def test_a_run_that_fell_back_equals_one_that_was_never_disturbed(killed, whole):
    flip(killed / "checkpoints" / "step_000006" / LEARNER)
    resume(killed)
    assert read_metrics(killed) == read_metrics(whole)
    names = sorted(p.name for p in (killed / "checkpoints").iterdir())
    assert names == ["damaged_step_000006", "last", "step_000004", "step_000006"]


def test_no_sound_checkpoint_is_an_error_that_names_them_all(killed):
    cut(killed / "checkpoints" / "step_000006" / STATE)
    (killed / "checkpoints" / "step_000004" / LEARNER).unlink()
    before = (killed / "metrics.jsonl").read_bytes()
    with pytest.raises(
        CheckpointError, match=r"step_000006 is damaged: .*state.json(.|\n)*step_000004 is damaged: .*learner"
    ):
        resume(killed)
    assert (killed / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("what", ["", "checkpoints/step_000004"])
def test_evaluating_a_checkpoint_gives_its_step(killed, tmp_path, what):
    (killed / "checkpoints" / "last").unlink()
    result = CliRunner().invoke(app, ["eval", str(killed / what), "--output", str(tmp_path / "result.json")])
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "result.json").read_text())["step"] == (4 if what else 6)


@pytest.mark.parametrize("what", ["", "checkpoints/step_000006"])
def test_evaluating_a_damaged_checkpoint_is_one_error(killed, what):
    flip(killed / "checkpoints" / "step_000006" / LEARNER)
    result = CliRunner().invoke(app, ["eval", str(killed / what)])
    assert result.exit_code == 2
    assert "step_000006 is damaged: trainer/learner.pt has other content" in result.output


def test_evaluating_a_checkpoint_with_weights_that_nothing_vouches_for_is_one_error(killed):
    """`eval` takes the learner's weights, so it would not notice what `export` gives away."""
    put(killed / "checkpoints" / "step_000006" / "model" / "model-2.safetensors")
    (killed / "checkpoints" / "step_000006" / "model" / "notes.txt").touch()
    result = CliRunner().invoke(app, ["eval", str(killed)])
    assert result.exit_code == 2
    assert "step_000006 is damaged: model/model-2.safetensors is not in manifest.json" in result.output
    assert "notes.txt" not in result.output


@pytest.mark.parametrize(
    ("command", "executes"),
    [("check", True), ("plan", True), ("eval", True), ("serve", True), ("export", False), ("report", False)],
)
def test_commands_that_execute_a_strangers_spec_are_those_of_the_security_page(killed, tmp_path, command, executes):
    plugin = tmp_path / "plugin.py"
    plugin.write_text("raise OSError('executed')\n")
    file = killed / "spec.yaml"
    file.write_text(file.read_text().replace("plugins:\n", f"plugins:\n- {plugin}\n"))
    options = ["--to", str(tmp_path / "to")] if command == "export" else []
    result = CliRunner().invoke(app, [command, str(killed), *options])
    assert ("executed" in result.output) == executes, result.output
    assert (result.exit_code == 0) != executes
    page = (Path(__file__).parents[3] / "docs" / "explanation" / "security.md").read_text()
    (listed,) = re.findall(r"\*\*A run's folder\*\* contains its spec: (.*?) read it", page)
    assert (f"`{command}`" in listed) == executes


def test_a_run_that_failed_before_its_first_step_does_not_block_its_folder(tmp_path, train):
    with pytest.raises(SimulatorFault):
        train(env={"fault": "raise"})
    assert (tmp_path / "run" / "spec.yaml").exists()
    train(train={"steps": 1})
    assert "fault: none" in (tmp_path / "run" / "spec.yaml").read_text()


@pytest.mark.parametrize("left", ["checkpoints", "metrics.jsonl", "results.json"])
def test_a_run_that_has_begun_is_not_started_again(killed, whole, left):
    shutil.copyfile(whole / "results.json", killed / "results.json")
    for name in {"checkpoints", "metrics.jsonl", "results.json"} - {left}:
        shutil.rmtree(killed / name) if (killed / name).is_dir() else (killed / name).unlink()
    with pytest.raises(UserError, match="already holds a run; add --resume"):
        run(parse_spec(scripted_spec(**SIX)), killed, False)


def test_a_spec_that_a_user_wrote_is_not_replaced(tmp_path):
    spec = parse_spec(scripted_spec(**SIX))
    (tmp_path / "spec.yaml").write_text("# mine\n")
    with pytest.raises(UserError, match=r"spec.yaml was not written by a run"):
        run(spec, tmp_path, False)
    assert (tmp_path / "spec.yaml").read_text() == "# mine\n"


def test_all_that_a_run_writes_is_kept_from_hooks(whole):
    names = {entry.name for entry in whole.iterdir() if not entry.name.startswith(".")}
    assert names > {"spec.yaml", "environment.json", "results.json", "trace.json", "checkpoints"}
    assert [name for name in names if not belongs_to_run(name)] == ["metrics.jsonl"]


# -------------------------------------------------------------------------------------------- folders that cannot be


@pytest.fixture
def spec_that_starts_no_worker(tmp_path):
    """A spec whose simulator cannot be built."""
    (tmp_path / "barred.py").write_text(
        "import dataclasses\n"
        "from vla_rl.testing.scripted import vla_rl_plugins as doubles\n"
        "def build(config, context):\n"
        "    raise AssertionError('a worker started')\n"
        "vla_rl_plugins = {'env': {'barred': dataclasses.replace(doubles['env']['scripted'], build=build)}}\n"
    )
    plugins = ["vla_rl.testing.scripted", str(tmp_path / "barred.py")]
    file = tmp_path / "barred.yaml"
    parse_spec(scripted_spec(plugins=plugins, env={"type": "barred"})).dump(file)
    return file


def refused(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, ["run", *map(str, arguments)])
    assert result.exit_code == 2, result.exception or result.output
    return result.output


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("a_file", "it is a file"),
        ("a_file/run", "Not a directory"),
        ("x" * 400, "File name too long"),
        ("/proc/run", ""),
    ],
)
def test_a_folder_that_cannot_be_is_one_error_before_a_worker_starts(spec_that_starts_no_worker, tmp_path, place, why):
    (tmp_path / "a_file").write_text("mine")
    output = refused(spec_that_starts_no_worker, "--folder", tmp_path / place)
    assert f"no run can be kept in {tmp_path / place}: {why}" in output
    output = refused(spec_that_starts_no_worker, "--folder", tmp_path / place, "--resume")
    assert f"there is nothing to resume: {tmp_path / place}" in output or why in output
    assert (tmp_path / "a_file").read_text() == "mine"


@pytest.mark.parametrize("names", [["photos", "thesis.pdf"], ["results.json", "environment.yaml"], list("abcdefgh")])
def test_a_folder_of_other_things_is_not_taken(spec_that_starts_no_worker, tmp_path, names):
    folder = tmp_path / "full"
    folder.mkdir()
    for name in names:
        (folder / name).write_text("mine")
    output = refused(spec_that_starts_no_worker, "--folder", folder)
    assert f"{folder} is neither empty nor the folder of a run: it holds {', '.join(sorted(names)[:5])}" in output
    assert ("and 3 more" in output) == (len(names) > 5)
    assert sorted(entry.name for entry in folder.iterdir()) == sorted(names)
    assert "/ is neither empty nor the folder of a run" in refused(spec_that_starts_no_worker, "--folder", "/")


def test_a_run_begins_next_to_its_own_log(tmp_path, train):
    folder = tmp_path / "run"
    (folder / "lost+found").mkdir(parents=True)
    (folder / ".keep").touch()
    (folder / "slurm-7.out").write_text("queued")
    train(train={"steps": 0})
    assert (folder / "results.json").exists()


def test_a_run_with_a_name_of_400_characters(spec_that_starts_no_worker, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    output = refused(spec_that_starts_no_worker, f"name={'x' * 400}")
    assert "name: has 400 characters, and names a folder; there may be 200" in output


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a read-only file system needs root")
@pytest.mark.parametrize("folder", ["run", "."])
def test_a_read_only_disk(spec_that_starts_no_worker, tmp_path, folder):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(disk)]
    if subprocess.run(mounting, capture_output=True, check=False).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        output = refused(spec_that_starts_no_worker, "--folder", disk / folder)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
    assert "Read-only file system; choose another place with --folder" in output


# --------------------------------------------------------------------------------------------------------- kills


def test_killed_at_any_operation_of_a_save_it_leaves_a_folder_to_continue_from(tmp_path, fork_server):
    script = Path(__file__).with_name("killed_saves.py")
    done = fork_server.run_python(script, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    kills, operations = json.loads(done.stdout.splitlines()[-1])
    assert kills > 30
    assert {"os.rename", "os.symlink", "shutil.rmtree", "os.rmdir", "open"} <= set(operations)

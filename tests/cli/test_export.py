"""A checkpoint as a folder to give away: what is in it, what its card says, and how it is uploaded."""

from __future__ import annotations

import json
import os
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import yaml
from typer.testing import CliRunner

from vla_rl.cli.main import app
from vla_rl.core.spec.spec import load_spec, parse_spec
from vla_rl.runtime.start import evaluate, run
from vla_rl.toolkit.models.checkpoints.lerobot_layout import UNKNOWN

SPEC = {
    "name": "toy",
    "model": {"type": "film_resnet"},
    "env": {"type": "tabletop", "num_envs": 4, "tasks": ["pick_red", "put_red"]},
    "rollout": {"chunk": 4, "episodes": 4, "group_size": 4},
    "algorithm": {"type": "grpo"},
    "runtime": {"backend": "local"},
    "train": {"steps": 2, "checkpoint_every": 1, "lr": 1e-3, "micro_batch": 8},
    "eval": {"before": True, "every": 1, "episodes_per_task": 2},
    "hooks": [{"type": "jsonl"}],
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "toy"
    run(parse_spec(SPEC), folder, False)
    return folder


def export(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["export", *map(str, arguments)])
    return result.exit_code, result.output


def front_and_text(folder: Path) -> tuple[dict, str]:
    _, front, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front), text


def test_the_folder_is_a_checkpoint_of_its_model(trained, tmp_path):
    (trained / "checkpoints" / "step_000002" / "model" / "model.safetensors").chmod(0o600)  # as safetensors makes it
    status, said = export(trained, "--to", tmp_path / "given")
    assert status == 0 and "wrote step 2" in said
    files = [file for file in (tmp_path / "given").rglob("*") if file.is_file()]
    assert len({file.stat().st_mode for file in files}) == 1
    spec = load_spec(tmp_path / "given" / "vla_rl_spec.yaml")
    again = load_spec(tmp_path / "given" / "vla_rl_spec.yaml", [f"model.checkpoint={tmp_path / 'given'}"])
    assert spec.env == again.env
    own = evaluate(load_spec(trained / "spec.yaml"), trained / "checkpoints" / "step_000002")
    assert evaluate(again, None)["episodes"] == own["episodes"]


def test_the_card_says_what_the_run_measured(trained, tmp_path):
    export(trained, "--to", tmp_path / "given")
    results = json.loads((trained / "results.json").read_text())
    front, text = front_and_text(tmp_path / "given")
    [metric] = front["model-index"][0]["results"][0]["metrics"]
    assert metric["value"] == round(100 * results["success"]["rate"], 1)
    rows = dict(re.findall(r"^\| (\w[\w ]*) \| ([\d.]+) %", text, re.MULTILINE))
    expected = {"before training": results["success_before"], "all tasks": results["success"], **results["tasks"]}
    assert rows == {name: f"{100 * rate['rate']:.1f}" for name, rate in expected.items()}
    assert "condition" not in text
    assert "vla-rl " in text and f"torch {results['versions']['torch']}" in text


def test_the_curve_is_a_separate_image(trained, tmp_path):
    export(trained, "--to", tmp_path / "given")
    image = ET.parse(tmp_path / "given" / "success.svg").getroot()
    assert image.tag == "{http://www.w3.org/2000/svg}svg"
    assert len([part for part in image.iter() if part.get("class") == "eval"]) == 3
    text = (tmp_path / "given" / "success.svg").read_text()
    assert ".band { fill: #" in text and "var(" not in text


def test_an_earlier_checkpoint_has_its_own_figures(trained, tmp_path):
    export(trained / "checkpoints" / "step_000001", "--to", tmp_path / "given")
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    rate = next(line["eval/success_rate"] for line in lines if line["step"] == 1 and "eval/success_rate" in line)
    front, text = front_and_text(tmp_path / "given")
    assert front["model-index"][0]["results"][0]["metrics"][0]["value"] == round(100 * rate, 1)
    assert "step 1 of 2" in text and "pick_red |" not in text


def test_refusals(trained, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("mine")
    status, said = export(trained, "--to", tmp_path / "there")
    assert status == 2 and "not empty" in said and (tmp_path / "there" / "file").read_text() == "mine"
    status, said = export(tmp_path, "--to", tmp_path / "given")
    assert status == 2 and "neither a run with a checkpoint" in said


class Hub(BaseHTTPRequestHandler):
    """The part of the hub's API that an upload of small files needs."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.asked.append((self.path, self.headers.get("Authorization"), body))
        if self.server.refuses:
            return self._say(403, {"error": "no"})
        if self.path.endswith("/create"):
            return self._say(200, {"url": f"{self.server.address}/me/toy", "name": "me/toy"})
        if "/preupload/" in self.path:
            files = [{"path": file["path"], "uploadMode": "regular"} for file in json.loads(body)["files"]]
            return self._say(200, {"files": [{**file, "shouldIgnore": False} for file in files]})
        return self._say(
            200, {"commitUrl": f"{self.server.address}/me/toy/commit/1", "commitOid": "1", "success": True}
        )

    def do_GET(self) -> None:
        self._say(200, {"id": "me/toy", "sha": "1", "siblings": [], "private": not self.server.public})

    def _say(self, status: int, content: dict) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked, server.refuses, server.public, server.address = (
        [],
        False,
        False,
        f"http://127.0.0.1:{server.server_port}",
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def push(fork_server, hub, trained):
    """Export to a folder and to the hub, in another process: the address of the hub is read once."""

    def export_to(target: Path) -> tuple[int, str]:
        environment = {**os.environ, "HF_ENDPOINT": hub.address, "HF_TOKEN": "hf_mine"}
        environment.pop("HF_HUB_OFFLINE", None)
        command = ("-m", "vla_rl.cli.main", "export", trained, "--to", target, "--push", "me/toy")
        done = fork_server.run_python(*command, env=environment)
        return done.returncode, done.stdout + done.stderr

    return export_to


def test_an_upload_is_private_and_by_the_users_own_login(hub, push, tmp_path):
    status, said = push(tmp_path / "given")
    assert status == 0, said
    (created,) = [json.loads(body) for path, _, body in hub.asked if path.endswith("/create")]
    assert created["visibility"] == "private" and created["name"] == "toy"
    assert {login for _, login, _ in hub.asked} == {"Bearer hf_mine"}
    (commit,) = [body.decode() for path, _, body in hub.asked if "/commit/" in path]
    assert all(f'"path": "{file.name}"' in commit for file in (tmp_path / "given").iterdir())


def test_an_upload_that_is_refused_leaves_the_folder(hub, push, tmp_path):
    hub.refuses = True
    status, said = push(tmp_path / "given")
    assert status == 2 and "could not be uploaded" in said and "hf auth login" in said and "Traceback" not in said
    assert (tmp_path / "given" / "README.md").is_file()


def test_what_was_meant_to_be_private_is_not_uploaded_to_a_public_repository(hub, push, tmp_path):
    hub.public = True
    status, said = push(tmp_path / "given")
    assert status == 2 and "me/toy exists and is public; give --public, or another name" in said
    assert not [path for path, _, _ in hub.asked if "/commit/" in path or "/preupload/" in path]


def test_a_hub_that_cannot_be_reached(hub, push, tmp_path):
    hub.address = "http://127.0.0.1:9"
    status, said = push(tmp_path / "given")
    assert status == 2 and "me/toy could not be uploaded to http://127.0.0.1:9: " in said and "Traceback" not in said
    assert (tmp_path / "given" / "README.md").is_file()


def test_only_pi0_and_pi05_have_openpis_layout(trained, tmp_path):
    status, said = export(trained, "--to", tmp_path / "given", "--format", "openpi")
    assert status == 2 and "openpi's layout is of pi0 and pi05" in said and not (tmp_path / "given").exists()
    status, said = export(trained, "--to", tmp_path / "given", "--format", "openpie")
    assert status == 2 and "there is no 'openpie'; did you mean 'openpi'" in said
    status, said = export(trained, "--to", tmp_path / "given", "--asset-id", "libero")
    assert status == 2 and "add --format openpi" in said


def test_only_lerobots_models_have_its_layout(trained, tmp_path):
    status, said = export(trained, "--to", tmp_path / "given", "--format", "lerobot")
    assert status == 2 and "for pi0, pi05, smolvla; " in said and not (tmp_path / "given").exists()


def test_lerobots_layout(tmp_path, monkeypatch):
    """Sizes that lerobot cannot name stop an export; without that rule, a small network stands for a public one."""
    small = {"model": {"type": "smolvla", "preset": "tiny", "denoise_steps": 3}, "eval": {"episodes_per_task": 1}}
    train = {"steps": 1, "checkpoint_every": 1, "lr": 1e-3, "micro_batch": 8}
    run(parse_spec(SPEC | small | {"train": train, "hooks": []}), tmp_path / "run", False)
    status, said = export(tmp_path / "run", "--to", tmp_path / "given", "--format", "lerobot")
    assert status == 2 and "its network has other sizes" in said and not (tmp_path / "given").exists()
    monkeypatch.delitem(UNKNOWN, "architecture.json")
    status, said = export(tmp_path / "run", "--to", tmp_path / "given", "--format", "lerobot")
    assert status == 0, said
    assert json.loads((tmp_path / "given" / "config.json").read_text())["num_steps"] == 3
    assert front_and_text(tmp_path / "given")[0]["library_name"] == "lerobot"
    again = load_spec(
        tmp_path / "given" / "vla_rl_spec.yaml",
        [f"model.checkpoint={tmp_path / 'given'}", "model.preset=null"],
    )
    own = evaluate(load_spec(tmp_path / "run" / "spec.yaml"), tmp_path / "run" / "checkpoints" / "step_000001")
    assert evaluate(again, None)["episodes"] == own["episodes"]

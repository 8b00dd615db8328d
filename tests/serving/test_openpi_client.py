"""openpi's own client, as it is published, in a separate interpreter (it needs NumPy 1) against our server."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from fork_server import ForkedProcess

pytest.importorskip("websockets", reason="pip install -e '.[serve]'")
pytest.importorskip("msgpack", reason="pip install -e '.[serve]'")

from clients import WAIT, interpreter_with, served
from trained import sight, train

import vla_rl
from vla_rl.toolkit.models.acting.key_maps import PRESETS

pytestmark = pytest.mark.slow
PACKAGES = ("openpi-client==0.1.2", "typing_extensions")  # it imports the second without asking for it
CLIENT = """
import json, sys, time
import numpy as np
from openpi_client.action_chunk_broker import ActionChunkBroker
from openpi_client.websocket_client_policy import WebsocketClientPolicy

port, folder = int(sys.argv[1]), sys.argv[2]
seen = np.load(folder + "/seen.npz")
request = {
    "observation/image": seen["overhead"],
    "observation/wrist_image": seen["wrist"],
    "observation/state": seen["state"],
    "prompt": str(seen["instruction"]),
}

def say(**told):
    print(json.dumps(told), flush=True)

client = WebsocketClientPolicy("127.0.0.1", port)
reply = client.infer(request)
say(metadata=client.get_server_metadata(), keys=sorted(reply))
np.save(folder + "/chunk.npy", reply["actions"])
broker = ActionChunkBroker(client, action_horizon=len(reply["actions"]))
np.save(folder + "/one_by_one.npy", [broker.infer(request)["actions"] for _ in reply["actions"]])
try:
    client.infer({"prompt": "push"})
except RuntimeError as error:
    say(error=str(error))
client = WebsocketClientPolicy(f"ws://127.0.0.1:{port}")
client.infer(request)
say(waits=True)
input()  # the server is killed now
try:
    client.infer(request)
except Exception as error:
    say(lost=type(error).__name__)
while True:
    try:
        client = WebsocketClientPolicy("127.0.0.1", port)
        break
    except ConnectionRefusedError:
        time.sleep(0.2)
np.save(folder + "/again.npy", client.infer(request)["actions"])
say(done=True)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """An interpreter with openpi's client."""
    return interpreter_with(tmp_path_factory.mktemp("openpi") / "venv", *PACKAGES)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return train(tmp_path_factory.mktemp("served") / "run")


@pytest.fixture
def start_server(fork_server, run):
    """Start `vla-rl serve`; -> the process, once it listens on this port."""

    def listen(port: int) -> ForkedProcess:
        command = ("-m", "vla_rl.cli.main", "serve", run, "--port", str(port), "--device", "cpu", "--keys", "libero")
        server = fork_server.start_python(*command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert "ws://127.0.0.1" in server.stdout.readline()
        return server

    return listen


def test_it_gets_actions_errors_and_comes_back_after_a_kill(python, run, start_server, tmp_path):
    policy = vla_rl.open_policy(run)
    seen = sight(policy, 0)
    wanted = policy.act(**seen)
    np.savez(tmp_path / "seen.npz", **seen["images"], state=seen["state"], instruction=seen["instruction"])
    with served(policy, keys=PRESETS["libero"]) as free:
        port = free.settings.port
    servers = [start_server(port)]
    command = [str(python), "-c", CLIENT, str(port), str(tmp_path)]
    client = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={}
    )
    try:
        told = {}
        while "waits" not in told:
            line = client.stdout.readline()
            assert line, client.stderr.read()
            told |= json.loads(line)
        servers[0].kill()
        servers[0].wait(WAIT)
        client.stdin.write("\n")
        client.stdin.flush()
        told |= json.loads(client.stdout.readline())
        servers.append(start_server(port))
        rest, errors = client.communicate(timeout=WAIT)
        told |= json.loads(rest or "{}")
    finally:
        for process in (client, *servers):
            process.kill()
    assert told["done"], errors
    assert told["metadata"]["action_chunk"] == 4 and told["metadata"]["checkpoint_sha256"] == policy.sha256
    assert told["keys"] == ["actions", "policy_timing", "server_timing"]
    assert told["error"].startswith("Error in inference server:\nthe request lacks 'observation/image'")
    assert told["lost"].startswith("ConnectionClosed")
    for name in ("chunk", "one_by_one", "again"):
        assert np.array_equal(np.load(tmp_path / f"{name}.npy"), wanted), name

"""vla-evaluation-harness, as it is published, in a separate interpreter against our server."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("websockets", reason="pip install 'vla-rl[serve]'")
pytest.importorskip("msgpack", reason="pip install 'vla-rl[serve]'")

from clients import WAIT, interpreter_with, served
from trained import sight, train

import vla_rl

pytestmark = pytest.mark.slow
PACKAGES = ("vla-eval==0.8.0",)
CLIENT = """
import json, sys
import anyio
import numpy as np
from vla_eval.benchmarks.libero.benchmark import LIBEROBenchmark
from vla_eval.connection import Connection
from vla_eval.orchestrator import _merge_observation_params

port, folder = sys.argv[1:]
seen = np.load(folder + "/seen.npz")

async def main():
    async with Connection(f"ws://127.0.0.1:{port}") as connection:
        params = _merge_observation_params(LIBEROBenchmark, {}, connection.server_info["observation_params"])
        raw = {
            "robot0_eef_pos": np.zeros(3),
            "robot0_eef_quat": np.array([0.9998, 0.0, 0.0, -0.02]),
            "robot0_gripper_qpos": np.zeros(2),
        }
        state = LIBEROBenchmark(**params)._proprio_state(raw)
        await connection.start_episode({})
        observation = {
            "images": {"overhead": seen["overhead"], "wrist": seen["wrist"]},
            "states": seen["state"],
            "task_description": str(seen["instruction"]),
        }
        actions = [(await connection.act(observation))["actions"] for _ in range(4)]
        np.save(folder + "/actions.npy", actions)
        print(json.dumps({"params": params, "rotation": state[3:6].tolist()}))

anyio.run(main)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    return interpreter_with(tmp_path_factory.mktemp("vla_eval") / "venv", *PACKAGES)


def test_it_sends_rotations_as_in_training_and_gets_the_actions(python, tmp_path):
    """Without `quat_no_antipodal` the rotation is 2 acos(0.02) = 3.1016 about -x, 2 pi from that of training."""
    policy = vla_rl.open_policy(train(tmp_path / "run"))
    seen = sight(policy, 0)
    np.savez(tmp_path / "seen.npz", **seen["images"], state=seen["state"], instruction=seen["instruction"])
    with served(policy, dialect="vla-eval") as server:
        command = [str(python), "-c", CLIENT, str(server.settings.port), str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT, check=False, env={})
    assert done.returncode == 0, done.stderr
    reply = json.loads(done.stdout.splitlines()[-1])
    assert reply["params"] == {"send_wrist_image": True, "send_state": True, "quat_no_antipodal": True}
    assert reply["rotation"] == pytest.approx([2 * math.acos(-0.02), 0, 0], abs=1e-3)
    assert np.array_equal(np.load(tmp_path / "actions.npy"), policy.act(**seen))

"""Workers that Ray itself takes from a run: it ends them for lack of memory, or loses a call to them."""

from __future__ import annotations

import re

import psutil
import pytest

pytestmark = [pytest.mark.ray, pytest.mark.own_ray]


def test_a_worker_that_the_memory_monitor_of_ray_ends_is_started_again(train, tmp_path, monkeypatch, caplog):
    (tmp_path / "hungry.py").write_text(
        "import dataclasses, time\n"
        "from pathlib import Path\n"
        "from vla_rl.testing.scripted import vla_rl_plugins as doubles\n"
        "double = doubles['env']['scripted']\n"
        f"eaten = Path({str(tmp_path / 'eaten')!r})\n"
        "def build(config, context):\n"
        "    env = double.build(config, context)\n"
        "    step, held = env.chunk_step, []\n"
        "    def chunk_step(actions, active, stop_at_end):\n"
        f"        if Path({str(tmp_path / 'run/checkpoints/last')!r}).exists() and not eaten.exists():\n"
        "            eaten.touch()\n"
        "            while len(held) < 120:\n"
        "                held.append(b'x' * 2**26)\n"
        "                time.sleep(0.05)\n"
        "        return step(actions, active, stop_at_end)\n"
        "    env.chunk_step = chunk_step\n"
        "    return env\n"
        "vla_rl_plugins = {'env': {'hungry': dataclasses.replace(double, build=build)}}\n"
    )
    memory = psutil.virtual_memory()
    threshold = (memory.total - memory.available + 4 * 2**30) / memory.total
    monkeypatch.setenv("RAY_memory_usage_threshold", f"{threshold:.4f}")
    changes = {"train": {"checkpoint_every": 1}, "eval": {"before": False}}
    plugins = ["vla_rl.testing.scripted", str(tmp_path / "hungry.py")]
    placement = {"type": "hybrid", "sim": "cpu", "policy": "0", "learner": "0"}
    _, metrics = train(
        env={"type": "hungry"}, plugins=plugins, runtime={"backend": "ray"}, placement=placement, **changes
    )
    assert re.search(r"worker 0 \(sim; .* died: .*GB used / .*GB limit.*; .*lower env.num_envs", caplog.text)
    assert metrics == train("whole", **changes)[1]


def test_a_simulator_that_lost_a_call_and_lives_is_started_again_alone(train, tmp_path, monkeypatch, caplog):
    """Connections of the simulator break within a step, as after a long cut of the network. Where the path of a socket is
    too long, calls go through Ray as between machines."""
    (tmp_path / "torn.py").write_text(
        "import dataclasses, os, psutil, socket\n"
        "from pathlib import Path\n"
        "from vla_rl.testing.scripted import vla_rl_plugins as doubles\n"
        "double = doubles['env']['scripted']\n"
        f"torn, saved = Path({str(tmp_path / 'torn')!r}), Path({str(tmp_path / 'run/checkpoints/last')!r})\n"
        "def build(config, context):\n"
        "    env = double.build(config, context)\n"
        "    step = env.chunk_step\n"
        "    def chunk_step(actions, active, stop_at_end):\n"
        "        if saved.exists() and not torn.exists():\n"
        "            torn.touch()\n"
        "            found = psutil.Process().net_connections('tcp')\n"
        "            ports = {c.laddr.port for c in found if c.status == 'LISTEN'}\n"
        "            for c in found:\n"
        "                if c.raddr and c.laddr.port in ports:\n"
        "                    socket.socket(fileno=os.dup(c.fd)).shutdown(socket.SHUT_RDWR)\n"
        "        return step(actions, active, stop_at_end)\n"
        "    env.chunk_step = chunk_step\n"
        "    return env\n"
        "vla_rl_plugins = {'env': {'torn': dataclasses.replace(double, build=build)}}\n"
    )
    (tmp_path / ("long" * 25)).mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / ("long" * 25)))
    changes = {
        "runtime": {"backend": "ray"},
        "train": {"checkpoint_every": 1},
        "placement": {"type": "hybrid", "sim": "cpu", "policy": "0", "learner": "0"},
    }
    plugins = ["vla_rl.testing.scripted", str(tmp_path / "torn.py")]
    results, metrics = train(env={"type": "torn"}, plugins=plugins, **changes)
    assert (tmp_path / "torn").exists() and "continuing from the last checkpoint" not in caplog.text
    assert results["faults"] == 1
    assert metrics == train("whole", **changes)[1]

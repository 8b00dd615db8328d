"""Runs in containers with little or no shared memory, which is what Docker gives unless it is asked for more."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from containers import container_command

ROOT = Path(__file__).parents[3]
SHORT = [
    "train.steps=1",
    "train.lr_warmup_steps=0",
    "rollout.episodes=16",
    "env.num_envs=8",
    "eval.before=false",
    "eval.episodes_per_task=1",
    "placement={type: disaggregated, share_devices: true}",
]
ENV_PROCESS = """
import numpy as np
from vla_rl.toolkit.envs.env_process import SeparateProcess
from vla_rl.toolkit.envs.single_env import SingleEnv, View

class Still(SingleEnv):
    def reset(self, state_id, seed): pass
    def step(self, action): raise NotImplementedError
    def render(self): return View({}, np.ones(3, np.float32))

if __name__ == "__main__":
    process = SeparateProcess(lambda number: Still(), 0, np.zeros(1))
    process.send_requests("reset", {0: (0, 0)}, ())
    print(process.receive_answers(60.0)[0][1].state.sum())
    process.close()
"""


RUN = sys.executable, "-m", "vla_rl.cli.main", "run", "tabletop_grpo", *SHORT, "--folder"


def run_in_container(shared, *command):
    command = container_command(shared, *command)
    return subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=1700)


@pytest.mark.slow
@pytest.mark.parametrize("shared", ["64m", None])
def test_a_run_needs_no_shared_memory(tmp_path, shared):
    """Samples move to a learner in another worker, through Ray's object store."""
    folder = tmp_path / "run"
    ended = run_in_container(shared, *RUN, str(folder))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "/dev/shm" not in ended.stdout + ended.stderr
    assert (folder / "checkpoints" / "step_000001").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("shared", ["64m", None])
def test_the_tests_that_start_ray_pass(shared):
    arguments = "-q", "-p", "no:cacheprovider", "-m", "ray and not exhaustive and not sim", "tests"
    ended = run_in_container(shared, sys.executable, "-m", "pytest", *arguments)
    assert ended.returncode == 0, ended.stdout[-5000:]


@pytest.mark.slow
def test_a_run_whose_samples_have_no_room_is_refused_with_their_size(tmp_path):
    small_disk = 'mount -t tmpfs -o size=64m disk /mnt && RAY_TMPDIR=/mnt exec "$@"'
    ended = run_in_container("64m", "sh", "-c", small_disk, "sh", *RUN, str(tmp_path / "run"), "rollout.episodes=4096")
    assert ended.returncode == 2, ended.stdout + ended.stderr
    size = r"up to 0\.\d GiB of samples move to the learners in a step, and Ray has room for 0\.0 GiB in /dev/shm and for 0\.1"
    assert re.search(size, ended.stderr)


@pytest.mark.parametrize("shared", ["4k", None])
def test_an_env_process_needs_no_shared_memory(tmp_path, shared):
    """A lock between processes takes 4 KiB of /dev/shm."""
    script = tmp_path / "still.py"
    script.write_text(ENV_PROCESS)
    ended = run_in_container(shared, sys.executable, str(script))
    assert ended.stdout == "3.0\n", ended.stderr

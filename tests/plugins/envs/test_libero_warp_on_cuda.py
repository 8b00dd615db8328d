"""The code paths of `libero_warp` on CUDA, without a GPU: Warp's CPU device calls itself CUDA, and launches compute
nothing. `make libero-warp` runs these tests in an environment that has the packages."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vla_rl.cli import doctor
from vla_rl.core.errors import UserError
from vla_rl.plugins.envs.libero.warp.env import LiberoWarpEnv

wp = pytest.importorskip("warp", reason="warp is not installed; make libero-warp runs this test")
mjw = pytest.importorskip("mujoco_warp", reason="mujoco_warp is not installed; make libero-warp runs this test")

from libero_warp_kernels import Compiler, count_action, pretend_cuda, report_worlds, start_env  # noqa: E402

pytestmark = [pytest.mark.sim, pytest.mark.slow, pytest.mark.timeout(900)]

CAMERAS = {"agentview": 32, "wrist": 48}
EVERYONE = np.ones(2, bool)


@pytest.fixture(scope="module", params=[True, False], ids=["graphs", "no graphs"])
def started(request: pytest.FixtureRequest) -> Iterator[tuple[LiberoWarpEnv, Counter[str], bool]]:
    with pretend_cuda() as counts:
        env = start_env("libero_spatial", 0, cameras=CAMERAS, graphs=request.param)
        yield env, counts, request.param
        env.close()


@pytest.fixture(scope="module")
def env() -> Iterator[LiberoWarpEnv]:
    with pretend_cuda():
        env = start_env("libero_spatial", 0, cameras={})
        yield env
        env.close()


def step(env: LiberoWarpEnv, active: Any = EVERYONE, stop: bool = True) -> Any:
    return env.chunk_step(np.zeros((2, 2, 7), np.float32), np.asarray(active), stop)


def report(env: LiberoWarpEnv, **columns: Any) -> None:
    (batch,) = env._batches
    report_worlds(batch, **columns)


def begin(env: LiberoWarpEnv) -> None:
    report(env)
    env.reset(np.arange(2), np.array([0, 1]), np.zeros(2, np.int64))
    env.faults()


def build_batch(env: LiberoWarpEnv, num_worlds: int = 2) -> Any:
    task, start = env.host.find_start(0)
    return env._build_batch(task, start, num_worlds)


def test_an_action_is_three_launches_and_one_wait(started: Any) -> None:
    """A graph counts as one launch. The others copy the actions to where it reads them, and the report to the host."""
    env, counts, graphs = started
    begin(env)
    action = count_action(env, counts)
    counts.clear()
    env.chunk_step(np.zeros((2, 1, 7), np.float32), EVERYONE, False)
    chunk = counts["launches"] - action["launches"]
    assert action["waits"] == 1 and counts["waits"] == 1, "observations wait for nothing"
    if graphs:
        assert (action["launches"], action["graphs"], chunk <= 45) == (3, 1, True)
    else:
        assert action["launches"] > 1000 and not action["graphs"] and 45 < chunk < 60


def test_the_paths_of_a_step(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    env, *_ = started
    begin(env)
    result = step(env)
    assert result.executed.all() and not result.succeeded.any() and not env.faults()
    assert {name: image.shape[1:3] for name, image in result.obs.images.items()} == {
        name: (size, size) for name, size in CAMERAS.items()
    }
    report(env, success=[1, 0])
    result = step(env)
    assert result.executed.tolist() == [[True, False], [True, True]] and result.success.tolist() == [True, False]
    assert step(env, stop=False).succeeded[0].all() and step(env, [False, True]).executed[1].all()
    report(env, sound=[0, 1])
    assert step(env).executed.tolist() == [[False, False], [True, True]]
    assert "not finite" in env.faults()[0][0]
    begin(env)
    report(env, overflow=[0, int(mjw.OverflowType.NEFC)])
    assert step(env).executed.tolist() == [[True, True], [False, False]]
    assert "raise env.constraints" in env.faults()[1][0]


def test_a_crowded_world_breaks_and_the_action_is_repeated(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    env, *_ = started
    begin(env)
    (batch,) = env._batches
    real, calls = batch._apply_action, list[int]()
    overflow = int(mjw.OverflowType.NARROWPHASE)

    def apply() -> Any:
        calls.append(1)
        report(env, overflow=[overflow, 0] if len(calls) == 1 else 0, contacts=[7, 999])
        return real()

    monkeypatch.setattr(batch, "_apply_action", apply)
    assert step(env).executed.tolist() == [[True, True], [False, False]]
    assert len(calls) == 3 and "at least 999 contacts" in env.faults()[1][0]
    begin(env)
    report(env, overflow=overflow)
    monkeypatch.setattr(batch, "_apply_action", real)
    with pytest.raises(UserError, match="does not suffice for the start of an episode either"):
        step(env)
    report(env)


def test_another_simulator_on_the_gpu_restores_a_snapshot(started: Any) -> None:
    env, *_ = started
    begin(env)
    snapshot = env.snapshot()
    env.restore(snapshot)
    again = env.snapshot()["batches"][0][2]
    assert all((values == again[name]).all() for name, values in snapshot["batches"][0][2].items())


def test_a_graph_that_cannot_be_captured_is_named(env: LiberoWarpEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wp.ScopedCapture, "fails", "operation not permitted when stream is capturing")
    with pytest.raises(UserError, match=r"CUDA graph: operation not permitted.*env.graphs: false, which launches"):
        build_batch(env)


def test_a_driver_that_is_too_old_is_named(env: LiberoWarpEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wp, "is_cuda_available", lambda: False)
    monkeypatch.setattr(wp, "get_cuda_driver_version", lambda: (12, 8))
    with pytest.raises(
        UserError, match=r"Warp 1\.\d+\S* finds no GPU: it is built for CUDA \d+\.\d, and .* offers 12\.8"
    ):
        build_batch(env)


def test_worlds_that_do_not_fit_are_refused(env: LiberoWarpEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * 2**30, 80 * 2**30))
    assert build_batch(env).num_worlds == 2
    with pytest.raises(UserError, match=r"4096 worlds need about \d+ MiB, and 3072 of the GPU's 81920 MiB are free"):
        build_batch(env, 4096)


def test_another_process_on_the_gpu_is_named(env: LiberoWarpEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes memory after the prediction, or has the GPU for itself."""

    def fail(text: str) -> Any:
        def call(*_: Any, **__: Any) -> None:
            raise RuntimeError(text)

        return call

    monkeypatch.setattr(mjw, "put_data", fail("Failed to allocate 7 bytes on device 'cuda:0'"))
    with pytest.raises(UserError, match=r"2 worlds cannot be allocated: Failed to allocate 7 .*Other processes on"):
        build_batch(env)
    monkeypatch.setattr(torch.cuda, "mem_get_info", fail("all CUDA-capable devices are busy or unavailable"))
    with pytest.raises(UserError, match="cannot be allocated: all CUDA-capable devices are busy"):
        build_batch(env)


def test_the_predicted_memory_is_what_warp_allocates(env: LiberoWarpEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    """The most that is allocated during an action, in worlds that are added. What a sub-step allocates is given back
    without the help of the garbage collector: only then do the sub-steps of a graph share it."""
    monkeypatch.setattr(env, "_config", type(env._config)(suite="libero_spatial", cameras=CAMERAS, graphs=False))
    core, counted, held, peaks = wp._src.context.runtime.core, wp.launch, list[int](), dict[int, int]()

    def launch(*arguments: Any, **named: Any) -> Any:
        held.append(core.wp_alloc_tracker_get_current_bytes())
        return counted(*arguments, **named)

    monkeypatch.setattr(wp, "launch", launch)
    with wp.ScopedMemoryTracker("worlds", print=False):
        for num_worlds in (4, 12):
            gc.collect()
            before, batch = core.wp_alloc_tracker_get_current_bytes(), build_batch(env, num_worlds)
            held.clear()
            gc.disable()
            batch._launch_action()
            gc.enable()
            sizes, peaks[num_worlds] = batch.sizes, max(held) - before
            del batch
    predicted = sizes.predict_bytes(12, CAMERAS) - sizes.predict_bytes(4, CAMERAS)
    assert 1.0 < predicted / (peaks[12] - peaks[4]) < 1.2


def test_a_worker_has_a_device_without_a_number(env: LiberoWarpEnv) -> None:
    """Warp raises TypeError for such a torch.device, and takes its name."""
    assert str(env._device) == "cuda"
    with pytest.raises(TypeError):
        wp.device_from_torch(torch.device("cuda"))
    assert build_batch(env)._report is not None


def test_modules_are_compiled_once_in_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warp brings the compiler: no GPU is needed."""
    monkeypatch.setattr(wp.config, "kernel_cache_dir", str(tmp_path))
    modules = [wp.get_module(f"vla_rl.plugins.envs.libero.warp.{name}") for name in ("kernels", "success")]
    for arch, result in ((90, "compiled"), (90, "in the cache"), (1, "failed")):
        compiler = Compiler(jobs=2, arch=arch)
        for module in modules * 2:
            compiler.add(module, 256)
        compiler.finish()
        assert compiler.results == {result: 2}
    assert len(list(tmp_path.rglob("*.sm90.cubin"))) == 2


STAGES = {
    "kernels": ["compiled", "in the cache", "failed"],
    "warp_probe": ["libero_spatial: one action against C MuJoCo, at most"],
    "warp_speed": ["2 worlds, two cameras of 16 px", "2 worlds, without images"],
    "warp_split": ["2 worlds, 16 px: action, the graph alone", "2 worlds, 16 px: capturing the graph of an action"],
    "warp_start": ["2 worlds, after a first chunk of 8 actions"],
    "warp_ppo": ["step 2: success of its rollout", "run, start and end included"],
}
"""Stages of the GPU's benchmark -> some of their figures."""
WITH_GL = {"warp_libero": ["1 envs, two cameras of 16 px"]}
"""Stage in which the simulator `libero` draws."""


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("stages", [STAGES, WITH_GL], ids=["libero_warp alone", "libero beside it"])
def test_the_stages_of_a_card_run_to_their_end(stages: dict[str, list[str]], tmp_path: Path) -> None:
    """On a card, minutes are few: nothing of the benchmark's own may fail there."""
    if stages is WITH_GL and not (probe := doctor.probe_rendering("egl")).works:
        pytest.skip(f"EGL does not work here: {probe.detail}")
    file = tmp_path / "figures.json"
    command = [sys.executable, Path(__file__).parents[3] / "benchmarks" / "gpu.py", "--tiny", "--minutes", "14"]
    command += ["--folder", tmp_path, "--json", file, "--only", *stages]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    logs = [log.read_text()[-2000:] for log in tmp_path.glob("*.log")]
    assert done.returncode == 0, done.stdout + done.stderr + "\n".join(logs)
    figures = json.loads(file.read_text())
    for stage, expected in stages.items():
        of_stage = [figure["name"] for figure in figures if figure["name"].startswith(stage)]
        assert {f"{stage}: {name}" for name in expected} <= set(of_stage)
        assert [
            f"{stage}: {figure['name']}" for figure in json.loads((tmp_path / f"{stage}.json").read_text())
        ] == of_stage

"""What this machine's GPU does with vla-rl, a table for each stage: no network, at most eight minutes or as many as
you give. All stages take about 35 minutes on an H200, most of them for the compiler, random weights and a training.

    python benchmarks/gpu.py [--only STAGE ...] [--folder FOLDER] [--json FILE] [--before FILE] [--minutes 8]
    python benchmarks/gpu.py --tiny                    # the same code on a CPU, which checks it and no more

Stages, in order of worth, each in a separate process with a limit of seconds:
  kernels     kernels of libero_warp that Warp's cache lacks, compiled by all cores
  warp_probe  device, one action and its agreement with C MuJoCo
  warp_speed  libero_warp in 256 and 1,024 worlds, without images and with two cameras of 128 and 224 px
  warp_libero the simulator libero on all cores beside it
  warp_split  what a chunk of libero_warp consists of
  warp_start  the first action of a process that finds its kernels in the cache
  warp_ppo    examples/libero_warp_ppo.yaml: two steps, or with --clone until 90 % of a rollout succeed; with --libero
              the official evaluation then
  smoke       the tests marked `gpu` (placements on one GPU, offload, resume, a full device) and the quickstart's spec
  card        rates of the card: a bfloat16 product of matrices, a copy, transfers from the host
  pi05, pi0   decisions (ten and four denoising steps) and learner steps
  frozen      learner step, decision and log-probs of the 7.5B OpenVLA-OFT with `frozen_weights` of each kind
  oft_step    a learner step of OpenVLA-OFT (7.5B, LoRA): eager, compiled blocks, selective recomputation
  oft_act     its decisions: eager, merged adapters, compiled blocks, CUDA graphs
  openvla     actions of autoregressive OpenVLA (7 tokens): eager, compiled blocks, CUDA graphs
  weights     1 GB of weights between two processes of the GPU
  simulator   the tabletop simulator, rendered environment steps per second
  control     rollouts of 1,024 and 4,096 tabletop envs without a network: time of the runtime beyond the simulator
  run         a training step of the 7.5B OpenVLA-OFT on the tabletop at 224 px

The first seven need the extra `libero-warp`, and are left out where it is missing. Random weights of the public sizes
in bfloat16. A stage that does not fit into the memory says so and ends. Figures are medians of `REPEATS` calls after a
warm-up, with the device synchronised. Each is in FOLDER/STAGE.json as soon as it is there, beside STAGE.log,
so that a machine that is lost takes no more than one figure with it. `--before` shows the figures of an
earlier `--json` next to these. `limit` is the share of the floating-point operations that the card's measured product
of matrices could have done meanwhile. With `--tiny`, kernels of libero_warp compute nothing, on a CPU that calls itself
CUDA.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import torch
from attrs import asdict, evolve, frozen
from measuring import command_line, listen, write_json
from rich.console import Console
from rich.table import Table
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).parents[1]
REPEATS = 3
LIMITS = {
    "kernels": 240,
    "warp_probe": 90,
    "warp_speed": 180,
    "warp_libero": 90,
    "warp_split": 90,
    "warp_start": 60,
    "warp_ppo": 600,
    "smoke": 180,
    "card": 40,
    "pi05": 170,
    "pi0": 170,
    "frozen": 240,
    "oft_step": 240,
    "oft_act": 150,
    "openvla": 90,
    "weights": 60,
    "simulator": 40,
    "control": 60,
    "run": 120,
}
"""Stage -> seconds after which it is ended, on a card."""
GIB = 2**30
WELL = 0.9
"""Share of a rollout's episodes whose success ends `warp_ppo`."""


@frozen(kw_only=True)
class Figure:
    """One measured number."""

    name: str
    value: float
    unit: str
    limit: float | None = None
    """Share of the card's rate."""
    gib: float | None = None
    """Peak of the device's memory."""


class Stage:
    """Measurements of one stage."""

    def __init__(self, tiny: bool, file: Path, clone: Path | None = None, libero: Path | None = None) -> None:
        self.tiny = tiny
        self.file = file
        """File that has the figures so far, also of a stage that is ended."""
        self.clone = clone
        """Weights from which `warp_ppo` starts."""
        self.libero = libero
        """Python of an environment with the extra libero, in which `warp_ppo` is evaluated; None: it is not."""
        self.failed: list[str] = []
        """Parts of the stage that failed."""
        self.device = "cpu" if tiny else "cuda"
        self.preset = "tiny" if tiny else "full"
        self.figures: list[Figure] = []
        self._rate: float | None = None

    def report(self, name: str, value: float, unit: str, **details: float | None) -> None:
        self.figures.append(Figure(name=name, value=float(value), unit=unit, **details))
        self.file.write_text(json.dumps([asdict(figure) for figure in self.figures]))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Context of a part that may fail without the parts after it."""
        try:
            yield
        except Exception:
            traceback.print_exc()
            self.failed.append(name)

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], Any], repeats: int = REPEATS) -> float:
        """Return the median seconds of a call, after one to warm up."""
        times = []
        for _ in range(repeats + 1):
            self.wait()
            start = perf_counter()
            work()
            self.wait()
            times.append(perf_counter() - start)
        return statistics.median(times[1:])

    @property
    def rate(self) -> float:
        """Floating-point operations a second of a large bfloat16 product."""
        if self._rate is None:
            side = 256 if self.tiny else 8192
            a, b = (torch.randn(side, side, device=self.device, dtype=torch.bfloat16) for _ in range(2))
            self._rate = 2 * side**3 / self.seconds(lambda: a @ b)
        return self._rate

    def measure(self, name: str, rows: int, unit: str, work: Callable[[], Any], flops: float | None = None) -> bool:
        """Report the rows a second of `work`; return False where it does not fit into the memory."""
        gc.collect()  # a compiled policy and its code refer to each other
        if self.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            rate = rows / self.seconds(work)
        except torch.OutOfMemoryError:
            self.report(f"{name}: out of memory", 0.0, unit)
            return False
        gib = torch.cuda.max_memory_allocated() / GIB if self.device == "cuda" else None
        self.report(name, rate, unit, gib=gib, limit=None if flops is None else rate * flops / self.rate)
        return True


@contextmanager
def warp_device(stage: Stage) -> Iterator[str]:
    """Context with the device of libero_warp; with tiny sizes a CPU that calls itself CUDA and computes nothing."""
    if not stage.tiny:
        yield "cuda"
        return
    sys.path.append(str(ROOT / "tools"))
    from libero_warp_kernels import pretend_cuda

    with pretend_cuda():
        yield "cuda"


def kernels(stage: Stage) -> None:
    sys.path.append(str(ROOT / "tools"))
    from libero_warp_kernels import RESULTS, Compiler, compile_kernels

    start, cores = perf_counter(), len(os.sched_getaffinity(0))
    if stage.tiny:
        import warp as wp

        with tempfile.TemporaryDirectory() as wp.config.kernel_cache_dir:
            compiler = Compiler(cores, 90)
            compiler.add(wp.get_module("vla_rl.plugins.envs.libero.warp.kernels"), 256)
            compiler.finish()
        results = compiler.results
    else:
        results = compile_kernels(["libero_spatial/0"], cores, None)
    stage.report(f"compiling on {cores} cores", perf_counter() - start, "s")
    for result in RESULTS:
        stage.report(result, results[result], "modules")


def warp_probe(stage: Stage) -> None:
    import warp as wp
    from libero_warp import measure_agreement

    wp.init()
    versions = wp.get_cuda_toolkit_version(), wp.get_cuda_driver_version()
    stage.report(f"GPUs that Warp {wp.config.version} finds, CUDA {versions}", len(wp.get_cuda_devices()), "GPUs")
    for suite in ("libero_spatial",) if stage.tiny else ("libero_spatial", "libero_object"):
        with stage.part(suite), warp_device(stage) as device:
            start = perf_counter()
            result = measure_agreement(suite, 0, 1 if stage.tiny else 8, device)
            stage.report(f"{suite}: one action against C MuJoCo, at most", 1e6 * result["max"], "um or urad")
            stage.report(f"{suite}: the same, median", 1e6 * result["median"], "um or urad")
            stage.report(f"{suite}: scenes, kernels and all", perf_counter() - start, "s")


def warp_speed(stage: Stage) -> None:
    from libero_warp import MIB, measure_speed

    host = None
    cases = ((256, 128), (1024, 0), (1024, 128), (256, 0), (256, 224), (1024, 224))
    for num_envs, size in ((2, 16), (2, 0)) if stage.tiny else cases:
        name = f"{num_envs} worlds, {f'two cameras of {size} px' if size else 'without images'}"
        with stage.part(name), warp_device(stage) as device:
            result = measure_speed(num_envs, size, device, 0.1 if stage.tiny else 4, host)
            host = result["host"]
            stage.report(name, result["per_s"], "env steps/s", gib=result["mib"] * MIB / GIB)
            stage.report(f"{name}: predicted memory", result["predicted_mib"] * MIB / GIB, "GiB")
            stage.report(f"{name}: first reset and chunk", result["start_s"], "s")
            stage.report(f"{name}: worlds that broke", result["faults"], "worlds")
        gc.collect()  # batches, whose memory the next one needs


def warp_libero(stage: Stage) -> None:
    from libero_warp import measure_libero

    num_envs = 1 if stage.tiny else 2 * len(os.sched_getaffinity(0))
    for size in (0, 16) if stage.tiny else (0, 128, 224):
        name = f"{num_envs} envs, {f'two cameras of {size} px' if size else 'without images'}"
        with stage.part(name):
            stage.report(name, measure_libero(num_envs, size, 0.1 if stage.tiny else 6), "env steps/s")


def warp_split(stage: Stage) -> None:
    from libero_warp import list_parts, start_worlds

    host = None
    for num_envs, size in ((2, 16),) if stage.tiny else ((256, 128), (1024, 128)):
        name = f"{num_envs} worlds, {size} px"
        with stage.part(name), warp_device(stage) as device:
            env = start_worlds(num_envs, size, device, host)
            host = env.host
            for part, work in list_parts(env, device).items():
                stage.report(f"{name}: {part}", 1000 * stage.seconds(work), "ms")
        gc.collect()


def warp_start(stage: Stage) -> None:
    """Time from the start of this process, which imports first of all."""
    import psutil
    from libero_warp import CHUNK, draw_actions, start_worlds

    def seconds() -> float:
        return time.time() - psutil.Process().create_time()

    num_envs, size = (2, 16) if stage.tiny else (256, 128)
    with warp_device(stage) as device:
        stage.report("process, after imports", seconds(), "s")
        env = start_worlds(num_envs, size, device)
        stage.report(f"{num_envs} worlds, after their first reset", seconds(), "s")
        env.chunk_step(draw_actions(num_envs, device), torch.ones(num_envs, dtype=torch.bool), False)
        stage.wait()
        stage.report(f"{num_envs} worlds, after a first chunk of {CHUNK} actions", seconds(), "s")


def warp_ppo(stage: Stage) -> None:
    """Train until `WELL` of a rollout's episodes succeed, or without a clone for two steps, and evaluate in libero."""
    from vla_rl.core.spec.spec import load_spec
    from vla_rl.runtime.start import evaluate
    from vla_rl.runtime.start import run as train

    examples, start = ROOT / "examples", perf_counter()
    small = ["env.cameras.agentview=16", "env.cameras.wrist=16", "rollout.max_steps=8", "eval.episodes_per_task=1"]
    small = small if stage.tiny else []
    overrides = ["plugins=[measuring]", *small]
    overrides += ["train.steps=2"] if stage.clone is None else [f"model.checkpoint={stage.clone}"]
    if stage.tiny:
        overrides += ["env.num_envs=2", "rollout.episodes=2", "train.micro_batch=2", "train.global_batch=2"]

    def note_step(run: Any, step: int, metrics: dict[str, float]) -> None:
        for name, key, unit in (
            ("rollout", "time/rollout", "s"),
            ("update", "time/update", "s"),
            ("all of it", "throughput/env_steps_per_s", "env steps/s"),
            ("success of its rollout", "env/success_rate", "share"),
        ):
            stage.report(f"step {step}: {name}", metrics[key], unit)
        stage.report(f"step {step}: since the start", perf_counter() - start, "s")
        if metrics["env/success_rate"] >= WELL:
            run.stop(f"{WELL:.0%} of a rollout succeed")

    folder = Path(tempfile.mkdtemp(prefix="warp_ppo.run.", dir=stage.file.parent))
    with listen(note_step), warp_device(stage):
        train(load_spec(examples / "libero_warp_ppo.yaml", overrides), folder, False)
    stage.report("run, start and end included", perf_counter() - start, "s")
    if stage.libero is None:
        return
    envs = 1 if stage.tiny else 2 * len(os.sched_getaffinity(0))
    overrides = [f"env.num_envs={envs}", f"env.python={stage.libero}", *small]
    results = evaluate(load_spec(examples / "libero_spatial_ppo.yaml", overrides), folder / "checkpoints" / "last")
    stage.report("success in libero", 100 * results["success"]["rate"], "%")
    stage.report("everything", perf_counter() - start, "s")


def smoke(stage: Stage) -> None:
    """Run the tests that need a GPU, and the quickstart's spec."""
    from vla_rl.core.spec.spec import load_spec
    from vla_rl.runtime.start import run

    if not stage.tiny:
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        summary = (done.stdout.strip().splitlines() or ["nothing"])[-1]
        if done.returncode:
            sys.stderr.write(done.stdout[-4000:])
        stage.report(f"tests marked gpu: {summary.strip('= ')}", float(done.returncode == 0), "passed")
    short = ["train.steps=1", "env.num_envs=8", "rollout.episodes=8", "eval.episodes_per_task=1", "eval.before=false"]
    overrides = ["runtime.backend=local", *(short if stage.tiny else [])]
    with tempfile.TemporaryDirectory() as folder:
        start = perf_counter()
        results = run(load_spec(ROOT / "examples" / "tabletop_grpo.yaml", overrides), Path(folder) / "run", False)
        stage.report("quickstart, start and evaluations included", perf_counter() - start, "s")
    stage.report("quickstart, success after training", 100 * results["success"]["rate"], "%")


def card(stage: Stage) -> None:
    stage.report("bfloat16 product of matrices", stage.rate / 1e12, "TFLOP/s")
    count = 2**20 if stage.tiny else 2**30
    source, target = (torch.empty(count, dtype=torch.uint8, device=stage.device) for _ in range(2))
    stage.report("copy, read and write", 2 * count / stage.seconds(lambda: target.copy_(source)) / 1e12, "TB/s")
    for pinned in (False, True) if stage.device == "cuda" else (False,):
        host = torch.empty(count, dtype=torch.uint8, pin_memory=pinned)
        seconds = stage.seconds(lambda memory=host: target.copy_(memory, non_blocking=True))
        stage.report(f"from the host, {'pinned' if pinned else 'pageable'}", count / seconds / 1e9, "GB/s")


def frozen(stage: Stage) -> None:
    """Measure weights stored in fewer bits with equal adapters, how far their log-probs are from bf16's, and vision
    features that are kept from acting."""
    from learner import Learner, noise

    from vla_rl.toolkit.models.adapters import LoRAConfig
    from vla_rl.toolkit.models.frozen_weights import find_fp8_problem

    rows, few = (2, 2) if stage.tiny else (32, 4)
    exact = None
    kept = {"freeze_vision": True, "reuse_vision_features": True}
    for kind, further in (("bf16", {}), ("fp8", {}), ("bf16", kept), ("fp8", kept), ("nf4", {}), ("int8", {})):
        if kind == "fp8" and find_fp8_problem(torch.device(stage.device)):
            continue  # a CPU and cards before Ada do not multiply in FP8
        config = {"dtype": "bfloat16", "autocast": True, "lora": LoRAConfig(rank=4 if stage.tiny else 32)} | further
        learner = Learner(stage.preset, rows, stage.device, frozen_weights=kind, **config)
        name = f"{kind}, vision features kept" if further else kind
        if not further:
            if exact is None:
                exact, chunk = log_probs_of(learner), learner.chunk
            else:
                learner.chunk = chunk
                difference = (log_probs_of(learner) - exact).abs().mean()
                stage.report(f"{name}, mean absolute difference of log-probs", float(difference), "nats")
        if kind == "nf4":
            learner.record(few)
            stage.measure(f"{name}, learner step, eager, micro-batch {few}", few, "samples/s", learner.step)
            learner.record(rows)
        compile_blocks(stage, learner.policy)
        stage.measure(f"{name}, learner step, compiled, micro-batch {rows}", rows, "samples/s", learner.step)
        if not further:
            capture(stage, learner.policy)
            decide(stage, f"{name}, decision, CUDA graphs", learner.policy, learner.env, noise, (1, 32))
        del learner


def oft_step(stage: Stage) -> None:
    from learner import Learner

    from vla_rl.toolkit.models.adapters import LoRAConfig

    micro_batches = (2, 4) if stage.tiny else (8, 16, 32)
    largest = micro_batches[-1:]  # a run has one size, too; code that is compiled for several is slower
    for recompute, sizes in (("off", micro_batches), ("selective", largest)):
        config = {"dtype": "bfloat16", "autocast": True, "lora": LoRAConfig(rank=4 if stage.tiny else 32)}
        learner = Learner(stage.preset, 1, stage.device, recompute=recompute, **config)
        flops: dict[int, float] = {}
        for mode in ("eager", "compiled blocks"):
            if mode != "eager":
                compile_blocks(stage, learner.policy)
            for rows in sizes if mode == "eager" else largest:
                learner.optimiser.zero_grad(set_to_none=True)
                learner.record(rows)
                if rows not in flops:  # counted in eager mode: a compiled block shows none of its operators
                    flops[rows] = operations(learner.step) / rows
                name = f"learner step, recompute {recompute}, {mode}, micro-batch {rows}"
                if not stage.measure(name, rows, "samples/s", learner.step, flops[rows]):
                    break
        del learner


def oft_act(stage: Stage) -> None:
    from learner import Learner, noise

    from vla_rl.toolkit.models.adapters import LoRAConfig, MergedAdapters

    config = {"dtype": "bfloat16", "autocast": True, "lora": LoRAConfig(rank=4 if stage.tiny else 32)}
    learner = Learner(stage.preset, 1, stage.device, **config)
    policy = learner.policy
    decide(stage, "decision, eager", policy, learner.env, noise)
    MergedAdapters(policy.module, "in_place").merge_weights()
    decide(stage, "decision, merged adapters", policy, learner.env, noise)
    compile_blocks(stage, policy)
    decide(stage, "decision, merged, compiled blocks", policy, learner.env, noise)
    capture(stage, policy)
    decide(stage, "decision, merged, CUDA graphs", policy, learner.env, noise)


def openvla(stage: Stage) -> None:
    from learner import ACTION_DIM, PIXELS, TEMPERATURE, noise

    from vla_rl.core.contexts import ModelContext
    from vla_rl.plugins.models.openvla import openvla as plugin
    from vla_rl.plugins.models.openvla.config import OpenVLAARConfig
    from vla_rl.testing import synthetic

    env = synthetic.env_info(cameras=1, pixels=PIXELS.get(stage.preset, 64), state_dim=0, action_dim=ACTION_DIM)
    context = ModelContext(env=env, chunk=1, temperature=TEMPERATURE, device=stage.device)
    policy = plugin.build(OpenVLAARConfig(preset=stage.preset, dtype="bfloat16"), context)
    decide(stage, "action, eager", policy, env, noise)
    compile_blocks(stage, policy)
    decide(stage, "action, compiled blocks", policy, env, noise)
    capture(stage, policy)
    decide(stage, "action, CUDA graphs", policy, env, noise)


def flow(stage: Stage, plugin: Any, config: Any, **keys: Any) -> None:
    """Measure pi0 or pi0.5: decisions, then learner steps of the expert."""
    from learner import Learner, noise

    from vla_rl.core.contexts import ModelContext
    from vla_rl.testing import synthetic
    from vla_rl.toolkit.models.frozen_weights import find_fp8_problem

    class FlowStep(Learner):
        def __init__(self, rows: int, **changes: Any) -> None:
            self.env = synthetic.env_info(cameras=2, pixels=64 if stage.tiny else 224, state_dim=8, action_dim=7)
            context = ModelContext(env=self.env, chunk=4 if stage.tiny else 10, values="chunk", device=stage.device)
            settings = config(preset=stage.preset, dtype="bfloat16", **{"denoise_steps": 4} | keys | changes)
            self.policy = plugin.build(settings, context)
            self.optimise(rows)

    kinds = ["bf16"] if find_fp8_problem(torch.device(stage.device)) else ["bf16", "fp8"]
    for kind in kinds:
        learner = FlowStep(1, denoise_steps=10, frozen_weights=kind)
        compile_blocks(stage, learner.policy)
        capture(stage, learner.policy)
        name = f"decision of 10 denoising steps, {kind}, CUDA graphs"
        decide(stage, name, learner.policy, learner.env, noise, (1, 32))
        del learner
    learner = FlowStep(1)
    for mode in ("eager", "compiled blocks", "CUDA graphs"):
        if mode == "compiled blocks":
            compile_blocks(stage, learner.policy)
        if mode == "CUDA graphs":
            eager_decide = learner.policy.decide
            capture(stage, learner.policy)
        decide(stage, f"decision, {mode}", learner.policy, learner.env, noise)
    learner.policy.decide = eager_decide
    sizes = (2,) if stage.tiny else (8, 32, 64)
    for rows in sizes:
        learner.optimiser.zero_grad(set_to_none=True)
        learner.record(rows)
        stage.measure(f"learner step, compiled blocks, micro-batch {rows}", rows, "samples/s", learner.step)
    del learner
    rows = sizes[len(sizes) // 2]
    learner = FlowStep(rows, reuse_prefix=True)
    compile_blocks(stage, learner.policy)
    name = f"learner step, prefix kept, compiled blocks, micro-batch {rows}"
    stage.measure(name, rows, "samples/s", learner.step)


def pi0(stage: Stage) -> None:
    from vla_rl.plugins.models.pi0 import plugin as pi0_plugin
    from vla_rl.plugins.models.pi0.config import Pi0Config

    flow(stage, pi0_plugin, Pi0Config)


def pi05(stage: Stage) -> None:
    from vla_rl.plugins.models.pi0 import pi05 as pi05_plugin
    from vla_rl.plugins.models.pi0.config import Pi05Config

    # With the state in it the prompt has another length at every step, and a graph has one.
    flow(stage, pi05_plugin, Pi05Config, state_in_prompt="none")


def weights(stage: Stage) -> None:
    """Run benchmarks/weight_transfer.py on this GPU."""
    strategies = ["host"] if stage.tiny else ["ipc", "host"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        command = [sys.executable, str(ROOT / "benchmarks" / "weight_transfer.py"), "--device", stage.device]
        command += ["--strategies", *strategies, "--repeats", "3", "--json", str(file)]
        command += ["--gigabytes", "0.01" if stage.tiny else "1"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        for strategy, measured in json.loads(file.read_text()).items():
            stage.report(f"transfer, {strategy}", measured["transfer_s"], "s")
            stage.report(f"transfer, {strategy}, relative to a copy on the device", measured["ratio"], "times")
            stage.report(f"transfer, {strategy}, the receiver's further memory", measured["receiver_extra_mib"], "MiB")


def simulator(stage: Stage) -> None:
    from vla_rl.core.catalogue import build
    from vla_rl.core.contexts import EnvContext
    from vla_rl.plugins.envs.tabletop.config import TabletopConfig

    chunk = 4
    for num_envs, pixels in ((8, 32),) if stage.tiny else ((256, 64), (1024, 64), (4096, 64), (1024, 224)):
        context = EnvContext(num_envs=num_envs, chunk=chunk, device=stage.device)
        env = build("env", "tabletop", TabletopConfig(image_size=pixels), context)
        ids = torch.arange(num_envs).numpy()
        states = [state.id for state in env.reset_states("train")]
        env.reset(ids, torch.tensor([states[i % len(states)] for i in range(num_envs)]).numpy(), ids)
        actions = torch.zeros(num_envs, chunk, env.info.action_dim)
        active = torch.ones(num_envs, dtype=torch.bool)
        name = f"tabletop, {num_envs} envs of {pixels} px"
        stage.measure(
            name, num_envs * chunk, "env steps/s", lambda e=env, a=actions, b=active: e.chunk_step(a, b, False)
        )
        env.close()


def control(stage: Stage) -> None:
    from runtime import ScaleCase, scale

    for num_envs in (8,) if stage.tiny else (1024, 4096):
        case = ScaleCase(name=f"{num_envs:,} envs", num_envs=num_envs, algorithm="ppo", auto_reset=True)
        runtime_us, simulator_us = scale(case, stage.device, REPEATS)
        stage.report(f"runtime, {case.name}, beyond the simulator", runtime_us, "us/env step")
        stage.report(f"simulator, {case.name}", simulator_us, "us/env step")


def run(stage: Stage) -> None:
    """Train one step of OpenVLA-OFT on the tabletop, with everything that a run does."""
    from vla_rl.core.spec.spec import parse_spec
    from vla_rl.runtime.start import run as train

    envs = 4 if stage.tiny else 64
    lora = {"lora": {"rank": 4 if stage.tiny else 32}, "dtype": "bfloat16"}
    spec = parse_spec(
        {
            "name": "gpu",
            "model": {"type": "openvla_oft", "preset": stage.preset, **lora},
            "env": {"type": "tabletop", "num_envs": envs, "image_size": 32 if stage.tiny else 224},
            "rollout": {"chunk": 8, "episodes": envs, "group_size": 4, "max_steps": 32},
            "algorithm": {"type": "grpo"},
            "runtime": {"backend": "local"},
            "train": {"steps": 3, "lr": 1e-5, "micro_batch": 2 if stage.tiny else 16, "precision": "bf16"},
            "eval": {"before": False, "episodes_per_task": 1},
            "hooks": [{"type": "jsonl"}],
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        train(spec, Path(folder) / "run", False)
        lines = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if "time/rollout" in line][-1]
    steps = last["rollout/env_steps"]
    stage.report("rollout of a step", last["time/rollout"], "s")
    stage.report("update of a step", last["time/update"], "s")
    stage.report("environment steps", steps / (last["time/rollout"] + last["time/update"]), "env steps/s")


OF_WARP = (kernels, warp_probe, warp_speed, warp_libero, warp_split, warp_start, warp_ppo)
OTHERS = (smoke, card, pi05, pi0, frozen, oft_step, oft_act, openvla, weights, simulator, control, run)
STAGES: dict[str, Callable[[Stage], None]] = {stage.__name__: stage for stage in (*OF_WARP, *OTHERS)}


def decide(
    stage: Stage,
    name: str,
    policy: Any,
    env: Any,
    noise: Callable[[int], Any],
    batches: tuple[int, ...] = (1, 8, 32, 64),
) -> None:
    from vla_rl.testing import synthetic

    for rows in (1, 2) if stage.tiny else batches:
        obs, keys = synthetic.observation(env, rows), noise(rows)
        stage.measure(f"{name}, batch {rows}", rows, "chunks/s", lambda o=obs, k=keys: policy.sample_chunk(o, k, False))


def log_probs_of(learner: Any) -> torch.Tensor:
    """Return the log-probs of the recorded chunks, without what a backward pass needs: 60 GiB at full size."""
    with torch.no_grad():
        log_probs: torch.Tensor = learner.scores().log_probs
    return log_probs


def compile_blocks(stage: Stage, policy: Any) -> None:
    from vla_rl.toolkit.models.acting.compilation import CompiledBlocks

    backend = "eager" if stage.tiny else "inductor"
    CompiledBlocks(policy.module, policy.blocks, regions=policy.regions, policy=policy, backend=backend)


def capture(stage: Stage, policy: Any) -> None:
    from vla_rl.toolkit.models.acting.cuda_graphs import CapturedFunction, CudaGraphRecorder

    if stage.tiny:  # on a CPU, by the stand-in of the tests
        sys.path.append(str(Path(__file__).parents[1] / "tests"))
        from eager_recorder import EagerRecorder

        recorder: Any = EagerRecorder()
    else:
        recorder = CudaGraphRecorder(torch.device("cuda"))
    policy.decide = CapturedFunction(policy.decide, recorder)


def operations(work: Callable[[], Any]) -> float:
    """Return the floating-point operations of a call; NaN where it does not fit into the memory."""
    try:
        with FlopCounterMode(display=False) as counter:
            work()
    except torch.OutOfMemoryError:
        return math.nan
    return float(counter.get_total_flops())


# ---------------------------------------------------------------------------------------------------- the command


def run_stage(name: str, arguments: argparse.Namespace, seconds: float, folder: Path) -> tuple[list[Figure], str]:
    """Run a stage in a separate process. Return its figures and what went wrong ("": nothing)."""
    file, log = folder / f"{name}.json", folder / f"{name}.log"
    file.unlink(missing_ok=True)  # of an earlier call
    command = [sys.executable, __file__, "--stage", name, "--json", str(file), *(["--tiny"] if arguments.tiny else [])]
    for option in ("clone", "libero"):
        command += [f"--{option}", str(value)] if (value := getattr(arguments, option)) else []
    environment = os.environ | {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    with log.open("wb") as printed:
        process = subprocess.Popen(
            command, env=environment, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(seconds)
            last = (log.read_text(errors="replace").strip().splitlines() or [f"exit code {code}"])[-1]
            problem = last if code else ""
        except subprocess.TimeoutExpired:
            problem = f"ended after its limit of {seconds:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with its simulators, which keep the GPU's memory
    figures = [Figure(**figure) for figure in json.loads(file.read_text())] if file.exists() else []
    return figures, problem


def show(figures: list[Figure], before: dict[str, float]) -> None:
    """Print figures in a table. `before`: name of a figure -> its value in an earlier recording."""
    table = Table("measured", "value", "unit", "of the limit", "GiB", "before", box=None, pad_edge=False)
    for column in (1, 3, 4, 5):
        table.columns[column].justify = "right"
    for figure in figures:
        limit = "" if figure.limit is None else f"{figure.limit:.0%}"
        table.add_row(
            figure.name,
            format_value(figure.value),
            figure.unit,
            limit,
            "" if figure.gib is None else f"{figure.gib:.1f}",
            format_value(before[figure.name]) if figure.name in before else "",
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def format_value(value: float) -> str:
    return f"{value:,.3g}" if value < 100 else f"{value:,.0f}"


def run_stages(arguments: argparse.Namespace, folder: Path) -> int:
    """Run the stages asked for, whose files are in `folder`. Return how many had a problem."""
    folder.mkdir(parents=True, exist_ok=True)
    end = monotonic() + 60 * arguments.minutes
    before = json.loads(arguments.before.read_text()) if arguments.before else []
    before_of = {figure["name"]: figure["value"] for figure in before}
    figures: list[Figure] = []
    problems = []
    for number, name in enumerate(arguments.only, 1):
        left = end - monotonic()
        if left < 10:
            problems.append(f"{name}: not begun, since the {arguments.minutes:g} minutes are over")
            continue
        print(f"\n{number}/{len(arguments.only)} {name}", flush=True)
        start = monotonic()
        limit = left if arguments.tiny else min(left, LIMITS[name])
        measured, problem = run_stage(name, arguments, limit, folder)
        measured = [evolve(figure, name=f"{name}: {figure.name}") for figure in measured]
        show(measured, before_of)
        print(f"{monotonic() - start:.0f} s", flush=True)
        figures += measured
        write_json([asdict(figure) for figure in figures], arguments.json)
        problems += [f"{name}: {problem}"] if problem else []
    print("", *problems, sep="\n")
    return len(problems)


def main() -> None:
    parser = command_line(__doc__, list(STAGES), "STAGE")
    if find_spec("mujoco_warp") is None:
        parser.set_defaults(only=[stage.__name__ for stage in OTHERS])
    parser.add_argument("--folder", type=Path, help="folder for each stage's figures and what it printed")
    parser.add_argument("--clone", type=Path, help="weights from which warp_ppo starts")
    parser.add_argument("--libero", type=Path, help="Python with the extra libero, in which warp_ppo is evaluated")
    parser.add_argument("--before", type=Path, help="what --json wrote of an earlier run, for a column of its figures")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--minutes", type=float, default=8.0, help="no stage begins after this, or lasts longer")
    parser.add_argument("--stage", choices=list(STAGES), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.stage is not None:
        stage = Stage(arguments.tiny, arguments.json, arguments.clone, arguments.libero)
        STAGES[arguments.stage](stage)
        sys.exit(f"failed: {', '.join(stage.failed)}" if stage.failed else 0)
    if not arguments.tiny and not torch.cuda.is_available():
        sys.exit("PyTorch sees no CUDA device; --tiny runs the same code on the CPU")
    name = "CPU" if arguments.tiny else torch.cuda.get_device_name()
    print(f"{name}; PyTorch {torch.__version__}", flush=True)
    with nullcontext(arguments.folder) if arguments.folder else tempfile.TemporaryDirectory() as folder:
        sys.exit(run_stages(arguments, Path(folder)))


if __name__ == "__main__":
    main()

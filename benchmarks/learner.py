"""A learner step on one CPU core: ours against a plain version of the same model; and how fast policies decide.

    python benchmarks/learner.py [--pairs 7] [--sizes tiny small pi05 pi05_kept ...] [--json FILE]

`tiny` and `small` are sizes of OpenVLA-OFT; the others are the tiny networks of their models.

A step: log-probs and entropy of recorded chunks (8 x 7 tokens) and values with gradient, a clipped PPO loss, backward,
a run's AdamW on all weights. Plain, from the same weights: logits of the whole vocabulary at all positions, and a
separate forward pass for the values. A model that denoises scores its one stochastic step of four and trains the
expert; plain, images and prompt are read once for the log-probs and once more for the values. With `_kept`, ours keeps
what the frozen vision-language model computed while acting (`reuse_prefix`), and plain is ours without that. Both sides
give the same log-probs, entropies, values and gradient, which is checked first. Steps alternate in one process; ratios
are medians of the pairs. Peak memory is that of a fresh process for each side while it takes steps (Linux), and in
brackets what of it the steps added.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
from torch import Tensor, nn

from vla_rl.core.contexts import ModelContext
from vla_rl.core.randomness import Noise
from vla_rl.core.spec.sections import TrainSpec
from vla_rl.core.types import Scores
from vla_rl.plugins.models.gr00t import plugin as gr00t
from vla_rl.plugins.models.gr00t.config import GrootConfig
from vla_rl.plugins.models.openvla import openvla_oft
from vla_rl.plugins.models.openvla.config import OpenVLAOFTConfig
from vla_rl.plugins.models.pi0 import pi05
from vla_rl.plugins.models.pi0 import plugin as pi0
from vla_rl.plugins.models.pi0.config import Pi0Config, Pi05Config
from vla_rl.plugins.models.smolvla import plugin as smolvla
from vla_rl.plugins.models.smolvla.config import SmolVLAConfig
from vla_rl.testing import synthetic
from vla_rl.toolkit.models.flow.config import FlowConfig
from vla_rl.toolkit.trainers.master_weights import MasterWeights
from vla_rl.toolkit.trainers.optimizer import build_optimizer

CHUNK, ACTION_DIM, TEMPERATURE = 8, 7, 1.6
PIXELS = {"small": 224, "full": 224}
"""Image size of these presets; 64 elsewhere."""
FLOW: dict[str, tuple[Any, Any]] = {
    "pi0": (pi0, Pi0Config),
    "pi05": (pi05, Pi05Config),
    "smolvla": (smolvla, SmolVLAConfig),
    "gr00t": (gr00t, GrootConfig),
}
KEPT = "_kept"
ROWS = {"tiny": 16, "small": 2, "pi05": 8, "smolvla": 8, **{name + KEPT: 8 for name in FLOW}}
RATIOS = {"tiny": 1.5, "small": 1.5, "pi05": 1.3, "smolvla": 1.3, **{name + KEPT: 1.25 for name in FLOW}}
BARS = {"openvla_oft": 300.0, "pi0": 400.0, "pi05": 500.0, "smolvla": 500.0, "gr00t": 500.0}
BATCH = 8
"""Rows of a decision."""


def noise(rows: int) -> Noise:
    return Noise(0, "benchmark", range(rows), [0] * rows, [0] * rows)


class Learner:
    """A policy, recorded chunks and an optimiser."""

    def __init__(self, preset: str, rows: int, device: str = "cpu", **config: Any) -> None:
        self.env = synthetic.env_info(cameras=1, pixels=PIXELS.get(preset, 64), state_dim=0, action_dim=ACTION_DIM)
        place = ModelContext(env=self.env, chunk=CHUNK, values="chunk", temperature=TEMPERATURE, device=device)
        self.policy = self.build(preset, place, **config)
        self.prepare()
        self.optimise(rows)

    def optimise(self, rows: int) -> None:
        """Make a run's optimiser, with float32 masters of narrower weights, and act on `rows` observations."""
        trained = {name: p for name, p in self.policy.module.named_parameters() if p.requires_grad}
        masters = MasterWeights(trained)
        stepped = trained | masters.masters
        self.optimiser = build_optimizer(list(stepped.values()), [], TrainSpec(steps=1, lr=1e-6, micro_batch=rows))
        masters.follow_optimizer(self.optimiser)
        self.record(rows)

    def build(self, preset: str, place: ModelContext, **config: Any) -> Any:
        return openvla_oft.build(OpenVLAOFTConfig(preset=preset, **config), place)

    def prepare(self) -> None:
        """Ours is ready as it is build_optimizer."""

    @property
    def probe(self) -> nn.Parameter:
        """A weight whose gradient has come through all that is trained."""
        weight: nn.Parameter = self.policy.module.vla.projector.fc1.weight
        return weight

    def record(self, rows: int) -> None:
        """Act on `rows` random observations."""
        rng = torch.Generator().manual_seed(0)
        self.obs = synthetic.observation(self.env, rows)
        self.chunk = self.policy.sample_chunk(self.obs, noise(rows), False)
        device = self.chunk.log_probs.device
        self.advantages, self.returns = (torch.randn(rows, generator=rng).to(device) for _ in range(2))

    def scores(self) -> Scores:
        return self.policy.chunk_log_probs(self.obs, self.chunk)

    def loss(self) -> Tensor:
        """PPO's clipped objective per token, a squared value error, a little entropy."""
        scores = self.scores()
        ratio = (scores.log_probs - self.chunk.log_probs).exp()
        gain = self.advantages[:, None, None]
        surrogate = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.28) * gain).mean()
        assert scores.values is not None
        return 0.5 * (scores.values - self.returns).square().mean() - surrogate - 0.001 * scores.entropy.mean()

    def step(self) -> None:
        self.optimiser.zero_grad(set_to_none=True)
        self.loss().backward()
        self.optimiser.step()


class PlainLearner(Learner):
    """The same weights, without what RL can do without."""

    def prepare(self) -> None:
        network = self.policy.module.vla
        whole = network.whole_head()
        head = nn.Linear(whole.shape[1], whole.shape[0], bias=False)
        head.weight = nn.Parameter(whole.to(network.get_output_embeddings().weight))
        network.language_model.set_output_embeddings(head)
        network.text_rows = None

    def scores(self) -> Scores:
        policy, prompt = self.policy, self.policy.prompts.take_prompts(self.obs.instructions)
        pixels = policy.images(list(self.obs.images.values()))

        def hidden() -> Tensor:
            return policy.module.vla(pixels, prompt.ids, attention_mask=prompt.mask, placeholder=prompt.placeholder)

        states = hidden()
        logits = policy.module.vla.get_output_embeddings()(states).float()
        tokens = self.chunk.extras["tokens"].flatten(1)
        first = prompt.start + states.shape[1] - prompt.ids.shape[1]
        at = first[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        rows = torch.arange(len(tokens), device=tokens.device)[:, None]
        bins = logits[rows, at][..., policy.codec.first : policy.codec.vocab_end]
        log_probs = torch.log_softmax(bins / TEMPERATURE, dim=-1).unflatten(1, (CHUNK, ACTION_DIM))
        chosen = log_probs.gather(-1, self.chunk.extras["tokens"].unsqueeze(-1) - policy.codec.first).squeeze(-1)
        values = policy.module.value_head(hidden(), first, None)
        return Scores(log_probs=chosen, entropy=-(log_probs.exp() * log_probs).sum(-1), values=values)


class FlowLearner(Learner):
    """Learner of a flow model, by its name."""

    def build(self, preset: str, place: ModelContext, **config: Any) -> Any:
        plugin, kind = FLOW[preset.removesuffix(KEPT)]
        return plugin.build(kind(preset="tiny", **config), place)

    @property
    def probe(self) -> nn.Parameter:
        parameters = self.policy.module.network.parameters()
        return next(p for p in reversed(list(parameters)) if p.grad is not None)


class KeptFlowLearner(FlowLearner):
    """What the frozen vision-language model computed while acting is not computed again."""

    def build(self, preset: str, place: ModelContext, **config: Any) -> Any:
        return super().build(preset, place, reuse_prefix=True, **config)


class PlainFlowLearner(FlowLearner):
    """The same weights; the critic has a separate pass."""

    def scores(self) -> Scores:
        scores = self.policy.chunk_log_probs(self.obs, self.chunk)
        values = self.policy.module.estimate_values(*self.policy._encode_observation(self.obs))  # noqa: SLF001
        return Scores(log_probs=scores.log_probs, entropy=scores.entropy, values=values)


def sides_of(size: str) -> dict[str, type[Learner]]:
    if size.endswith(KEPT):
        return {"ours": KeptFlowLearner, "plain": FlowLearner}
    if size in FLOW:
        return {"ours": FlowLearner, "plain": PlainFlowLearner}
    return {"ours": Learner, "plain": PlainLearner}


def check_equal(ours: Learner, plain: Learner) -> None:
    """Both sides compute the same, and the same gradient."""
    a, b = ours.scores(), plain.scores()
    for name in ("log_probs", "entropy", "values"):
        torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=0, atol=2e-5, msg=f"{name} differ")
    grads = []
    for side in (ours, plain):
        side.loss().backward()
        grads.append(side.probe.grad)
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-6)


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds passed and of this process."""
    passed, own = perf_counter(), process_time()
    work()
    return perf_counter() - passed, process_time() - own


def compare(size: str, pairs: int) -> dict[str, float]:
    rows = ROWS[size]
    sides = {name: kind(size, rows) for name, kind in sides_of(size).items()}
    check_equal(sides["ours"], sides["plain"])
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for pair in range(pairs + 1):
        for name in list(sides)[:: 1 if pair % 2 else -1]:
            times[name].append(timed(sides[name].step))
    figures: dict[str, float] = {}
    for which, label in enumerate(("", "_cpu")):
        ours, plain = ([t[which] for t in times[name][1:]] for name in ("ours", "plain"))  # the first one warms up
        figures[f"{size}_ratio{label}"] = statistics.median(b / a for a, b in zip(ours, plain, strict=True))
        figures[f"{size}_ours{label}"] = rows / statistics.median(ours)
        figures[f"{size}_plain{label}"] = rows / statistics.median(plain)
    for name in sides:
        command = [sys.executable, __file__, "--peak", name, "--sizes", size]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        whole, steps = (float(word) for word in done.stdout.split())
        figures |= {f"{size}_peak_mib_{name}": whole, f"{size}_step_mib_{name}": steps}
    return figures


def resident(which: str) -> float:
    """MiB of this process that are in memory: now (VmRSS), or at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(which)) / 1024


def peak(side: str, size: str) -> tuple[float, float]:
    """MiB of a process at most while it takes two steps, and of these above what it had before."""
    learner = sides_of(size)[side](size, ROWS[size])
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of imports and building
    before = resident("VmRSS")
    for _ in range(2):
        learner.step()
    return resident("VmHWM"), resident("VmHWM") - before


def decisions(plugin: Any, config: Any, seconds: float) -> tuple[float, float]:
    """Chunks a second at batch 8: of time passed, and of processor time (medians)."""
    env = synthetic.env_info(cameras=1, state_dim=0, action_dim=ACTION_DIM)
    policy = plugin.build(config, ModelContext(env=env, chunk=CHUNK, temperature=TEMPERATURE))
    obs, times = synthetic.observation(env, BATCH), []
    for _ in range(3):
        policy.sample_chunk(obs, noise(BATCH), False)
    start = perf_counter()
    while perf_counter() - start < seconds:
        times.append(timed(lambda: policy.sample_chunk(obs, noise(BATCH), False)))
    return BATCH / statistics.median(t[0] for t in times), BATCH / statistics.median(t[1] for t in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7, help="steps of each side")
    parser.add_argument("--sizes", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--seconds", type=float, default=5.0, help="of deciding, for each policy")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--peak", choices=["ours", "plain"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peak:
        print(*peak(options.peak, options.sizes[0]))
        return
    figures: dict[str, float] = {}
    print("learner step, samples/s (of processor time); one core, medians")
    print(
        f"{'preset':12} {'rows':>4} {'ours':>17} {'plain':>17} {'ratio':>13} {'bar':>5} {'peak MiB, ours | plain':>25}"
    )
    for size in options.sizes:
        got = compare(size, options.pairs)
        figures |= got
        cells = [f"{got[f'{size}_{n}']:.2f} ({got[f'{size}_{n}_cpu']:.2f})" for n in ("ours", "plain", "ratio")]
        mib = [f"{got[f'{size}_peak_mib_{n}']:.0f} ({got[f'{size}_step_mib_{n}']:.0f})" for n in ("ours", "plain")]
        numbers = f"{cells[0]:>17} {cells[1]:>17} {cells[2]:>13} {RATIOS[size]:>5}"
        print(f"{size:12} {ROWS[size]:4} {numbers} {' | '.join(mib):>25}")
    print(f"\nchunk decisions/s at batch {BATCH}, preset tiny, one 64-px camera, chunks of {CHUNK} x {ACTION_DIM}")
    cases = (
        ("openvla_oft", openvla_oft, OpenVLAOFTConfig(preset="tiny")),
        ("pi0", pi0, Pi0Config(preset="tiny")),
        ("pi05", pi05, Pi05Config(preset="tiny")),
        ("smolvla", smolvla, SmolVLAConfig(preset="tiny")),
        ("gr00t", gr00t, GrootConfig(preset="tiny")),
    )
    for name, plugin, config in cases:
        passed, own = decisions(plugin, config, options.seconds)
        figures |= {f"{name}_decisions": passed, f"{name}_decisions_cpu": own}
        steps = f", K = {config.denoise_steps}" if isinstance(config, FlowConfig) else ""
        print(f"{name + steps:20} {passed:7.0f} (processor time: {own:.0f}; bar {BARS[name]:.0f})")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Operators that a learner step and a decision launch, eager and compiled: the host's share of the work on a GPU.

    python benchmarks/operators.py [--only oft_step ...] [--eager] [--json FILE]

Tiny networks on a CPU: a count does not depend on sizes, only on depth. An eager operator is a call of an aten kernel
as `TorchDispatchMode` sees it, forward and backward; views and allocations do not count, since they launch nothing. On
a GPU, where the host needs 15 to 25 us for each, they bound small batches.

A compiled graph launches the kernels that inductor generated and external ones (matrix products, attention). The mode
sees the external ones; the generated ones are counted as they are called. Inductor's CPU backend puts neighbouring loop
nests into one function, of which its GPU backend may make several Triton kernels, and it splits reductions that are one
Triton kernel. The number of loop nests is therefore shown too: the launches on a GPU are between the two.

Cases: OpenVLA-OFT with adapters in bfloat16 (PPO loss, values, backward, AdamW), its decision with adapters apart and
merged, pi0's decision with four denoising steps, and the seven tokens of an action by autoregressive OpenVLA.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from learner import ACTION_DIM, CHUNK, TEMPERATURE, Learner, noise
from measuring import command_line, write_json
from torch._inductor import config as inductor_config
from torch._inductor.async_compile import AsyncCompile
from torch.utils._python_dispatch import TorchDispatchMode

from vla_rl.core.contexts import ModelContext
from vla_rl.plugins.models.openvla import openvla
from vla_rl.plugins.models.openvla.config import OpenVLAARConfig
from vla_rl.plugins.models.pi0 import plugin as pi0
from vla_rl.plugins.models.pi0.config import Pi0Config
from vla_rl.testing import synthetic
from vla_rl.toolkit.models.acting.compilation import CompiledBlocks
from vla_rl.toolkit.models.adapters import LoRAConfig, MergedAdapters
from vla_rl.toolkit.trainers.trained_model import adapters_cast_once

ROWS = 4
BEFORE = {"oft_step": 1121, "oft_decision": 494, "oft_merged": 494, "pi0_decision": 918, "ar_action": 1234}
"""Operators of each case before blocks could be compiled."""
BARS = {"oft_step": 0.5, "oft_decision": 0.35, "oft_merged": 0.35, "pi0_decision": 0.3, "ar_action": 0.4}
"""Most operators of the compiled case, as a share of `BEFORE`."""
NOT_LAUNCHED = ("empty", "detach", "alias", "lift_fresh", "_unsafe_view", "set_", "resize_")
"""Operators that launch no kernel and that are not views by their schema."""


class OperatorCount(TorchDispatchMode):
    """Counts the operators that launch a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run in this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and not name.startswith(NOT_LAUNCHED):
            self.counts[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


def loop_nests(source: str) -> int:
    """Return the number of outermost loop nests in the C++ source of a generated kernel."""
    return max(len(re.findall(r"^    \{$", source, re.MULTILINE)), 1)


@contextmanager
def generated_kernels(counts: Counter[str]) -> Iterator[None]:
    """Context in which kernels are generated so that each later call adds its loop nests to `counts`."""
    original = AsyncCompile.cpp_pybinding

    def counted(self: AsyncCompile, argtypes: list[str], source_code: str) -> Any:
        compiled: Any = original(self, argtypes, source_code)
        nests = loop_nests(source_code)

        def call(*args: Any) -> Any:
            counts["generated"] += 1
            counts["nests"] += nests
            return (compiled.result() if hasattr(compiled, "result") else compiled)(*args)

        return call

    AsyncCompile.cpp_pybinding = counted  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        AsyncCompile.cpp_pybinding = original  # type: ignore[method-assign]


def oft_learner() -> Learner:
    config = {"lora": LoRAConfig(rank=4), "autocast": True, "dtype": "bfloat16"}
    return Learner("tiny", ROWS, "cpu", **config)


def oft_step() -> tuple[Any, Callable[[], Any]]:
    learner = oft_learner()

    def step() -> None:
        learner.optimiser.zero_grad(set_to_none=True)
        with adapters_cast_once(learner.policy.module):
            learner.loss().backward()
        learner.optimiser.step()

    return learner.policy, step


def oft_decision() -> tuple[Any, Callable[[], Any]]:
    learner = oft_learner()
    return learner.policy, decision(learner.policy, learner.env)


def oft_merged() -> tuple[Any, Callable[[], Any]]:
    """Return the decision with adapters merged into the weights."""
    policy, work = oft_decision()
    MergedAdapters(policy.module, "in_place").merge_weights()
    return policy, work


def pi0_decision() -> tuple[Any, Callable[[], Any]]:
    env = synthetic.env_info(cameras=2, action_dim=ACTION_DIM)
    policy = pi0.build(Pi0Config(preset="tiny", denoise_steps=4), ModelContext(env=env, chunk=CHUNK))
    return policy, decision(policy, env)


def ar_action() -> tuple[Any, Callable[[], Any]]:
    env = synthetic.env_info(cameras=1, state_dim=0, action_dim=ACTION_DIM)
    place = ModelContext(env=env, chunk=1, temperature=TEMPERATURE)
    policy = openvla.build(OpenVLAARConfig(preset="tiny"), place)
    return policy, decision(policy, env)


def decision(policy: Any, env: Any) -> Callable[[], Any]:
    obs = synthetic.observation(env, ROWS)
    return lambda: policy.sample_chunk(obs, noise(ROWS), False)


CASES = {
    "oft_step": oft_step,
    "oft_decision": oft_decision,
    "oft_merged": oft_merged,
    "pi0_decision": pi0_decision,
    "ar_action": ar_action,
}


def show(counts: Counter[str], top: int) -> None:
    for name, times in counts.most_common(top):
        print(f"{times:8} {name}")


def eager(case: str) -> Counter[str]:
    """Count the operators of a case after a first call, which fills caches."""
    work = CASES[case]()[1]
    work()
    with OperatorCount() as count:
        work()
    return count.counts


def compiled(case: str) -> Counter[str]:
    """Count the launches of a case whose blocks are compiled."""
    generated: Counter[str] = Counter()
    with generated_kernels(generated), inductor_config.patch({"cpp.threads": 1, "fx_graph_cache": False}):
        policy, work = CASES[case]()
        blocks = CompiledBlocks(policy.module, policy.blocks, regions=policy.regions, policy=policy)
        for _ in range(3):
            work()
        if blocks.failure is not None:
            sys.exit(blocks.failure)
        graphs = blocks.graphs
        generated.clear()
        with OperatorCount() as count:
            work()
    if blocks.graphs != graphs or not generated:
        sys.exit(f"{case}: the counted call was not the compiled one")
    return count.counts + generated


def main() -> None:
    parser = command_line(__doc__, list(CASES), "CASE")
    parser.add_argument("--eager", action="store_true", help="count eager operators alone, which needs no compiler")
    parser.add_argument("--top", type=int, default=0, help="print the most frequent operators of each case")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    for case in options.only:
        counts = eager(case)
        figures[f"{case}_eager"] = counts.total()
        print(f"{case:14} eager    {counts.total():6} {counts.total() / BEFORE[case]:7.2f} of before")
        show(counts, options.top)
        if options.eager:
            continue
        counts = compiled(case)
        nests = counts.pop("nests")
        figures[f"{case}_nests"] = nests
        figures[f"{case}_compiled"] = counts.total()
        share = counts.total() / BEFORE[case]
        print(f"{'':14} compiled {counts.total():6} {share:7.2f} of before, bar {BARS[case]}", end=" ")
        print(f"({counts['generated']} of them generated, with {nests} loop nests)", flush=True)
        show(counts, options.top)
    write_json(figures, options.json)


if __name__ == "__main__":
    main()

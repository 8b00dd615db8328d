"""Which strategy suits a job: an estimate of one iteration for every split of the devices. Pure.

With S and P the seconds of a chunk step and of an inference for all rows on the devices of their roles, T chunk steps
an episode and L the seconds of training on all learners, an iteration takes

    collocated       T (S + P) + L               every role on all devices
    disaggregated    T (S + P) + L               each role on a part of them, so that each term is larger
    hybrid, k lanes  T max(S, P) + min(S, P) / k + L      T (S + P) + L with one lane

Times are taken as proportional to the rows of a device and to the samples of a rank. Nothing is assumed for the
exchange between workers; of equals the simpler one wins, with fewer workers and lanes.
"""

from __future__ import annotations

from collections.abc import Iterator

from attrs import frozen

from vla_rl.core.plan import Measured

STAGES = (1, 2, 4)


@frozen(kw_only=True)
class Choice:
    """A split of n devices: how many each role has, and what one iteration takes."""

    sim: int
    policy: int
    learner: int
    stages: int
    together: bool
    """Every worker has all roles (collocated)."""
    seconds: float


def choices(measured: Measured, rows: int, devices: int) -> list[Choice]:
    """All splits whose lanes share the rows evenly, the fastest first."""
    return sorted(_choices(measured, rows, devices), key=lambda c: c.seconds)


def _choices(measured: Measured, rows: int, devices: int) -> Iterator[Choice]:
    """The simpler ones first, for a stable sort."""
    m, share = measured, rows / measured.rows

    def choice(sim: int, policy: int, learner: int, stages: int, together: bool = False) -> Choice:
        s, p = m.sim * share / sim, m.policy * share / policy
        step = s + p if stages == 1 else max(s, p)
        fill = 0.0 if stages == 1 else min(s, p) / stages
        seconds = m.chunk_steps * (step + m.learner * share / learner) + fill
        return Choice(sim=sim, policy=policy, learner=learner, stages=stages, together=together, seconds=seconds)

    if rows % devices == 0:
        yield choice(devices, devices, devices, 1, together=True)
    for stages in STAGES:
        for sim in range(1, devices):
            if rows % (sim * stages) == 0 and sim * stages >= devices - sim:
                yield choice(sim, devices - sim, devices, stages)
    for sim in range(1, devices):
        for policy in range(1, devices - sim):
            if rows % sim == 0 and sim >= policy:
                yield choice(sim, policy, devices - sim - policy, 1)

"""Hook `srpo_report`: writes SRPO's embeddings, distances and rewards of each rollout as numbers and as a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.core.errors import UserError
from vla_rl.core.events import Run
from vla_rl.core.types import Rollout
from vla_rl.plugins.algorithms.srpo.config import ReportConfig


class EmbeddingReport:
    """Writes `srpo/step_000010.npz` (embeddings, distances and rewards of every trajectory) and `.png`."""

    def __init__(self, config: ReportConfig) -> None:
        self._config = config

    def on_run_start(self, run: Run) -> None:
        algorithm = run.spec["algorithm"]["type"]
        if algorithm != "srpo":
            raise UserError(f"hook 'srpo_report' reports on algorithm 'srpo', and this run has {algorithm!r}; drop it")

    def on_rollout_end(self, run: Run, step: int, rollout: Rollout, metrics: dict[str, float]) -> None:
        if step % self._config.every:
            return
        assert rollout.features is not None
        findings: dict[str, Any] = {name: tensor.numpy() for name, tensor in rollout.findings.items()}
        folder = Path(run.folder) / "srpo"
        folder.mkdir(exist_ok=True)
        np.savez_compressed(
            folder / f"step_{step:06d}.npz",
            embedding=rollout.features.numpy(),
            task=np.array(rollout.tasks),
            group=rollout.groups.numpy(),
            success=rollout.success.numpy(),
            **findings,
        )
        if self._config.plot:
            draw_rewards(folder / f"step_{step:06d}.png", step, rollout.tasks, rollout.success.numpy(), findings)


def draw_rewards(path: Path, step: int, tasks: tuple[str, ...], success: Any, findings: dict[str, Any]) -> None:
    """Plot the reward of failures against their distance to successes of their task; successes are a line at 1."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    names = np.array(tasks)
    shaped = ~np.isnan(findings["distance"])
    has_reward = ~np.isnan(findings["reward"])
    for task in np.unique(names[shaped]):
        inside = shaped & (names == task)
        label = f"{task} ({inside.sum()})"
        axes.scatter(findings["distance"][inside], findings["reward"][inside], s=18, alpha=0.7, label=label)
    axes.axhline(1.0, color="black", lw=1, ls="--", label=f"successes ({(has_reward & success).sum()})")
    axes.set(xlabel="distance to the task's successes", ylabel="reward", ylim=(-0.03, 1.05))
    axes.set_title(
        f"step {step}: {shaped.sum()} failures shaped, {(has_reward & ~success & ~shaped).sum()} without a success "
        f"of their task, {(~has_reward).sum()} left out",
        fontsize=10,
    )
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=110)

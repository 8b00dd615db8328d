"""Draw success and interventions of runs with takeovers, and print them as a table.

    python tools/draw_takeovers.py LABEL=RUN [LABEL=RUN ...] --image docs/curves/gym_hil.png

Above: episodes of rollouts that succeeded without a takeover, and evaluations without a person, with 95 % Wilson
intervals. Below: the share of environment steps that a person executed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

UNAIDED, RATE = "env/unaided_success", "env/intervention_rate"


def metrics_of(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the metrics of each training step, those of its evaluation included."""
    steps: dict[int, dict[str, Any]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        steps.setdefault(record["step"], {}).update(record)
    return steps


def draw(runs: Mapping[str, Mapping[int, Mapping[str, Any]]], image: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, figsize=(7, 6), sharex=True)
    for index, (label, steps) in enumerate(runs.items()):
        colour = f"C{index}"
        for axes, name in ((above, UNAIDED), (below, RATE)):
            points = [(step, 100 * values[name]) for step, values in steps.items() if name in values]
            axes.plot(*zip(*points, strict=True), color=colour, alpha=0.4 if axes is above else 1.0, label=label)
        evaluations = [(step, values) for step, values in steps.items() if "eval/success_rate" in values]
        rates = [100 * values["eval/success_rate"] for _, values in evaluations]
        spread = [
            [rate - 100 * values["eval/success_low"] for rate, (_, values) in zip(rates, evaluations, strict=True)],
            [100 * values["eval/success_high"] - rate for rate, (_, values) in zip(rates, evaluations, strict=True)],
        ]
        above.errorbar(
            [step for step, _ in evaluations], rates, spread, color=colour, marker="o", markersize=4, capsize=2
        )
    above.set(ylabel="success without a person (%)", ylim=(0, 101))
    above.set_title("points: greedy, evaluation states; pale: episodes of rollouts", fontsize=9)
    below.set(ylabel="steps executed by the person (%)", xlabel="training step", ylim=(0, None))
    below.legend()
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, dpi=120)


def show(label: str, steps: Mapping[int, Mapping[str, Any]], every: int) -> None:
    """Print rollouts as means over `every` steps, and the evaluation at the end of each such group."""
    print(f"\n{label}\n")
    print("| steps | environment steps | by the person | episodes without help that succeed | alone, greedy |")
    print("| --- | --- | --- | --- | --- |")
    played = 0
    for end in [0, *range(every, max(steps) + 1, every)]:
        group = [steps[step] for step in range(end - every + 1, end + 1) if RATE in steps.get(step, {})]
        result = steps.get(end, {})
        alone = ""
        if "eval/success_rate" in result:
            low, high = result["eval/success_low"], result["eval/success_high"]
            alone = f"{result['eval/success_rate']:.0%} [{low:.0%}, {high:.0%}] of {result['eval/episodes']}"
        if not group:
            print(f"| {end} | | | | {alone} |")
            continue
        taken = [values["rollout/env_steps"] for values in group]
        played += int(sum(taken))
        by_person = sum(values[RATE] * count for values, count in zip(group, taken, strict=True)) / sum(taken)
        episodes = [values["rollout/episodes"] for values in group]
        unaided = sum(values[UNAIDED] * count for values, count in zip(group, episodes, strict=True)) / sum(episodes)
        print(f"| {end - len(group) + 1} to {end} | {played:,} | {by_person:.0%} | {unaided:.0%} | {alone} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="LABEL=RUN", help="folders of runs, with their names in the image")
    parser.add_argument("--image", type=Path, help="file of the image; without it only the tables are printed")
    parser.add_argument("--every", type=int, default=4, help="training steps of a line in a table")
    options = parser.parse_args()
    runs = {}
    for text in options.runs:
        label, equals, folder = text.partition("=")
        if not equals:
            parser.error(f"{text}: give LABEL=RUN")
        runs[label] = metrics_of(Path(folder))
    for label, steps in runs.items():
        show(label, steps, options.every)
    if options.image:
        draw(runs, options.image)


if __name__ == "__main__":
    main()

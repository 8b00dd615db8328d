"""Draw the diagrams of the documentation as SVG: `python tools/draw_diagrams.py` writes docs/images/.

They are 480 pixels wide with text of 14 pixels or more, on a white ground: readable on a phone and on a dark page.
`tests/test_diagrams.py` compares the files with this script.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs" / "images"
WIDTH = 480
SIM, POLICY, LEARNER, DRIVER = "#cfe3f7", "#fde0b8", "#cfeac9", "#e4dcf3"
IDLE = "#f3f3f3"
INK = "#222222"


class Drawing:
    """An SVG drawing that is put together from boxes, texts and arrows. Units are pixels."""

    def __init__(self, height: int, title: str) -> None:
        self.height = height
        self.title = title
        self.parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        """Add a rectangle."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{fill}" stroke="#666666"/>'
        )

    def text(
        self, x: float, y: float, text: str, *, size: int = 14, anchor: str = "middle", bold: bool = False
    ) -> None:
        """Add a line of text whose baseline is at y."""
        style = f'font-size="{size}" text-anchor="{anchor}"' + (' font-weight="bold"' if bold else "")
        self.parts.append(f'<text x="{x:g}" y="{y:g}" {style} fill="{INK}">{escape(text)}</text>')

    def labelled(self, x: float, y: float, width: float, height: float, fill: str, lines: Sequence[str]) -> None:
        """Add a rectangle with centred lines of text, the first of which is bold if followed by others."""
        self.box(x, y, width, height, fill)
        first = y + height / 2 + 5 - 8.5 * (len(lines) - 1)
        for index, line in enumerate(lines):
            self.text(x + width / 2, first + 17 * index, line, bold=index == 0 and len(lines) > 1)

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """Add a horizontal or vertical arrow from the first point to the second."""
        self.parts.append(f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{INK}" stroke-width="1.5"/>')
        dx, dy = (x2 > x1) - (x2 < x1), (y2 > y1) - (y2 < y1)
        corners = [
            (x2, y2),
            (x2 - 8 * dx - 4 * dy, y2 - 8 * dy - 4 * dx),
            (x2 - 8 * dx + 4 * dy, y2 - 8 * dy + 4 * dx),
        ]
        points = " ".join(f"{x:g},{y:g}" for x, y in corners)
        self.parts.append(f'<polygon points="{points}" fill="{INK}"/>')

    def svg(self) -> str:
        """Return the file's text."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" width="{WIDTH}" '
            f'height="{self.height}" font-family="Helvetica, Arial, sans-serif" role="img">'
        )
        ground = f'<rect x="0" y="0" width="{WIDTH}" height="{self.height}" rx="6" fill="#ffffff"/>'
        return "\n".join([head, f"<title>{escape(self.title)}</title>", ground, *self.parts, "</svg>", ""])


def roles() -> Drawing:
    """Draw the roles of a run and what flows between them."""
    drawing = Drawing(330, "The roles of a run and what flows between them")
    drawing.labelled(10, 15, 460, 54, DRIVER, ["driver", "training loop, advantages, hooks"])
    top, height = 190, 100
    drawing.labelled(10, top, 105, height, SIM, ["sim", "steps envs,", "step limits,", "faults"])
    drawing.labelled(187, top, 106, height, POLICY, ["policy", "inference", "for its lanes"])
    drawing.labelled(365, top, 105, height, LEARNER, ["learner", "gradients,", "optimiser"])
    drawing.arrow(215, 69, 215, top)
    drawing.text(207, 122, "tickets", anchor="end")
    drawing.arrow(265, top, 265, 69)
    drawing.text(273, 112, "trajectory", anchor="start")
    drawing.text(273, 129, "records", anchor="start")
    drawing.arrow(430, 69, 430, top)
    drawing.text(422, 160, "advantages", anchor="end")
    drawing.arrow(115, 215, 187, 215)
    drawing.text(151, 208, "images")
    drawing.arrow(187, 262, 115, 262)
    drawing.text(151, 281, "actions")
    drawing.arrow(293, 215, 365, 215)
    drawing.text(329, 191, "model")
    drawing.text(329, 208, "inputs")
    drawing.arrow(365, 262, 293, 262)
    drawing.text(329, 281, "weights")
    drawing.text(240, 316, "Roles in one worker call each other directly.")
    return drawing


def timeline(drawing: Drawing, y: float, name: str, blocks: Sequence[tuple[str, Sequence[str]]], width: float) -> None:
    """Add a line of blocks (colour, texts) of equal width in the order of time; a block without texts is idle."""
    drawing.text(12, y + 25, name, anchor="start", bold=True)
    for index, (fill, lines) in enumerate(blocks):
        x = 80 + index * width
        if lines:
            drawing.labelled(x, y, width - 3, 40, fill, lines)
        else:
            drawing.box(x, y, width - 3, 40, IDLE)
            drawing.text(x + width / 2 - 1, y + 25, "idle")


def two_lanes() -> Drawing:
    """Draw a rollout with one lane and with two."""
    drawing = Drawing(310, "A rollout with one lane and with two")
    a, b = (SIM, ["A"]), (POLICY, ["B"])
    idle: tuple[str, list[str]] = (IDLE, [])
    drawing.text(12, 26, "One lane: simulation and inference alternate", anchor="start")
    timeline(drawing, 38, "sim", [a, idle, a, idle, a, idle], 65)
    timeline(drawing, 84, "policy", [idle, a, idle, a, idle, a], 65)
    drawing.text(12, 158, "Two lanes: one simulates while the policy infers", anchor="start")
    drawing.text(12, 176, "for the other", anchor="start")
    timeline(drawing, 188, "sim", [a, b, a, b, a, b], 65)
    timeline(drawing, 234, "policy", [idle, a, b, a, b, a], 65)
    drawing.text(80, 299, "A, B: envs of lane A and of lane B", anchor="start")
    drawing.text(425, 299, "time", anchor="end")
    drawing.arrow(430, 294, 468, 294)
    return drawing


def policy_lag() -> Drawing:
    """Draw which weights act and train over time, without and with lag."""
    drawing = Drawing(330, "Policy lag over time with max_lag 0 and 1")
    idle: tuple[str, list[str]] = (IDLE, [])

    def collected(step: int, version: int) -> tuple[str, list[str]]:
        return SIM, [f"step {step}", f"by v{version}"]

    def trained(step: int, lag: int) -> tuple[str, list[str]]:
        return LEARNER, [f"step {step}", f"lag {lag}"]

    drawing.text(12, 26, "max_lag: 0", anchor="start", bold=True)
    timeline(drawing, 38, "envs", [collected(1, 0), idle, collected(2, 1), idle, collected(3, 2)], 78)
    timeline(drawing, 84, "learner", [idle, trained(1, 0), idle, trained(2, 0), idle], 78)
    drawing.text(12, 158, "max_lag: 1", anchor="start", bold=True)
    envs = [collected(step, max(step - 2, 0)) for step in range(1, 6)]
    timeline(drawing, 170, "envs", envs, 78)
    timeline(drawing, 216, "learner", [idle, trained(1, 0), *(trained(step, 1) for step in range(2, 5))], 78)
    drawing.text(12, 283, "step n: episodes of training step n; v1: weights", anchor="start")
    drawing.text(12, 301, "after the first update. After each update, envs", anchor="start")
    drawing.text(12, 319, "take the newest weights for the next episodes.", anchor="start")
    return drawing


def placement() -> Drawing:
    """Draw three placements on eight GPUs."""
    drawing = Drawing(430, "Three placements on eight GPUs")
    sim, policy, learner = ("sim", SIM), ("policy", POLICY), ("learner", LEARNER)
    strategies = [
        ("collocated: all roles on every GPU, in turn", [[sim, policy, learner]] * 8),
        ("hybrid: sim and policy at the same time", [[sim, learner]] * 4 + [[policy, learner]] * 4),
        ("disaggregated: rollouts while learners train", [[sim]] * 2 + [[policy]] * 2 + [[learner]] * 4),
    ]
    for row, (heading, gpus) in enumerate(strategies):
        top = 12 + row * 132
        drawing.text(12, top + 14, heading, anchor="start", bold=True)
        for gpu, hosted in enumerate(gpus):
            x, share = 12 + gpu * 57.5, 78 / len(hosted)
            for place, (name, fill) in enumerate(hosted):
                drawing.labelled(x, top + 24 + place * share, 54, share, fill, [name])
            drawing.text(x + 27, top + 119, str(gpu))
    drawing.text(240, 420, "numbers: GPUs of one machine")
    return drawing


DRAWINGS = {"roles": roles, "two-lanes": two_lanes, "policy-lag": policy_lag, "placement": placement}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, draw in DRAWINGS.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg())
        sys.stdout.write(f"{FOLDER / name}.svg\n")

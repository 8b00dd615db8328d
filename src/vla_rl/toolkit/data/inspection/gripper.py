"""Compares the gripper's command with its state: whether both rise together, or one falls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from vla_rl.core.types import Array
from vla_rl.toolkit.data.inspection.recorded import FEWEST, DataFinding, RecordedData, group_findings
from vla_rl.toolkit.data.inspection.values import LONG, find_grippers

LATEST = 25
"""Most frames by which a gripper follows its command."""
RELATED = 0.6
"""Size of the correlation from which a number of the state is the gripper's."""


def find_reversed_grippers(data: RecordedData) -> Iterator[DataFinding]:
    """Yield episodes whose gripper command has another sign than most, by a number of the state with that name."""
    names = data.names.get(data.action, ())
    commands = find_grippers(names) if names else [data.episodes[0].vectors[data.action].shape[1] - 1]
    states = [
        (feature, index)
        for feature in data.features
        if feature != data.action
        for index in (
            range(data.episodes[0].vectors[feature].shape[1])
            if find_grippers([feature])
            else find_grippers(data.names.get(feature, ()))
        )
    ]
    for command in commands:
        tables = [
            correlate_gripper([(e.vectors[data.action][:, command], e.vectors[f][:, i]) for e in data.episodes])
            for f, i in states
        ]
        moved = [np.abs(table[np.isfinite(table)]) for table in tables]
        strengths = [np.median(sizes) if len(sizes) >= FEWEST else 0.0 for sizes in moved]
        if max(strengths, default=0.0) < RELATED:
            continue
        best = int(np.argmax(strengths))
        signs = read_signs(tables[best])
        usual = 1 if (signs > 0).sum() >= (signs < 0).sum() else -1
        feature, index = states[best]
        shown_by = f"{data.name_number(feature, index)} of {feature}"
        text = f"{data.name_number(data.action, command)}: opposite sign, by {shown_by}"
        yield from group_findings(
            data.action,
            {data.episodes[place].number: (text, None) for place in np.flatnonzero(signs == -usual).tolist()},
        )


def measure_gripper_signs(
    episodes: Sequence[tuple[Array, Array]], action_names: Sequence[str], state_names: Sequence[str]
) -> dict[str, int]:
    """Return for each number of the state that is called a gripper whether it rises (1) or falls (-1) with the command.
    Numbers that do not tell in most episodes are left out. `episodes`: actions [T, A] and states [T, S]."""
    commands = find_grippers(action_names)
    signs = {}
    for index in find_grippers(state_names) if len(commands) == 1 else ():
        several = read_signs(
            correlate_gripper([(actions[:, commands[0]], state[:, index]) for actions, state in episodes])
        )
        if len(several) and abs(several.mean()) > 0.5:
            signs[state_names[index].casefold()] = int(np.sign(several.mean()))
    return signs


def read_signs(correlations: Array) -> Array:
    """Return 1 or -1 where a correlation is strong, else 0, [E]."""
    strong = np.abs(np.nan_to_num(correlations)) > RELATED
    return np.where(strong, np.sign(np.nan_to_num(correlations)), 0)


def correlate_gripper(pairs: Sequence[tuple[Array, Array]]) -> Array:
    """Return the correlation of each episode's command [T] with its state [T] at the delay at which it is strongest,
    float64 [E]; NaN where one does not change, or for fewer than `LONG` frames."""
    strongest = np.full(len(pairs), np.nan)
    for place, (command, state) in enumerate(pairs):
        if len(command) < LONG or not np.ptp(command) or not np.ptp(state):
            continue
        for delay in range(min(LATEST, len(command) // 4)):
            early, late = command[: len(command) - delay], state[delay:]
            if not np.ptp(early) or not np.ptp(late):
                continue
            value = np.corrcoef(early, late)[0, 1]
            if not abs(value) <= abs(strongest[place]):
                strongest[place] = value
    return strongest

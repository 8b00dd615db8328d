"""Compares the actions of recorded episodes with the motion of the state: their order in time, signs and places."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from attrs import frozen

from vla_rl.core.types import Array
from vla_rl.toolkit.data.episodes import format_numbers
from vla_rl.toolkit.data.inspection.recorded import FEWEST, DataFinding, RecordedData, group_findings
from vla_rl.toolkit.data.inspection.values import LONG, find_grippers, find_switches

LAGS = np.arange(-12, 26)
"""Frames by which the state is compared later (positive) or earlier than the action; in short episodes, fewer. A robot
follows its commands within half a second, 25 frames at 50 Hz."""
NOW = int(np.flatnonzero(LAGS == 0)[0])
MARGIN, OVERLAP = 12, 12
"""Most frames at either end of an episode whose actions are not compared, and fewest frames that are."""
COPIED, UNEXPLAINED = 0.6, 0.3
"""Error of an earlier state as a prediction of the action below which the action follows it: as a share of the present
state's error, and of the action's standard deviation."""
EQUAL, CENTRED = 0.3, 0.05
"""Error of the present state as a share of its neighbours' mean error, and difference of these two as a share of their
sum, up to which the action is the present state and noise. A state that arrives later makes the neighbours differ."""
RELATED = 0.6
"""Correlation from which an action is taken for a target of the state, or for its velocity."""
BETTER = 0.15
"""How much better an episode's own lag has to explain it than the usual lag."""
UNITS = 15.0
"""Factor between an action and the state that it is a target of from which their units differ."""
WINDOW = 15
"""Frames of the moving average that is subtracted before two curves are compared."""


def describe_uncompared(data: RecordedData) -> str:
    """Return which episodes are too short for `find_motion_faults`, in words; "" where none is."""
    short = [episode.number for episode in data.episodes if len(episode) < LONG]
    if data.state is None or not short:
        return ""
    episodes = f"{'episode' if len(short) == 1 else 'episodes'} {format_numbers(short)}"
    return f"not compared: actions with the motion of the state in {episodes}, shorter than {LONG} frames"


@frozen(kw_only=True, eq=False)
class MotionPairs:
    """Numbers of the action that move the numbers of the state, and how."""

    kind: str
    """"target": an action is where the state shall be; "velocity": how far it shall move."""
    actions: Array
    """int64 [P]: places in the action."""
    states: Array
    """int64 [P]: places in the state."""
    scores: Array
    """float64 [E, lags]: mean correlation of each episode at each of `LAGS`; NaN: it hardly moves, or is too short."""


def find_motion_faults(data: RecordedData) -> Iterator[DataFinding]:
    """Yield where actions do not go with the state. Nothing, if none is the target or velocity of a number of it."""
    if data.state is None or len(data.episodes) < FEWEST:
        return
    pairing = pair_numbers(data)
    if pairing is None:
        return
    yield from _find_shifts(data, pairing)
    yield from _find_copied_states(data, pairing)
    yield from _find_exchanges(data, pairing)
    if pairing.kind == "target":
        yield from _find_other_units(data, pairing)


def pair_numbers(data: RecordedData) -> MotionPairs | None:
    """Return which numbers of the action go with which of the state, by equal names, else by place; None for none."""
    assert data.state is not None
    action_size, state_size = (data.episodes[0].vectors[name].shape[1] for name in (data.action, data.state))
    action_names = [_plain_name(name) for name in data.names.get(data.action, ())]
    state_names = [_plain_name(name) for name in data.names.get(data.state, ())]
    common = [name for name in action_names if name in state_names]
    if common and len(set(action_names)) == action_size and len(set(state_names)) == state_size:
        pairs = [(action_names.index(name), state_names.index(name)) for name in common]
    else:
        pairs = [(index, index) for index in range(min(action_size, state_size))]
    best: MotionPairs | None = None
    most = 0.0
    for kind in ("target", "velocity"):
        scores = np.array([_correlate_lags(data, place, kind, pairs) for place in range(len(data.episodes))])  # E, P, L
        strength = np.array([_median_of(column) for column in np.fmax(scores, -np.inf).max(axis=2).T])
        related = np.flatnonzero(strength > RELATED)
        explained = float((strength[related] ** 2).sum())
        if explained > most:
            most = explained
            best = MotionPairs(
                kind=kind,
                actions=np.array([pairs[i][0] for i in related]),
                states=np.array([pairs[i][1] for i in related]),
                scores=_mean_of(scores[:, related]),
            )
    return best


def _find_shifts(data: RecordedData, pairing: MotionPairs) -> Iterator[DataFinding]:
    """Yield episodes whose actions are shifted in time against the others."""
    moving = np.flatnonzero(np.isfinite(pairing.scores[:, NOW]))
    if len(moving) < FEWEST:
        return
    typical = np.array([_median_of(column) for column in pairing.scores[moving].T])
    usual = int(typical.argmax())
    if typical[usual] < RELATED:
        return
    texts = {}
    for place in moving.tolist():
        scores = pairing.scores[place]
        own = int(np.nanargmax(scores))
        if abs(own - usual) >= 2 and scores[own] > RELATED and scores[own] - scores[usual] > BETTER:
            shift = int(LAGS[own] - LAGS[usual])
            later = "later" if shift < 0 else "earlier"
            text = f"the actions come {abs(shift)} frames {later} than in other episodes, by the motion of the state"
            texts[data.episodes[place].number] = text, None
    yield from group_findings(data.action, texts)


def _find_copied_states(data: RecordedData, pairing: MotionPairs) -> Iterator[DataFinding]:
    """Yield actions that are the state of an earlier frame, or of the same one, in most episodes."""
    pairs = list(zip(pairing.actions.tolist(), pairing.states.tolist(), strict=True))
    switches = find_switches(data.stack_rows(data.action))
    pairs = [pair for pair in pairs if not switches[pair[0]]]
    if not pairs:
        return
    scores = np.array(
        [_correlate_lags(data, place, pairing.kind, pairs, detrended=False) for place in range(len(data.episodes))]
    )
    errors = np.sqrt(np.maximum(1 - scores**2, 0))
    typical = np.array([[_median_of(lag) for lag in pair.T] for pair in errors.transpose(1, 0, 2)])  # P, L
    typical[typical < 0] = np.inf  # no episode is long enough
    best = typical.argmin(axis=1)
    before, now, after = typical[:, NOW - 1], typical[:, NOW], typical[:, NOW + 1]
    copied = (best > 0) & (best < NOW) & (typical.min(axis=1) < np.minimum(COPIED * now, UNEXPLAINED))
    if pairing.kind == "target":
        neighbours = before + after
        copied |= (best == NOW) & (2 * now < EQUAL * neighbours) & (np.abs(before - after) < CENTRED * neighbours)
    if copied.mean() <= 0.5:
        return
    frames = -int(LAGS[int(np.median(best[copied]))])
    when = (
        f"follow the state by {frames} frame{'s' if frames > 1 else ''}"
        if frames
        else "are the state of the same frame"
    )
    learnt = "repeat what has happened" if frames else "stay where it is"
    yield DataFinding(
        subject=data.action, message=f"the actions {when} in most episodes: a policy would learn to {learnt}"
    )


def _find_exchanges(data: RecordedData, pairing: MotionPairs) -> Iterator[DataFinding]:
    """Yield episodes in which an action moves the state the other way, or moves another number."""
    lag = int(np.argmax([_median_of(column) for column in pairing.scores.T]))
    tables = np.array([_correlate_pairs(data, place, pairing, int(LAGS[lag])) for place in range(len(data.episodes))])
    usual = np.array([[_median_of(cell) for cell in row.T] for row in tables.transpose(1, 0, 2)])
    grippers = find_grippers([data.name_number(data.action, index) for index in pairing.actions.tolist()])
    trusted = np.flatnonzero(np.diagonal(usual) > RELATED).tolist()
    texts = {}
    for episode, table in zip(data.episodes, tables, strict=True):
        reversed_ones = [i for i in trusted if table[i, i] < -RELATED and i not in grippers]
        swapped = [
            (i, j)
            for i in trusted
            for j in trusted
            if i < j
            and min(table[i, j], table[j, i]) > max(RELATED, table[i, i] + BETTER, table[j, j] + BETTER)
            and max(abs(usual[i, j]), abs(usual[j, i])) < 0.5
        ]
        if swapped:
            numbers = data.name_numbers(data.action, pairing.actions[list(swapped[0])].tolist())
            texts[episode.number] = f"{numbers}: exchanged, by the motion of the state", None
        elif reversed_ones:
            numbers = data.name_numbers(data.action, pairing.actions[reversed_ones].tolist())
            texts[episode.number] = f"{numbers}: opposite sign, by the motion of the state", None
    yield from group_findings(data.action, texts)


def _find_other_units(data: RecordedData, pairing: MotionPairs) -> Iterator[DataFinding]:
    """Yield actions in other units than the state that they are targets of."""
    assert data.state is not None
    rows = data.stack_rows(data.action)
    spread = rows.std(0)[pairing.actions]
    factor = spread / np.maximum(data.stack_rows(data.state).std(0)[pairing.states], 1e-9)
    commands = find_switches(rows)[pairing.actions]  # open or close, whatever the opening is measured in
    for i in np.flatnonzero(((factor > UNITS) | (factor < 1 / UNITS)) & ~commands).tolist():
        yield DataFinding(
            subject=data.action,
            message=f"{data.name_number(data.action, int(pairing.actions[i]))} moves {factor[i]:.3g} times as far as "
            f"{data.name_number(data.state, int(pairing.states[i]))} of the state; have they the same unit?",
        )


def _correlate_lags(
    data: RecordedData, place: int, kind: str, pairs: list[tuple[int, int]], detrended: bool = True
) -> Array:
    """Return each pair's correlation at each lag, float64 [P, lags]; NaN without motion or `OVERLAP` frames."""
    scores = np.full((len(pairs), len(LAGS)), np.nan)
    if len(data.episodes[place]) < LONG:
        return scores
    wanted, motion = _read_curves(data, place, kind, detrended)
    wanted, motion = wanted[:, [a for a, _ in pairs]], motion[:, [s for _, s in pairs]]
    for number, lag in enumerate(LAGS.tolist()):
        early, late = _shift(wanted, motion, lag)
        if len(early) >= OVERLAP:
            scores[:, number] = _correlations(early, late)
    return scores


def _correlate_pairs(data: RecordedData, place: int, pairing: MotionPairs, lag: int) -> Array:
    """Return the correlation of each paired action with each paired number of the state, float64 [P, P]."""
    count = len(pairing.actions)
    wanted, motion = _read_curves(data, place, pairing.kind)
    wanted, motion = _shift(wanted[:, pairing.actions], motion[:, pairing.states], lag)
    if len(data.episodes[place]) < LONG or len(wanted) < OVERLAP:
        return np.full((count, count), np.nan)
    return np.array([_correlations(np.repeat(wanted[:, [i]], count, axis=1), motion) for i in range(count)])


def _shift(wanted: Array, motion: Array, lag: int) -> tuple[Array, Array]:
    """Return the rows of two curves that are `lag` frames apart, without the ends of the first one."""
    margin = min(MARGIN, len(wanted) // 6)
    first, end = max(margin, -lag), min(len(wanted) - margin, len(wanted) - lag)
    return wanted[first : max(first, end)], motion[first + lag : max(first, end) + lag]


def _read_curves(data: RecordedData, place: int, kind: str, detrended: bool = True) -> tuple[Array, Array]:
    """Return what an episode's actions ask for and how its state moves, float64 [T, A] and [T, S], as `MotionPairs`."""
    assert data.state is not None
    vectors = data.episodes[place].vectors
    action, state = (vectors[name].astype(np.float64) for name in (data.action, data.state))
    if kind == "velocity":
        return action, np.diff(state, axis=0, append=state[-1:])
    return (_detrend(action), _detrend(state)) if detrended else (action, state)


def _correlations(a: Array, b: Array) -> Array:
    """Return the correlation of each column of `a` with that of `b`, [P]; NaN where one does not change."""
    a, b = a - a.mean(axis=0), b - b.mean(axis=0)
    size = np.sqrt((a**2).sum(axis=0) * (b**2).sum(axis=0))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(size > 1e-12, (a * b).sum(axis=0) / size, np.nan)


def _detrend(rows: Array) -> Array:
    """Return the rows without their moving average, so that slow motion does not hide a shift."""
    window = min(WINDOW, len(rows))
    sums = np.cumsum(
        np.concatenate(
            [np.repeat(rows[:1], window // 2 + 1, axis=0), rows, np.repeat(rows[-1:], window - window // 2 - 1, axis=0)]
        ),
        axis=0,
    )
    return np.asarray(rows - (sums[window:] - sums[:-window]) / window)


def _median_of(values: Array) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else -1.0


def _mean_of(scores: Array) -> Array:
    """Return the mean over the pairs (axis 1) that are known."""
    known = np.isfinite(scores)
    with np.errstate(invalid="ignore"):
        return np.where(known.any(axis=1), np.where(known, scores, 0).sum(axis=1) / known.sum(axis=1), np.nan)


def _plain_name(name: str) -> str:
    """Return a name without what tells positions from targets, such as lerobot's `.pos`."""
    return name.lower().removesuffix(".pos").removesuffix("_pos")

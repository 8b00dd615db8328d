"""Compares the actions of recorded episodes with the motion of the state: their order in time, signs and places."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from attrs import frozen

from vla_rl.core.types import Array
from vla_rl.toolkit.data.inspection.recorded import FEWEST, DataFinding, RecordedData, group_findings

LAGS = np.arange(-12, 13)
"""Frames by which the state is compared later (positive) or earlier than the action."""
RELATED = 0.6
"""Correlation from which an action is taken for a target of the state, or for its velocity."""
BETTER = 0.15
"""How much better an episode's own lag has to explain it than the usual lag."""
UNITS = 15.0
"""Factor between an action and the state that it is a target of from which their units differ."""
WINDOW = 15
"""Frames of the moving average that is subtracted before two curves are compared."""


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
    """float64 [E, lags]: mean correlation of each episode at each of `LAGS`; NaN: it hardly moves."""


def find_motion_faults(data: RecordedData) -> Iterator[DataFinding]:
    """Yield where actions do not go with the state. Nothing, where none of the actions is the target or the velocity of
    a number of the state."""
    if data.state is None or len(data.episodes) < FEWEST:
        return
    pairing = pair_numbers(data)
    if pairing is None:
        return
    yield from _find_shifts(data, pairing)
    yield from _find_exchanges(data, pairing)
    if pairing.kind == "target":
        yield from _find_other_units(data, pairing)


def pair_numbers(data: RecordedData) -> MotionPairs | None:
    """Return which numbers of the action go with which of the state, by names where both have equal ones, else by
    place. None where they are not related."""
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
    for kind in ("target", "velocity"):
        scores = np.array([_correlate_lags(data, place, kind, pairs) for place in range(len(data.episodes))])  # E, P, L
        with np.errstate(invalid="ignore"):
            strength = np.array([_median_of(scores[:, pair].max(axis=1)) for pair in range(len(pairs))])
        related = np.flatnonzero(strength > RELATED)
        if not len(related):
            continue
        means = _mean_of(scores[:, related])
        candidate = MotionPairs(
            kind=kind,
            actions=np.array([pairs[i][0] for i in related]),
            states=np.array([pairs[i][1] for i in related]),
            scores=means,
        )
        if best is None or _median_of(means.max(axis=1)) > _median_of(best.scores.max(axis=1)):
            best = candidate
    return best


def _find_shifts(data: RecordedData, pairing: MotionPairs) -> Iterator[DataFinding]:
    """Yield episodes whose actions are shifted in time against the others, and data whose actions follow the state."""
    moving = np.flatnonzero(np.isfinite(pairing.scores).all(axis=1))
    if len(moving) < FEWEST:
        return
    typical = np.median(pairing.scores[moving], axis=0)
    usual = int(typical.argmax())
    texts = {}
    for place in moving.tolist():
        scores = pairing.scores[place]
        own = int(scores.argmax())
        if abs(own - usual) >= 2 and scores[own] > RELATED and scores[own] - scores[usual] > BETTER:
            shift = int(LAGS[own] - LAGS[usual])
            later = "later" if shift < 0 else "earlier"
            text = f"the actions come {abs(shift)} frames {later} than in other episodes, by the motion of the state"
            texts[data.episodes[place].number] = text, None
    yield from group_findings(data.action, texts)
    now = int(np.flatnonzero(LAGS == 0)[0])
    if LAGS[usual] < -1 and typical[usual] - typical[now] > BETTER:
        yield DataFinding(
            subject=data.action,
            message=f"the actions follow the state by {-LAGS[usual]} frames in most episodes: a policy would learn to "
            "repeat what has happened",
        )


def _find_exchanges(data: RecordedData, pairing: MotionPairs) -> Iterator[DataFinding]:
    """Yield episodes in which an action moves the state the other way, or moves another number."""
    lag = int(np.nanmedian(pairing.scores, axis=0).argmax())
    tables = np.array([_correlate_pairs(data, place, pairing, int(LAGS[lag])) for place in range(len(data.episodes))])
    usual = np.nanmedian(tables, axis=0)
    trusted = np.flatnonzero(np.diagonal(usual) > RELATED).tolist()
    texts = {}
    for episode, table in zip(data.episodes, tables, strict=True):
        reversed_ones = [i for i in trusted if table[i, i] < -RELATED]
        swapped = [
            (i, j)
            for i in trusted
            for j in trusted
            if i < j
            and max(table[i, i], table[j, j]) < 0.5
            and min(table[i, j], table[j, i]) > RELATED
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
    spread = data.stack_rows(data.action).std(0)[pairing.actions]
    factor = spread / np.maximum(data.stack_rows(data.state).std(0)[pairing.states], 1e-9)
    for i in np.flatnonzero((factor > UNITS) | (factor < 1 / UNITS)).tolist():
        yield DataFinding(
            subject=data.action,
            message=f"{data.name_number(data.action, int(pairing.actions[i]))} moves {factor[i]:.3g} times as far as "
            f"{data.name_number(data.state, int(pairing.states[i]))} of the state; have they the same unit?",
        )


def _correlate_lags(data: RecordedData, place: int, kind: str, pairs: list[tuple[int, int]]) -> Array:
    """Return the correlation of each pair at each lag, float64 [P, lags]; NaN for what does not move."""
    if len(data.episodes[place]) < 2 * len(LAGS):
        return np.full((len(pairs), len(LAGS)), np.nan)
    wanted, motion = _read_curves(data, place, kind)
    reach = int(LAGS.max())
    middle = slice(reach, len(wanted) - reach)
    columns = [a for a, _ in pairs]
    rows = [s for _, s in pairs]
    scores = np.empty((len(pairs), len(LAGS)))
    for number, lag in enumerate(LAGS.tolist()):
        shifted = motion[reach + lag : len(motion) - reach + lag]
        scores[:, number] = _correlations(wanted[middle][:, columns], shifted[:, rows])
    return scores


def _correlate_pairs(data: RecordedData, place: int, pairing: MotionPairs, lag: int) -> Array:
    """Return the correlation of each paired action with each paired number of the state, float64 [P, P]."""
    count = len(pairing.actions)
    if len(data.episodes[place]) < 2 * len(LAGS):
        return np.full((count, count), np.nan)
    wanted, motion = _read_curves(data, place, pairing.kind)
    wanted, motion = wanted[:, pairing.actions], motion[:, pairing.states]
    early, late = max(0, -lag), max(0, lag)
    wanted, motion = wanted[early : len(wanted) - late], motion[late : len(motion) - early]
    return np.array([_correlations(np.repeat(wanted[:, [i]], count, axis=1), motion) for i in range(count)])


def _read_curves(data: RecordedData, place: int, kind: str) -> tuple[Array, Array]:
    """Return what an episode's actions ask for and how its state moves, float64 [T, A] and [T, S], for this kind of
    `MotionPairs`."""
    assert data.state is not None
    vectors = data.episodes[place].vectors
    action, state = (vectors[name].astype(np.float64) for name in (data.action, data.state))
    if kind == "target":
        return _detrend(action), _detrend(state)
    return action - action.mean(axis=0), np.diff(state, axis=0, append=state[-1:])


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

"""How good a world model is, on recorded episodes that it was not fitted to: nothing here asks which model it is.

Episodes are given as windows of K frames, the last of which is the first of the episode, and the H chunks after it.
Frames at step k are imagined from the model's own of the steps before, with the recorded actions.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from attrs import define, field

from vla_rl.core.randomness import Noise
from vla_rl.core.types import Array, Observation, to_numpy
from vla_rl.core.world_models import Windows, WorldModel
from vla_rl.toolkit.world_models.windows import followed_by, frames_of, part, take_rows

CHANGED = 8
"""Pixels that differ by more than this, of 255, in any colour have changed."""
CANDIDATES = 8
"""Chunks among which the recorded one is looked for."""
GATES = ("changed pixels", "actions", "replay")


@define(eq=False)
class EpisodeReplay:
    """Recorded episodes, and what the model makes of their actions. All but `alive` [steps, B]."""

    played: list[Array] = field(factory=list)
    """bool: the chunk was played."""
    imagined: list[Observation] = field(factory=list)
    real: list[Observation] = field(factory=list)
    before: list[Observation] = field(factory=list)
    """What was really seen before the chunk."""
    chances: list[Array] = field(factory=list)
    """Probabilities of outcomes, on imagined frames."""
    on_real: list[Array] = field(factory=list)
    """The same on recorded frames."""
    outcomes: list[Array] = field(factory=list)


def measure(model: WorldModel, windows: Windows, seed: int = 0, *, of_actions: int | None = None) -> dict[str, float]:
    """All measures of episodes (see above): by step those of pictures and states, and over all steps the rest.

    Args:
        of_actions: by how many of the episodes action following and disagreement are measured; None: by all.

    Returns:
        psnr/k, copy_psnr/k: of imagined frames, and of the frame before. changed_psnr/k, copy_changed_psnr/k: of pixels
        that changed. state_mae/k: in standard deviations of the recorded states. action_error: of pixels with the
        recorded actions, in units of those with another episode's; action_accuracy: how often the recorded chunk of
        `CANDIDATES` explains the next frame best. outcome_auc, outcome_auc_imagined: of success after a chunk.
        replay_auc, replay_fpr, replay_fnr: of the success of whole episodes; replay_auc_error: the first one's standard
        error. disagreement/k: mean absolute difference, in levels of 255, of frames that are imagined with other noise;
        outcome_disagreement: of the probability of success after a chunk.
    """
    replay = play(model, windows, seed)
    some = windows if of_actions is None else take_rows(windows, np.arange(min(of_actions, len(windows.instructions))))
    found = (
        _pictures(replay, windows)
        | _actions(model, some, seed)
        | _disagreement(replay, play(model, some, seed, "again"))
    )
    played = np.concatenate(replay.played)
    classes = np.concatenate(replay.outcomes)[played]
    chunk = windows.actions.shape[2]
    won = (classes >= 1) & (classes <= chunk)
    for name, chances in (("outcome_auc", replay.on_real), ("outcome_auc_imagined", replay.chances)):
        found[name] = roc_auc(np.concatenate(chances)[played][:, 1 : chunk + 1].sum(1), won)
    return found | _whole_episodes(replay, chunk)


def gates(found: Mapping[str, float], was_open: bool = False) -> dict[str, bool]:
    """Whether a model with these measures is good enough to practise in, and if not, for want of what. Where it was
    before, a replay AUC that is too low shuts only if chance, of so few episodes, is no explanation (95 %)."""
    steps = [name for name in found if name.startswith("changed_psnr/")]
    chance = 1.96 * found["replay_auc_error"] if was_open else 0.0
    values = (
        all(found[name] > found[f"copy_{name}"] for name in steps),
        found["action_accuracy"] > 0.5,
        found["replay_auc"] + chance > 0.9,
    )
    return dict(zip(GATES, values, strict=True))


def play(model: WorldModel, windows: Windows, seed: int = 0, draw: str = "measure") -> EpisodeReplay:
    """Imagine recorded episodes with their own actions, each frame from those imagined before it; `draw` keys the
    noise."""
    history, rows, replay = model.history, np.arange(len(windows.instructions)), EpisodeReplay()
    mind = take_rows(part(windows, 0, history), rows)
    for step in range(windows.actions.shape[1] - history + 1):
        actions, executed, outcomes = (
            getattr(windows, name)[:, history - 1 + step] for name in ("actions", "executed", "outcomes")
        )
        seen = frames_of(windows, history + step)
        imagined = model.imagine(mind, actions, _noise(windows, seed, step, draw)).numpy()
        replay.played.append(executed.any(1))
        replay.imagined.append(imagined)
        replay.real.append(seen)
        replay.before.append(frames_of(windows, history + step - 1))
        replay.chances.append(to_numpy(model.outcome(mind, actions, imagined)))
        replay.on_real.append(to_numpy(model.outcome(part(windows, step, step + history), actions, seen)))
        replay.outcomes.append(outcomes)
        mind = followed_by(mind, actions, executed, np.zeros(len(rows), np.int64), imagined)
    return replay


def roc_auc(scores: Array, positive: Array) -> float:
    """Area under the ROC curve: how often a positive has the higher score, ties half. NaN with one class only."""
    wins, total = int(positive.sum()), len(positive)
    if wins in (0, total):
        return float("nan")
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return float((ranks[positive].sum() - wins * (wins + 1) / 2) / (wins * (total - wins)))


def roc_auc_error(auc: float, wins: int, losses: int) -> float:
    """Standard error of an area under the ROC curve (Hanley and McNeil 1982). NaN where the area is."""
    if not wins * losses:
        return float("nan")
    both, other = auc / (2 - auc) - auc**2, 2 * auc**2 / (1 + auc) - auc**2
    return float(np.sqrt((auc * (1 - auc) + (wins - 1) * both + (losses - 1) * other) / (wins * losses)))


def psnr(one: Array, other: Array, mask: Array | None = None) -> float:
    """Peak signal-to-noise ratio of uint8 pictures in dB; of the pixels in `mask` only."""
    error = np.square(one.astype(np.float32) - other.astype(np.float32))
    mean = float(error.mean() if mask is None else error[mask].mean() if mask.any() else np.nan)
    return float(10 * np.log10(255**2 / mean)) if mean else float("inf")


# ------------------------------------------------------------------------------------------------------ inside


def _noise(windows: Windows, seed: int, step: int, draw: str = "measure") -> Noise:
    return Noise(
        seed, f"world-model/{draw}", windows.states.tolist(), windows.seeds.tolist(), [step] * len(windows.states)
    )


def _stacked(observation: Observation, rows: Array) -> Array:
    """All cameras' pixels, uint8 [R, pixels, 3]."""
    return np.concatenate([to_numpy(i)[rows].reshape(len(rows), -1, 3) for i in observation.images.values()], axis=1)


def _pictures(replay: EpisodeReplay, windows: Windows) -> dict[str, float]:
    found: dict[str, float] = {}
    spread = windows.state.std((0, 1)) + 1e-6
    for k, played in enumerate(replay.played, start=1):
        rows = np.flatnonzero(played)
        if not len(rows):
            continue
        real, imagined, before = (_stacked(o[k - 1], rows) for o in (replay.real, replay.imagined, replay.before))
        changed = np.asarray((np.abs(real.astype(np.int16) - before) > CHANGED).any(-1))
        for prefix, guess in (("", imagined), ("copy_", before)):
            found[f"{prefix}psnr/{k}"] = psnr(guess, real)
            found[f"{prefix}changed_psnr/{k}"] = psnr(guess, real, changed)
        told, was = replay.imagined[k - 1].state, replay.real[k - 1].state
        if told is not None and was is not None:
            error = np.abs(to_numpy(told)[rows] - to_numpy(was)[rows]) / spread
            found[f"state_mae/{k}"] = float(error.mean())
    return found


def _actions(model: WorldModel, windows: Windows, seed: int) -> dict[str, float]:
    """Of single predictions from recorded frames: whether the model heeds what it is told to do."""
    history, errors = model.history, []
    for step in range(windows.actions.shape[1] - history + 1):
        rows = np.flatnonzero(windows.executed[:, history - 1 + step].any(1))
        if len(rows) <= CANDIDATES:
            continue
        past = take_rows(part(windows, step, step + history), rows)
        actions = windows.actions[rows, history - 1 + step]
        real = _stacked(frames_of(windows, history + step), rows).astype(np.float32)
        for shift in range(CANDIDATES):
            imagined = model.imagine(past, np.roll(actions, shift, axis=0), _noise(past, seed, step))
            guess = _stacked(imagined, np.arange(len(rows)))
            errors.append((shift, np.square(guess - real).mean((1, 2))))
    if not errors:
        return {"action_error": float("nan"), "action_accuracy": float("nan")}
    table = np.stack([np.concatenate([e for at, e in errors if at == shift]) for shift in range(CANDIDATES)])
    return {
        "action_error": float(table[0].mean() / table[1:].mean()),
        "action_accuracy": float((table[0] < table[1:].min(0)).mean()),
    }


def _disagreement(one: EpisodeReplay, other: EpisodeReplay) -> dict[str, float]:
    """Of the same episodes, imagined with other noise; `other` may be of the first of them only."""
    found: dict[str, float] = {}
    chances: list[Array] = []
    for k, played in enumerate(other.played, start=1):
        rows = np.flatnonzero(played)
        if not len(rows):
            continue
        first, second = (_stacked(replay.imagined[k - 1], rows).astype(np.float32) for replay in (one, other))
        found[f"disagreement/{k}"] = float(np.abs(first - second).mean())
        chunk = (other.chances[k - 1].shape[1] - 1) // 2
        won, won_again = (replay.chances[k - 1][rows, 1 : chunk + 1].sum(1) for replay in (one, other))
        chances.append(np.abs(won - won_again))
    return found | {"outcome_disagreement": float(np.concatenate(chances).mean()) if chances else float("nan")}


def _whole_episodes(replay: EpisodeReplay, chunk: int) -> dict[str, float]:
    score, going = (np.full(len(replay.played[0]), value) for value in (0.0, 1.0))
    success = np.zeros(len(score), bool)
    for played, chances, outcome in zip(replay.played, replay.chances, replay.outcomes, strict=True):
        score += np.where(played, going * chances[:, 1 : chunk + 1].sum(1), 0)
        going *= np.where(played, chances[:, 0], 1)
        success |= played & (outcome >= 1) & (outcome <= chunk)
    guess, wins, auc = score > 0.5, int(success.sum()), roc_auc(score, success)
    return {
        "replay_auc": auc,
        "replay_auc_error": roc_auc_error(auc, wins, len(success) - wins),
        "replay_fpr": float(guess[~success].mean()) if (~success).any() else float("nan"),
        "replay_fnr": float((~guess[success]).mean()) if success.any() else float("nan"),
    }

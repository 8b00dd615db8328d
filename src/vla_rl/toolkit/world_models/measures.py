"""Quality measures of a world model on recorded episodes that it was not trained on, for any model. Episodes are given
as windows of K frames, the last of which is the first of the episode, and the H chunks after it. Frames at step k are
imagined from the model's own frames of the steps before, with the recorded actions."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from attrs import define, field

from vla_rl.core.randomness import Noise
from vla_rl.core.types import Array, Observation, to_numpy
from vla_rl.core.world_models import Windows, WorldModel
from vla_rl.toolkit.world_models.windows import followed_by, frames_of, take_frames

CHANGED = 8
"""Difference (of 255, in any colour) above which a pixel counts as changed."""
CANDIDATES = 8
"""Number of chunks among which the recorded one has to be identified."""
THRESHOLDS = ("changed pixels", "actions", "replay")


@define(eq=False)
class ImaginedEpisodes:
    """Recorded episodes, and the model's predictions for their actions. Each list has an entry [B, ...] a step."""

    executed: list[Array] = field(factory=list)
    """The chunk was executed; bool."""
    imagined: list[Observation] = field(factory=list)
    real: list[Observation] = field(factory=list)
    before: list[Observation] = field(factory=list)
    """Recorded observation before the chunk."""
    chances: list[Array] = field(factory=list)
    """Outcome probabilities from imagined frames."""
    on_real: list[Array] = field(factory=list)
    """Outcome probabilities from recorded frames."""
    outcomes: list[Array] = field(factory=list)


def measure_quality(
    model: WorldModel, windows: Windows, seed: int = 0, *, action_episodes: int | None = None
) -> dict[str, float]:
    """Compute all measures of episodes (see the module): of images and states per step k, others over all steps.

    Args:
        action_episodes: number of episodes that measure action following and disagreement; None: all.

    Returns:
        psnr/k, copy_psnr/k: of imagined frames, and of a copy of the frame before. changed_psnr/k,
        copy_changed_psnr/k: the same on pixels that changed. state_mae/k: in standard deviations of the recorded
        states. action_error: pixel error with the recorded actions, relative to the error with another episode's;
        action_accuracy: how often the recorded chunk of `CANDIDATES` explains the next frame best. outcome_auc,
        outcome_auc_imagined: AUC of success after a chunk. replay_auc, replay_fpr, replay_fnr: AUC, false-positive
        and false-negative rate of the success of whole episodes; replay_auc_error: standard error of that AUC.
        disagreement/k: mean absolute difference, in levels of 255, of frames that are imagined with other noise;
        outcome_disagreement: of the probability of success after a chunk.
    """
    replay = imagine_episodes(model, windows, seed)
    first_windows = windows.take(np.arange(len(windows.instructions))[:action_episodes])
    measures = (
        _image_measures(replay, windows)
        | _measure_actions(model, first_windows, seed)
        | _measure_disagreement(replay, imagine_episodes(model, first_windows, seed, "again"))
    )
    executed_steps = np.concatenate(replay.executed)
    classes = np.concatenate(replay.outcomes)[executed_steps]
    chunk = windows.actions.shape[2]
    won = (classes >= 1) & (classes <= chunk)
    for name, chances in (("outcome_auc", replay.on_real), ("outcome_auc_imagined", replay.chances)):
        measures[name] = roc_auc(np.concatenate(chances)[executed_steps][:, 1 : chunk + 1].sum(1), won)
    return measures | _whole_episodes(replay, chunk)


def thresholds_met(measures: Mapping[str, float], met_before: bool = False) -> dict[str, bool]:
    """Return for each quality threshold whether a model with these measures meets it; imagination needs all of them. If
    they were met before, a lower replay AUC fails only if chance does not explain it (95 %)."""
    steps = [name for name in measures if name.startswith("changed_psnr/")]
    chance = 1.96 * measures["replay_auc_error"] if met_before else 0.0
    values = (
        all(measures[name] > measures[f"copy_{name}"] for name in steps),
        measures["action_accuracy"] > 0.5,
        measures["replay_auc"] + chance > 0.9,
    )
    return dict(zip(THRESHOLDS, values, strict=True))


def imagine_episodes(model: WorldModel, windows: Windows, seed: int = 0, draw: str = "measure") -> ImaginedEpisodes:
    """Imagine recorded episodes by their actions, each frame from those imagined before it. `draw` keys the noise."""
    history, rows, replay = model.history, np.arange(len(windows.instructions)), ImaginedEpisodes()
    mind = take_frames(windows, 0, history).take(rows)
    for step in range(windows.actions.shape[1] - history + 1):
        actions, executed, outcomes = (
            getattr(windows, name)[:, history - 1 + step] for name in ("actions", "executed", "outcomes")
        )
        recorded = frames_of(windows, history + step)
        imagined = model.imagine(mind, actions, _build_noise(windows, seed, step, draw)).numpy()
        replay.executed.append(executed.any(1))
        replay.imagined.append(imagined)
        replay.real.append(recorded)
        replay.before.append(frames_of(windows, history + step - 1))
        replay.chances.append(to_numpy(model.outcome(mind, actions, imagined)))
        replay.on_real.append(to_numpy(model.outcome(take_frames(windows, step, step + history), actions, recorded)))
        replay.outcomes.append(outcomes)
        mind = followed_by(mind, actions, executed, np.zeros(len(rows), np.int64), imagined)
    return replay


def roc_auc(scores: Array, positive: Array) -> float:
    """Return the ROC curve's area: how often a positive has the higher score, ties half. NaN with one class only."""
    wins, total = int(positive.sum()), len(positive)
    if wins in (0, total):
        return float("nan")
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return float((ranks[positive].sum() - wins * (wins + 1) / 2) / (wins * (total - wins)))


def roc_auc_error(auc: float, wins: int, losses: int) -> float:
    """Return the standard error of an area under the ROC curve (Hanley and McNeil 1982). NaN with one class only."""
    if not wins * losses:
        return float("nan")
    both, other = auc / (2 - auc) - auc**2, 2 * auc**2 / (1 + auc) - auc**2
    return float(np.sqrt((auc * (1 - auc) + (wins - 1) * both + (losses - 1) * other) / (wins * losses)))


def compute_psnr(one: Array, other: Array, mask: Array | None = None) -> float:
    """Return the peak signal-to-noise ratio of uint8 images in dB, over the pixels in `mask` if given."""
    error = np.square(one.astype(np.float32) - other.astype(np.float32))
    mean = float(error.mean() if mask is None else error[mask].mean() if mask.any() else np.nan)
    return float(10 * np.log10(255**2 / mean)) if mean else float("inf")


# ------------------------------------------------------------------------------------------------------ inside


def _build_noise(windows: Windows, seed: int, step: int, draw: str = "measure") -> Noise:
    return Noise(
        seed, f"world-model/{draw}", windows.states.tolist(), windows.seeds.tolist(), [step] * len(windows.states)
    )


def _stack_pixels(observation: Observation, rows: Array) -> Array:
    """Return the pixels of all cameras, uint8 [R, pixels, 3]."""
    return np.concatenate([to_numpy(i)[rows].reshape(len(rows), -1, 3) for i in observation.images.values()], axis=1)


def _image_measures(replay: ImaginedEpisodes, windows: Windows) -> dict[str, float]:
    measures: dict[str, float] = {}
    spread = windows.state.std((0, 1)) + 1e-6
    for k, executed_steps in enumerate(replay.executed, start=1):
        rows = np.flatnonzero(executed_steps)
        if not len(rows):
            continue
        real, imagined, before = (_stack_pixels(o[k - 1], rows) for o in (replay.real, replay.imagined, replay.before))
        changed = np.asarray((np.abs(real.astype(np.int16) - before) > CHANGED).any(-1))
        for prefix, guess in (("", imagined), ("copy_", before)):
            measures[f"{prefix}psnr/{k}"] = compute_psnr(guess, real)
            measures[f"{prefix}changed_psnr/{k}"] = compute_psnr(guess, real, changed)
        imagined_state, was = replay.imagined[k - 1].state, replay.real[k - 1].state
        if imagined_state is not None and was is not None:
            error = np.abs(to_numpy(imagined_state)[rows] - to_numpy(was)[rows]) / spread
            measures[f"state_mae/{k}"] = float(error.mean())
    return measures


def _measure_actions(model: WorldModel, windows: Windows, seed: int) -> dict[str, float]:
    """Measure action following by single predictions from recorded frames: whether they depend on the actions."""
    history, errors = model.history, []
    for step in range(windows.actions.shape[1] - history + 1):
        rows = np.flatnonzero(windows.executed[:, history - 1 + step].any(1))
        if len(rows) <= CANDIDATES:
            continue
        past = take_frames(windows, step, step + history).take(rows)
        actions = windows.actions[rows, history - 1 + step]
        real = _stack_pixels(frames_of(windows, history + step), rows).astype(np.float32)
        for shift in range(CANDIDATES):
            imagined = model.imagine(past, np.roll(actions, shift, axis=0), _build_noise(past, seed, step))
            guess = _stack_pixels(imagined, np.arange(len(rows)))
            errors.append((shift, np.square(guess - real).mean((1, 2))))
    if not errors:
        return {"action_error": float("nan"), "action_accuracy": float("nan")}
    table = np.stack([np.concatenate([e for at, e in errors if at == shift]) for shift in range(CANDIDATES)])
    return {
        "action_error": float(table[0].mean() / table[1:].mean()),
        "action_accuracy": float((table[0] < table[1:].min(0)).mean()),
    }


def _measure_disagreement(one: ImaginedEpisodes, other: ImaginedEpisodes) -> dict[str, float]:
    """Measure the disagreement of the episodes with other noise; `other` may have only the first of them."""
    measures: dict[str, float] = {}
    chances: list[Array] = []
    for k, executed_steps in enumerate(other.executed, start=1):
        rows = np.flatnonzero(executed_steps)
        if not len(rows):
            continue
        first, second = (_stack_pixels(replay.imagined[k - 1], rows).astype(np.float32) for replay in (one, other))
        measures[f"disagreement/{k}"] = float(np.abs(first - second).mean())
        chunk = (other.chances[k - 1].shape[1] - 1) // 2
        won, won_again = (replay.chances[k - 1][rows, 1 : chunk + 1].sum(1) for replay in (one, other))
        chances.append(np.abs(won - won_again))
    return measures | {"outcome_disagreement": float(np.concatenate(chances).mean()) if chances else float("nan")}


def _whole_episodes(replay: ImaginedEpisodes, chunk: int) -> dict[str, float]:
    score, going = (np.full(len(replay.executed[0]), value) for value in (0.0, 1.0))
    success = np.zeros(len(score), bool)
    for executed_steps, chances, outcome in zip(replay.executed, replay.chances, replay.outcomes, strict=True):
        score += np.where(executed_steps, going * chances[:, 1 : chunk + 1].sum(1), 0)
        going *= np.where(executed_steps, chances[:, 0], 1)
        success |= executed_steps & (outcome >= 1) & (outcome <= chunk)
    guess, wins, auc = score > 0.5, int(success.sum()), roc_auc(score, success)
    return {
        "replay_auc": auc,
        "replay_auc_error": roc_auc_error(auc, wins, len(success) - wins),
        "replay_fpr": float(guess[~success].mean()) if (~success).any() else float("nan"),
        "replay_fnr": float((~guess[success]).mean()) if success.any() else float("nan"),
    }

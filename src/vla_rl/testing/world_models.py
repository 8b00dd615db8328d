"""`check_world_model`: does a world model keep to the contract of `WorldModel`? Experimental, as that is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from itertools import combinations, pairwise
from typing import Any

import attrs
import numpy as np
import torch
from attrs import frozen

from vla_rl.core.contexts import WorldModelContext
from vla_rl.core.declarations import WorldModelPlugin
from vla_rl.core.randomness import Noise, generator
from vla_rl.core.types import Array, EnvInfo, Observation, to_numpy
from vla_rl.core.world_models import Windows, WorldModel
from vla_rl.testing.common.comparison import copy_weights, differing_weights, same_data
from vla_rl.testing.common.findings import Findings, build_component, check_array
from vla_rl.testing.common.generators import expect_untouched, run_from, seeded_generators
from vla_rl.testing.env_checks.values import check_observation
from vla_rl.testing.policy_traces import check_building, check_call, other_seed
from vla_rl.toolkit.world_models.windows import take_frames

ROWS = 4
ROLLOUT = 2
FITS = 20
"""Optimiser steps on one window, with the same noise, after which a model has to be better at it."""
UNLEARNED = 0.05
"""Nats that recorded outcomes may become less likely by, after these."""
LIKENESS = 0.2
"""How much better an image may correlate with a turned frame than with the frame as it is."""
BARELY = 1e-6
"""Tolerance on a probability or a state: what is rounded otherwise in another row of a batch."""
LOSS_WORDS = ("loss", "mse", "mae", "nll", "error", "cross_entropy")
"""Metrics of `fit` with one of these in their names are losses, where `measure` names none."""


@frozen(eq=False)
class _Case:
    """A world model, windows for it, and findings."""

    mind: WorldModel
    f: Findings
    env: EnvInfo
    windows: Windows
    """Windows of history + 2 frames."""

    @property
    def row_indices(self) -> Array:
        return np.arange(len(self.windows.instructions))

    @property
    def past_windows(self) -> Windows:
        """Return copies of the windows' history, from which imagination starts."""
        return take_frames(self.windows, 0, self.mind.history).take(self.row_indices)

    @property
    def recorded_actions(self) -> Array:
        """The chunk that followed, as it was recorded."""
        return np.array(self.windows.actions[:, self.mind.history - 1])

    @property
    def mirrored_actions(self) -> Array:
        """Other chunks: the actions on the other side of the middle of their bounds, and off it."""
        low, high = (np.array(bound, np.float32) for bound in (self.env.action_low, self.env.action_high))
        turned = low + high - self.recorded_actions
        near = np.abs(turned - self.recorded_actions) < 0.1 * (high - low)
        other: Array = np.where(near, low + 0.9 * (high - low), turned).astype(np.float32)
        return other

    def recorded_frame(self, at: int) -> Observation:
        """Copies of the windows' frames at this place."""
        return Observation(
            images={camera: np.array(frames[:, at]) for camera, frames in self.windows.images.items()},
            instructions=self.windows.instructions,
            state=np.array(self.windows.state[:, at]) if self.windows.state.shape[2] else None,
        )

    def recorded_chances(self) -> Array:
        """Probabilities of the outcome of the chunk that followed, with what was recorded after it."""
        after = self.recorded_frame(self.mind.history)
        chances: Array = np.array(to_numpy(self.mind.outcome(self.past_windows, self.recorded_actions, after)))
        return chances

    def fit_once(self, number: int = 0) -> dict[str, float]:
        return {
            name: float(value)
            for name, value in self.mind.fit(self.windows, _make_noise(self.row_indices, number)).items()
        }

    def imagine_from(self, past: Windows, actions: Array) -> Observation:
        return self.mind.imagine(past, actions, _make_noise(np.arange(len(actions)))).numpy()


def check_world_model(
    model: WorldModel | WorldModelPlugin,
    config: Any = None,
    *,
    env: EnvInfo,
    chunk: int = 2,
    windows: Windows | None = None,
) -> None:
    """Fit a world model some thirty times and imagine with it; raises CheckFailed with all findings.

    Twenty fits on one window lower its losses (those that `measure` names, or else metrics with "loss" and the like
    in their names) and make its outcomes no less likely; what is imagined then is new and stands as the frames do,
    each number of an action leads elsewhere; a model that is restored continues exactly. Models that never learn (no
    `module`, no metrics of `fit`) are not asked what learning brings.

    Args:
        model: a component that was built for `env` and `chunk`, or a `WorldModelPlugin` that is built with
            `config` for them.
        windows: at least 4 recorded ones of history + 2 frames; none: noise, which most models can do with.
    """
    model_context = WorldModelContext(env=env, chunk=chunk)
    building = run_from(11, lambda: build_component("world_model", model, config, model_context))
    mind: WorldModel
    mind, name = building.result
    f = Findings(f"check_world_model of {name}")
    with f.section("history"):
        f.expect(mind.history >= 1, "history", "at least 1", mind.history, "the last frame is part of it")
    given = made_up_windows(env, ROWS, mind.history + ROLLOUT, chunk) if windows is None else windows
    case = _Case(mind, f, env, given)
    twin: WorldModel | None = None
    if isinstance(model, WorldModelPlugin):
        with f.section("build"):
            again = run_from(12, lambda: build_component("world_model", model, config, model_context))
            check_building(f, *(attrs.evolve(ran, result=ran.result[0]) for ran in (building, again)))
            twin = build_component("world_model", model, config, other_seed(model_context))[0]
    learns = False
    with f.section("fit"):
        _check_fit(case)
        learns = mind.module is not None or bool(case.fit_once())
    if learns:
        with f.section("learning"):
            _check_learning(case)
        if twin is not None:
            with f.section("restoring"):
                _check_restoring(case, twin)
    with f.section("imagine and outcome"):
        if _check_imagination(case):
            with f.section("what is imagined"):
                _check_contents(case, learns)
            with f.section("rows apart"):
                _check_rows_apart(case)
            with f.section("traces"):
                _check_traces(case)
    f.close()


def made_up_windows(env: EnvInfo, count: int, frames: int, chunk: int, seed: int = 0) -> Windows:
    """Return noise images, states, actions and outcomes; the first chunk of the first row was not executed."""
    draws = generator(seed, "windows")
    low, high = (np.array(bound, np.float32) for bound in (env.action_low, env.action_high))
    shape = (count, frames - 1, chunk)
    executed = np.ones(shape, bool)
    executed[0, 0] = False
    return Windows(
        images={
            camera: draws.integers(0, 256, (count, frames, *size, 3), np.uint8) for camera, size in env.cameras.items()
        },
        state=draws.standard_normal((count, frames, env.state_dim), np.float32),
        actions=low + (high - low) * draws.random((*shape, env.action_dim), np.float32),
        executed=executed,
        outcomes=draws.integers(0, 1 + 2 * chunk, shape[:2]),
        first=np.zeros(count, np.int64),
        states=np.arange(count),
        seeds=np.zeros(count, np.int64),
        instructions=tuple(env.tasks[i % len(env.tasks)].instruction for i in range(count)),
    )


def _make_noise(rows: Any, number: int = 0) -> Noise:
    return Noise(0, "check_world_model", list(rows), [0] * len(rows), [number] * len(rows))


def _check_fit(case: _Case) -> None:
    f, mind, windows = case.f, case.mind, case.windows
    original = copy.deepcopy(windows)
    case.fit_once()
    weights = copy_weights(mind.module)
    state = copy.deepcopy(mind.training_state())
    fit_metrics = [case.fit_once(number) for number in (1, 2)]
    for name, value in {**fit_metrics[0], **mind.measure(windows, _make_noise(case.row_indices))}.items():
        f.expect(bool(np.isfinite(value)), "fit and measure", f"a finite {name}", value, "find the cause")
    same = same_data(windows, original)
    f.expect(same, "fit", "its windows unchanged", "others written into them", "copy before you write")
    if mind.module is not None:
        mind.module.load_state_dict(weights)
    mind.load_training_state(state)
    again = [case.fit_once(number) for number in (1, 2)]
    remedy = "let training_state hold all that a step changes, the optimiser first of all"
    f.expect(again == fit_metrics, "load_training_state", f"to continue exactly: {fit_metrics}", again, remedy)


def _check_learning(case: _Case) -> None:
    """Twenty fits on one window."""
    f, mind = case.f, case.mind
    before = copy_weights(mind.module)
    chances = case.recorded_chances()
    fit_metrics = [case.fit_once() for _ in range(FITS)]
    if mind.module is not None:
        changed = bool(differing_weights(before, mind.module.state_dict()))
        f.expect(changed, "fit", "other weights after it", "the same", "step the optimiser on what is in `module`")
        _check_outcome_learned(case, before, chances)
    measured = list(mind.measure(case.windows, _make_noise(case.row_indices)))
    names = [name for name in fit_metrics[0] if name in measured]
    names = names or [name for name in fit_metrics[0] if any(word in name.lower() for word in LOSS_WORDS)]
    if not names:
        return
    first, last = (sum(metrics[name] for name in names) for metrics in (fit_metrics[0], fit_metrics[-1]))
    text = ", ".join(names)
    expected = f"lower losses ({text}) after {FITS} fits on one window"
    f.expect(last < first, "fit", expected, f"{first:.4g}, then {last:.4g}", "mind the sign, and the learning rate")
    still = _unmoved_parameters(mind, before)
    for name in names:
        fixed = len({metrics[name] for metrics in fit_metrics}) == 1 and fit_metrics[0][name] != 0 and bool(still)
        got = f"{fit_metrics[0][name]:.4g} after each, and no change of {', '.join(still[:4])}"
        remedy = "let its gradient reach them, or freeze them by requires_grad_(False)"
        f.expect(not fixed, "fit", f"a {name} that {FITS} fits on one window change", got, remedy)
        rises = all(one[name] < other[name] for one, other in pairwise(fit_metrics))
        got = f"{fit_metrics[0][name]:.4g}, then {fit_metrics[-1][name]:.4g}"
        f.expect(not rises, "fit", f"a {name} that falls sometimes", f"one that rises at every fit: {got}", "descend")


def _unmoved_parameters(mind: WorldModel, before: Mapping[str, torch.Tensor]) -> list[str]:
    """Parameters to train that are as they were."""
    named = [] if mind.module is None else mind.module.named_parameters()
    return [name for name, p in named if p.requires_grad and torch.equal(p, before[name])]


def _check_outcome_learned(case: _Case, before: Mapping[str, torch.Tensor], chances: Array) -> None:
    """After fits on them, recorded outcomes are no less likely than `chances`, float [rows, classes], said before."""
    if case.mind.module is None or not np.isfinite(chances).all():
        return
    now, was_executed = case.recorded_chances(), case.windows.executed[:, case.mind.history - 1].any(-1)
    if now.shape != chances.shape or not was_executed.any():
        return
    if np.array_equal(now, chances):
        still = _unmoved_parameters(case.mind, before)
        expected = f"one step of all parts: outcomes of recorded frames that {FITS} fits change"
        got = f"the same outcomes, and no change of {', '.join(still[:4])}"
        remedy = "train what `outcome` is computed from, or freeze it by requires_grad_(False)"
        case.f.expect(not still, "fit", expected, got, remedy)
        return
    rows = np.flatnonzero(was_executed)
    recorded = case.windows.outcomes[rows, case.mind.history - 1]
    first, last = (float(np.log(np.maximum(text[rows, recorded], 1e-12)).mean()) for text in (chances, now))
    expected = f"recorded outcomes that are likelier after {FITS} fits on them"
    got = f"a mean log-probability of {first:.3g}, then {last:.3g}"
    remedy = "compute it from what `fit` learns from, in the classes of `Windows.outcomes`: 0 continues, 1 + i success "
    remedy += "at action i, 1 + C + i failure"
    case.f.expect(last > first - UNLEARNED, "outcome", expected, got, remedy)


def _check_restoring(case: _Case, twin: WorldModel) -> None:
    """Check that a new model, built with another seed, resumes from weights and training state."""
    mind, f = case.mind, case.f
    if mind.module is not None and twin.module is not None:
        twin.module.load_state_dict(copy.deepcopy(mind.module.state_dict()))
    twin.load_training_state(copy.deepcopy(mind.training_state()))
    restored = attrs.evolve(case, mind=twin)
    gap = _observation_gap(
        case.imagine_from(case.past_windows, case.recorded_actions),
        restored.imagine_from(case.past_windows, case.recorded_actions),
    )
    remedy = "keep all that is trained in `module`, and the rest in training_state"
    f.expect(gap == 0, "load_training_state", "the same frames of a restored model", f"{gap:.3g} of 255 apart", remedy)
    one, other = case.fit_once(), restored.fit_once()
    f.expect(one == other, "load_training_state", f"a restored model to continue exactly: {one}", other, remedy)


def _check_imagination(case: _Case) -> bool:
    """Check one imagined step: shapes, probabilities, repeatability. Return whether there are frames to check."""
    f, mind, env, chosen = case.f, case.mind, case.env, case.row_indices
    past, actions = case.past_windows, case.recorded_actions
    original_past, original_actions = copy.deepcopy(past), actions.copy()
    after = case.imagine_from(past, actions)
    if not check_observation(f, env, after, len(chosen), "imagine"):
        return False
    same, expected = after.instructions == past.instructions, list(past.instructions)
    f.expect(same, "imagine", expected, list(after.instructions), "those of the windows")
    copied = copy.deepcopy(after)
    chances = to_numpy(mind.outcome(past, actions, after))
    if check_array(f, chances, (len(chosen), 1 + 2 * actions.shape[1]), "float32", "outcome"):
        holds = bool(np.isfinite(chances).all() and (chances >= 0).all() and np.allclose(chances.sum(1), 1, atol=1e-4))
        f.expect(holds, "outcome", "probabilities", chances.sum(1).round(3).tolist(), "use a softmax")
    same = same_data((past, actions), (original_past, original_actions))
    f.expect(same, "imagine", "its windows unchanged", "others written into them", "copy before you write")
    same = same_data(after, copied)
    f.expect(same, "outcome", "its `after` unchanged", "written into", "copy before you write")
    gap = _observation_gap(after, case.imagine_from(past, actions))
    remedy = "draw from `noise` only, and keep nothing between calls"
    f.expect(gap == 0, "imagine", "the same for the same noise", f"{gap:.3g}", remedy)
    same = np.array_equal(chances, to_numpy(mind.outcome(past, actions, after)))
    f.expect(same, "outcome", "the same for the same arguments", "another the second time", "no random numbers")
    case.imagine_from(past, case.mirrored_actions)
    same = same_data(after, copied)
    f.expect(same, "imagine", "frames that stay as they are", "ones that the next call wrote into", "return new arrays")
    return True


def _check_contents(case: _Case, learns: bool) -> None:
    """Check that imagined frames depend on the actions and on the last frames."""
    f, past, actions = case.f, case.past_windows, case.recorded_actions
    after, elsewhere = case.imagine_from(past, actions), case.imagine_from(past, case.mirrored_actions)
    remedy = "give the network the actions of the chunk"
    same = same_data(after.images, elsewhere.images)
    f.expect(not same, "imagine", "other frames for other actions", "the same", remedy)
    last, remedy = case.recorded_frame(case.mind.history - 1), "predict what is seen after the chunk"
    same = same_data(after.images, last.images)
    f.expect(not same, "imagine", "what is seen next", "the last frame of the window", remedy)
    if after.state is not None:
        same = np.array_equal(to_numpy(after.state), to_numpy(elsewhere.state))
        f.expect(not same, "imagine", "another state for other actions", "the same", "predict it, too")
    _check_cameras(case, after)
    _check_upright(case, after)
    if not learns:
        return
    if case.mind.module is not None:
        _check_each_number(case)
    others = copy.deepcopy(past)
    for frames in (*others.images.values(), others.state):
        frames[:, -1] = frames[::-1, -1].copy()
    from_other_frames = case.imagine_from(others, actions)
    same, remedy = same_data(after.images, from_other_frames.images), "look at windows.images[camera][:, -1]"
    f.expect(not same, "imagine", "other frames after another last frame", "the same", remedy)
    if case.mind.module is None:
        return
    chances = [
        to_numpy(case.mind.outcome(past, *pair)) for pair in ((actions, after), (case.mirrored_actions, elsewhere))
    ]
    fixed = np.array_equal(chances[0], chances[1]) and bool((np.ptp(chances[0], axis=0) == 0).all())
    remedy = "tell it from the window, the actions or what is seen after them"
    f.expect(not fixed, "outcome", "probabilities that depend on what happened", "the same for everything", remedy)


def _check_cameras(case: _Case, after: Observation) -> None:
    """No camera shows what another one sees."""
    windows = case.windows.images
    for one, other in combinations(after.images, 2):
        if windows[one].shape != windows[other].shape or np.array_equal(windows[one], windows[other]):
            continue
        alike = np.array_equal(after.images[one], after.images[other])
        expected, remedy = f"a separate image for camera {other!r}", "predict each camera"
        case.f.expect(not alike, "imagine", expected, f"that of {one!r}", remedy)


TURNED: dict[str, Callable[[Array], Array]] = {
    "upside down": lambda images: images[:, ::-1],
    "mirrored": lambda images: images[:, :, ::-1],
    "turned by 180 degrees": lambda images: images[:, ::-1, ::-1],
    "with red and blue exchanged": lambda images: images[..., ::-1],
}


def _check_upright(case: _Case, after: Observation) -> None:
    """What is imagined is like frames of the window as they are, not as they would be turned or from elsewhere. Rows
    are compared by what they do not share, so that an image that nothing was learned from is like none."""
    at, recorded = case.mind.history, case.windows.images
    for camera, images in after.images.items():
        imagined = to_numpy(images)
        dark = bool(0 < imagined.max() <= 1) and int(recorded[camera].max()) > 1
        case.f.expect(not dark, f"imagine: image {camera!r}", "values from 0 to 255", "no above 1", "multiply by 255")
        for frame in (at - 1, at):
            likeness = _pixel_correlation(imagined, recorded[camera][:, frame])
            likely = {how: turn(recorded[camera][:, frame]) for how, turn in TURNED.items()}
            likely |= {f"of camera {other!r}": recorded[other][:, frame] for other in recorded if other != camera}
            alike = {
                how: _pixel_correlation(imagined, like) for how, like in likely.items() if like.shape == imagined.shape
            }
            how = max(alike, key=lambda name: alike[name])
            holds = alike[how] < likeness + LIKENESS
            got = f"one that is like them {how} (correlation {alike[how]:.2f}, and {likeness:.2f} as they are)"
            expected, remedy = "an image like the frames of the window", "keep rows, columns, colours and cameras"
            if not case.f.expect(holds, f"imagine: image {camera!r}", expected, got, remedy):
                break


def _pixel_correlation(images: Array, others: Array) -> float:
    """Correlation of pixels, of what differs between rows."""
    one, other = (array.astype(np.float32) - array.mean(0, dtype=np.float32) for array in (images, others))
    scale = float(np.sqrt((one**2).sum() * (other**2).sum()))
    return float((one * other).sum()) / scale if scale > 0 else 0.0


def _check_each_number(case: _Case) -> None:
    """Each action of a chunk and each number of an action counts: one window again and again, with other actions."""
    mind, row = case.mind, 1
    steps, numbers = case.recorded_actions.shape[1:]
    rows = np.full(1 + steps + numbers, row)
    actions, other = case.recorded_actions[rows], case.mirrored_actions[row]
    for step in range(steps):
        actions[1 + step, step] = other[step]
    for number in range(numbers):
        actions[1 + steps + number, :, number] = other[:, number]
    past = case.past_windows.take(rows)
    after = mind.imagine(past, actions, _make_noise(rows)).numpy()
    chances = to_numpy(mind.outcome(past, actions, after))
    changed = np.abs(chances - chances[:1]).max(1) > BARELY
    if after.state is not None:
        state = to_numpy(after.state)
        changed |= (np.abs(state - state[:1]) > BARELY * np.maximum(1, np.abs(state[:1]))).any(1)
    for images in after.images.values():
        imagined = to_numpy(images).reshape(len(rows), -1).astype(np.float32)
        changed |= (imagined != imagined[:1]).sum(1) > 1  # a pixel may be rounded otherwise
    unread = [f"action {i}" for i in range(steps) if not changed[1 + i]]
    unread += [f"number {i} of actions" for i in range(numbers) if not changed[1 + steps + i]]
    expected, got = "each number of each action of a chunk to count", f"nothing new for another {', '.join(unread[:4])}"
    case.f.expect(not unread, "imagine", expected, got, "give the network the actions of the chunk, all of them")


def _check_rows_apart(case: _Case) -> None:
    f, mind, past, actions = case.f, case.mind, case.past_windows, case.recorded_actions
    after = case.imagine_from(past, actions)
    one = case.row_indices[1:2]
    alone = mind.imagine(past.take(one), actions[1:2], _make_noise(one)).numpy()
    got = _observation_gap(after.take(one), alone)
    f.expect(got < 1.0, "imagine", "a row alone as among others", f"{got:.3g} of 255 apart", "let rows share nothing")
    if after.state is not None and alone.state is not None:
        spread = case.windows.state.reshape(-1, case.windows.state.shape[2]).std(0)
        moved = np.abs(to_numpy(after.state)[1] - to_numpy(alone.state)[0])
        differing = np.flatnonzero(moved > 0.01 * np.maximum(1, spread))
        text = f"{float(moved.max()):.3g} apart (number {', '.join(map(str, differing))})"
        expected = "a row's state alone as among others"
        f.expect(not len(differing), "imagine", expected, text, "use no statistics of the batch")
    others = case.mirrored_actions
    others[1] = actions[1]
    repeated = case.imagine_from(past, others)
    got = _observation_gap(after.take(one), repeated.take(one))
    expected, remedy = "a row that does not depend on other rows' actions", "let rows share nothing"
    f.expect(got < 0.1, "imagine", expected, f"{got:.3g} of 255 apart", remedy)
    chances = to_numpy(mind.outcome(past, actions, after))[1:2]
    single = to_numpy(mind.outcome(past.take(one), actions[1:2], after.take(one)))
    got = float(np.abs(chances - single).max())
    f.expect(got < 1e-3, "outcome", "a row alone as among others", f"{got:.3g} apart", "let rows share nothing")


def _check_traces(case: _Case) -> None:
    """Nothing but `fit` changes a model, and nothing touches the global generators; `fit` may draw from them."""
    f, mind, past, actions = case.f, case.mind, case.past_windows, case.recorded_actions
    after = case.imagine_from(past, actions)
    calls: dict[str, Callable[[], Any]] = {
        "imagine": lambda: case.imagine_from(past, actions),
        "outcome": lambda: mind.outcome(past, actions, after),
        "measure": lambda: mind.measure(case.windows, _make_noise(case.row_indices)),
    }
    for where, call in calls.items():
        ran = check_call(f, mind.module, where, call, "let `fit` alone train")
        expect_untouched(f, where, ran.changed_generators)
    expect_untouched(f, "fit", seeded_generators(*(run_from(seed, case.fit_once) for seed in (11, 12))))


def _observation_gap(one: Observation, other: Observation) -> float:
    """Mean difference of pixels, of 255; and of states, whichever is larger."""
    pairs = [(one.images[name], other.images[name]) for name in one.images]
    pairs += [] if one.state is None or other.state is None else [(one.state, other.state)]
    return max(float(np.abs(to_numpy(a).astype(np.float32) - to_numpy(b)).mean()) for a, b in pairs)

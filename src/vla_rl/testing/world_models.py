"""`check_world_model`: does a world model keep to the contract of `WorldModel`? Experimental, as that is."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from vla_rl.core.randomness import Noise, generator
from vla_rl.core.types import Context, EnvInfo, Observation, Plugin, to_numpy
from vla_rl.core.world_models import Windows, WorldModel
from vla_rl.testing.env_checks.values import check_array, check_observation
from vla_rl.testing.findings import Findings, built
from vla_rl.toolkit.world_models.windows import ROWS as ARRAYS
from vla_rl.toolkit.world_models.windows import part, take_rows

ROWS = 4
ROLLOUT = 2


def check_world_model(
    model: WorldModel | Plugin, config: Any = None, *, env: EnvInfo, chunk: int = 2, windows: Windows | None = None
) -> None:
    """Fit a world model a few times and imagine with it; raises CheckFailed with all findings.

    Args:
        model: a component that was built for `env` and `chunk`, or a `Plugin` that is built with `config` for them.
        windows: at least 4 recorded ones of history + 2 frames; none: noise, which most models can do with.
    """
    mind: WorldModel
    mind, name = built("world_model", model, config, Context(env=env, chunk=chunk))
    f = Findings(f"check_world_model of {name}")
    with f.section("history"):
        f.expect(mind.history >= 1, "history", "at least 1", mind.history, "the last frame is part of it")
    given = made_up_windows(env, ROWS, mind.history + ROLLOUT, chunk) if windows is None else windows
    with f.section("fit"):
        _check_fit(f, mind, given)
    with f.section("imagine and outcome"):
        _check_imagination(f, mind, given, env)
    f.close()


def made_up_windows(env: EnvInfo, count: int, frames: int, chunk: int, seed: int = 0) -> Windows:
    """Noise pictures, states, actions and outcomes; the first chunk of the first row was not played."""
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


def _noise(rows: Any, number: int = 0) -> Noise:
    return Noise(0, "check_world_model", list(rows), [0] * len(rows), [number] * len(rows))


def _check_fit(f: Findings, mind: WorldModel, windows: Windows) -> None:
    rows = range(len(windows.instructions))
    kept = copy.deepcopy(windows)
    mind.fit(windows, _noise(rows))
    weights = {} if mind.module is None else copy.deepcopy(mind.module.state_dict())
    state = copy.deepcopy(mind.training_state())
    found = [mind.fit(windows, _noise(rows, number)) for number in (1, 2)]
    for name, value in {**found[0], **mind.measure(windows, _noise(rows))}.items():
        f.expect(bool(np.isfinite(value)), "fit and measure", f"a finite {name}", value, "find the cause")
    same = all(np.array_equal(a, b) for a, b in zip(_arrays(windows), _arrays(kept), strict=True))
    f.expect(same, "fit", "its windows unchanged", "others written into them", "copy before you write")
    if mind.module is not None:
        mind.module.load_state_dict(weights)
    mind.load_training_state(state)
    again = [mind.fit(windows, _noise(rows, number)) for number in (1, 2)]
    remedy = "let training_state hold all that a step changes, the optimiser first of all"
    f.expect(again == found, "load_training_state", f"to go on exactly: {found}", again, remedy)


def _check_imagination(f: Findings, mind: WorldModel, windows: Windows, env: EnvInfo) -> None:
    chosen = np.arange(len(windows.instructions))
    start = part(windows, 0, mind.history)
    past, actions = take_rows(start, chosen), np.array(windows.actions[:, mind.history - 1])
    kept = copy.deepcopy(past)
    after = mind.imagine(past, actions, _noise(chosen)).numpy()
    if not check_observation(f, env, after, len(chosen), "imagine"):
        return
    told = f"{list(past.instructions)}"
    f.expect(after.instructions == past.instructions, "imagine", told, list(after.instructions), "those of the windows")
    chances = to_numpy(mind.outcome(past, actions, after))
    if check_array(f, chances, (len(chosen), 1 + 2 * actions.shape[1]), "float32", "outcome"):
        fine = bool((chances >= 0).all() and np.allclose(chances.sum(1), 1, atol=1e-4))
        f.expect(fine, "outcome", "probabilities", chances.sum(1).round(3).tolist(), "use a softmax")
    same = all(np.array_equal(a, b) for a, b in zip(_arrays(past), _arrays(kept), strict=True))
    f.expect(same, "imagine", "its windows unchanged", "others written into them", "copy before you write")
    again = mind.imagine(past, actions, _noise(chosen)).numpy()
    remedy = "draw from `noise` only, and keep nothing between calls"
    f.expect(_gap(after, again) == 0, "imagine", "the same for the same noise", f"{_gap(after, again):.3g}", remedy)
    alone = mind.imagine(take_rows(start, chosen[1:2]), actions[1:2], _noise(chosen[1:2])).numpy()
    got = _gap(after.take(chosen[1:2]), alone)
    f.expect(got < 1.0, "imagine", "a row alone as among others", f"{got:.3g} of 255 apart", "let rows share nothing")


def _arrays(windows: Windows) -> list[Any]:
    return [*windows.images.values(), *(getattr(windows, name) for name in ARRAYS)]


def _gap(one: Observation, other: Observation) -> float:
    """Mean difference of pixels, of 255; and of states, whichever is larger."""
    pairs = [(one.images[name], other.images[name]) for name in one.images]
    pairs += [] if one.state is None or other.state is None else [(one.state, other.state)]
    return max(float(np.abs(to_numpy(a).astype(np.float32) - to_numpy(b)).mean()) for a, b in pairs)

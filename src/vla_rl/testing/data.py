"""`check_data`: do recorded demonstrations keep to the contract of `Demonstrations`?"""

from __future__ import annotations

from typing import Any

import numpy as np

from vla_rl.core.errors import NotOffered
from vla_rl.core.hookspecs import Demonstrations
from vla_rl.core.types import Context, EnvInfo, Observation, Plugin, to_numpy
from vla_rl.testing.findings import Findings, LeftOut, built

STATISTICS = ("mean", "std", "min", "max", "q01", "q99")
READ = 5


def check_data(data: Demonstrations | Plugin, config: Any = None, *, env: EnvInfo, chunk: int = 4) -> None:
    """Read a few samples and compare them with what `Demonstrations` promises. Raises CheckFailed with all findings.

    Args:
        data: a component that was opened for `env` and `chunk`, or a `Plugin` that is opened with `config` for them.
        env: of the simulator that the demonstrations are for, `EnvInfo` as it offers it.
    """
    opened: Demonstrations
    opened, name = built("data", data, config, Context(env=env, chunk=chunk))
    f = Findings(f"check_data of {name}")
    count = 0
    with f.section("num_samples"):
        count = opened.num_samples()
        f.expect(count >= 1, "num_samples", "at least one sample", count, "refuse empty data when it is opened")
    if count:
        with f.section("read_samples"):
            _check_samples(f, opened, env, chunk, np.linspace(0, count - 1, READ).astype(np.int64))
    with f.section("data_statistics"):
        _check_statistics(f, opened, env)
    f.close()


def _check_samples(f: Findings, data: Demonstrations, env: EnvInfo, chunk: int, indices: Any) -> None:
    where, count = "read_samples", len(indices)
    obs, actions = data.read_samples(indices)
    actions = to_numpy(actions)
    wanted = (count, chunk, env.action_dim)
    if f.expect(actions.shape == wanted, where, f"actions {wanted}", actions.shape, "return [B, C, A]"):
        f.expect(actions.dtype == np.float32, where, "actions float32", actions.dtype, "convert them")
        f.expect(bool(np.isfinite(actions).all()), where, "finite actions", "others", "leave those steps out")
    f.expect(list(obs.images) == list(env.cameras), where, f"cameras {list(env.cameras)}", list(obs.images), "in order")
    for camera, image in obs.images.items():
        sane = image.dtype == np.uint8 and image.ndim == 4 and image.shape[0] == count and image.shape[3] == 3
        found = f"{image.dtype} {image.shape}"
        f.expect(sane, where, f"images of {camera!r} uint8 [{count}, H, W, 3]", found, "convert them")
    f.expect(len(obs) == count, where, f"{count} instructions", len(obs), "one a sample")
    f.expect(all(text.strip() for text in obs.instructions), where, "instructions", "an empty one", "say the task")
    if env.state_dim:
        shape = None if obs.state is None else tuple(obs.state.shape)
        wanted_state = (count, env.state_dim)
        if f.expect(shape == wanted_state, where, f"state {wanted_state}", shape, "as the simulator's"):
            finite = bool(np.isfinite(to_numpy(obs.state)).all())
            f.expect(finite, where, "finite states", "others", "leave those steps out")
    again, same = data.read_samples(indices)
    f.expect(
        _equal(obs, again) and np.array_equal(actions, same), where, "equal samples twice", "others", "keep no state"
    )
    mixed, turned = data.read_samples(indices[::-1])
    same_order = _equal(obs.take(np.arange(count)[::-1]), mixed) and np.array_equal(actions[::-1], turned)
    f.expect(same_order, where, "samples in the order of the indices", "another order", "follow `indices`")


def _check_statistics(f: Findings, data: Demonstrations, env: EnvInfo) -> None:
    try:
        found = data.data_statistics()
    except NotOffered as exc:
        raise LeftOut(str(exc)) from exc
    for part, dim in (("action", env.action_dim), ("state", env.state_dim)):
        if part not in found:
            f.expect(part == "state" and not dim, "data_statistics", f"statistics of the {part}s", "none", "add them")
            continue
        lengths = {name: len(found[part].get(name, ())) for name in STATISTICS}
        sane = set(lengths.values()) == {dim}
        f.expect(sane, "data_statistics", f"{dim} numbers each of the {part}s", lengths, "one a dimension")


def _equal(one: Observation, other: Observation) -> bool:
    if one.instructions != other.instructions or (one.state is None) != (other.state is None):
        return False
    pairs = [(one.images[name], other.images.get(name)) for name in one.images]
    pairs += [] if one.state is None else [(one.state, other.state)]
    return all(np.array_equal(to_numpy(a), to_numpy(b)) for a, b in pairs)

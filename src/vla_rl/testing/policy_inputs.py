"""Checks of `check_model` that change a policy's inputs, and checks of the bounds of its actions."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

from vla_rl.core.contexts import ModelContext
from vla_rl.core.errors import UserError
from vla_rl.core.hookspecs import VLAModel
from vla_rl.core.types import Chunk, EnvInfo, Observation, to_numpy
from vla_rl.testing import synthetic
from vla_rl.testing.common.comparison import same_data
from vla_rl.testing.model_case import ModelCase
from vla_rl.toolkit.models.checkpoints.files import read_json, read_tokenizer

MOVED = 0.1
"""Step that weights are moved by before inputs are compared: parts that begin at zero would hide their inputs."""
FAR = ((20.0, 21.0), (-31.0, -30.0), (7.0, 12.0))
"""Bounds that no model matches by chance."""
WIDER, FULLER = 3.0, 0.3
"""Largest ratio of widths, and largest difference of the share at the bounds, between two numbers of an action."""
EDGE = 1e-4
"""Part of the range within which an action counts as at its bound."""
COPIES = 24
FOLLOWS_THE_FILE = ("PreTrainedTokenizerFast", "PreTrainedTokenizer", "TokenizersBackend")
"""Classes of transformers that do as tokenizer.json says; others put parts of their own in place of the file's."""


def check_tokenizer(case: ModelCase, folder: Path) -> None:
    """Check that the class that a checkpoint names for its tokenizer follows tokenizer.json: vla-rl reads the file, and
    whoever loads the folder with transformers gets the class."""
    file, settings = folder / "tokenizer.json", folder / "tokenizer_config.json"
    if not (file.is_file() and settings.is_file()) or find_spec("transformers") is None:
        return
    named = read_json(settings).get("tokenizer_class")
    if named is None or named in FOLLOWS_THE_FILE:
        return
    import transformers

    kind = getattr(transformers, named, None)
    if kind is None:  # transformers falls back to one that follows the file
        return
    tokenizer, other = read_tokenizer(file), kind.from_pretrained(folder)
    for instruction in dict.fromkeys(case.obs.instructions):
        text = f"{instruction.title()}?\n{instruction}"
        tokens, others = tokenizer.encode(text).ids, list(other(text)["input_ids"])
        expected = f"the tokens of tokenizer.json also from its tokenizer_class {named!r} in transformers"
        got = f"{len(others)} others for {text!r}" if tokens != others else ""
        remedy = f"write tokenizer_class: {FOLLOWS_THE_FILE[0]}, which follows the file, or put the right file there"
        if not case.f.expect(tokens == others, "tokenizer_config.json", expected, got, remedy):
            return


def check_inputs(case: ModelCase, cameras: tuple[str, ...] | None) -> None:
    """Findings on all of them. `cameras`: those that the configuration names, if it does."""
    with case.f.section("inputs"), case.moved_weights(MOVED):
        _check_camera_use(case, cameras)
        _check_state_use(case)
        _each_row_its_value(case)
    with case.f.section("black and white images"), case.moved_weights(MOVED):
        _check_extremes(case)
    with case.f.section("actions of each number"):
        _numbers_alike(case)


def _changes_answer(case: ModelCase, obs: Observation, chunk: Chunk) -> bool:
    """Return whether a model says something else for this observation than for the case's: scores of a recorded chunk,
    and the greedy chunk."""
    answers = []
    for seen in (obs, case.obs):
        with torch.no_grad():
            scores = case.model.chunk_log_probs(seen, chunk)
        greedy = case.model.sample_chunk(seen, case.make_noise(), True)
        answers.append((scores.log_probs, scores.values, greedy.actions))
    return not same_data(*answers)


def _check_camera_use(case: ModelCase, named: tuple[str, ...] | None) -> None:
    read = case.model.cameras_read if case.model.cameras_read is not None else named
    unknown = sorted(set(read or ()) - set(case.env.cameras))
    camera_names = ", ".join(case.env.cameras)
    case.f.expect(not unknown, "cameras_read", f"some of {camera_names}", ", ".join(unknown), "correct the names")
    chunk, others = case.draw_chunks(), synthetic.observation(case.env, case.row_count, seed=1)
    for camera in case.env.cameras if read is None else [name for name in case.env.cameras if name in read]:
        obs = attrs.evolve(case.obs, images={**case.obs.images, camera: others.images[camera]})
        expected = f"an answer that depends on the images of camera {camera!r}"
        remedy = "read every camera of ModelContext.env.cameras, or let `cameras_read` name those that the model reads"
        case.f.expect(_changes_answer(case, obs, chunk), "observation", expected, "the same for other images", remedy)
    turned = attrs.evolve(case.obs, images=dict(reversed([*case.obs.images.items()])))
    expected = "the same whatever the order in which an observation lists its cameras"
    remedy = "read obs.images[name] in the order of ModelContext.env.cameras, not obs.images.values()"
    case.f.expect(not _changes_answer(case, turned, chunk), "observation", expected, "another answer", remedy)


def _check_state_use(case: ModelCase) -> None:
    """A model may leave the state out. One that reads some of its numbers has to read all of them."""
    if case.obs.state is None:
        return
    chunk, others = case.draw_chunks(), synthetic.observation(case.env, case.row_count, seed=1)
    unread = []
    for i in range(case.env.state_dim):
        state = np.array(case.obs.state)
        state[:, i] = np.asarray(others.state)[:, i]
        if not _changes_answer(case, attrs.evolve(case.obs, state=state), chunk):
            unread.append(i)
    partly = 0 < len(unread) < case.env.state_dim
    expected = f"an answer that depends on all {case.env.state_dim} numbers of the state"
    case.f.expect(not partly, "observation", expected, f"none on number {unread}", "read the whole state")


def _each_row_its_value(case: ModelCase) -> None:
    if case.values == "none":
        return
    values = to_numpy(case.draw_chunks().values)
    differ = case.row_count < 2 or bool(np.ptp(values, axis=0).max() > 0)
    remedy = "compute it of each row's own observation"
    case.f.expect(differ, "values", "a separate value for each row", "the same for all", remedy)


def _check_extremes(case: ModelCase) -> None:
    """Black and white images with a state of zeros: the first frame of many simulators, and of our stand-ins."""
    for name, level in (("black", 0), ("white", 255)):
        images = {camera: np.full_like(np.asarray(frames), level) for camera, frames in case.obs.images.items()}
        state = None if case.obs.state is None else np.zeros_like(np.asarray(case.obs.state))
        obs = attrs.evolve(case.obs, images=images, state=state)
        chunk = case.model.sample_chunk(obs, case.make_noise(), False)
        arrays = [to_numpy(array) for array in (chunk.actions, chunk.log_probs, chunk.values) if array is not None]
        finite = all(bool(np.isfinite(array).all()) for array in arrays)
        expected = f"finite numbers for {name} images and a state of zeros"
        case.f.expect(finite, "sample_chunk", expected, "NaN or inf", "guard divisions by what can be 0")


# ------------------------------------------------------------------------------------------------------------ bounds


def range_shares(actions: Any, env: EnvInfo) -> np.ndarray[Any, Any]:
    """Actions as parts of their ranges: 0 at the lower bound, 1 at the upper one."""
    low, high = np.array(env.action_low), np.array(env.action_high)
    parts: np.ndarray[Any, Any] = (to_numpy(actions).astype(np.float64) - low) / (high - low)
    return parts


def _numbers_alike(case: ModelCase) -> None:
    """Check that random weights fill all ranges about equally in a synthetic environment, whose numbers differ only in
    their bounds."""
    if (case.env.action_low, case.env.action_high) != _made_up_bounds(case.env.action_dim) or case.env.action_dim < 2:
        return
    parts = range_shares(case.sample_copies(COPIES)[1].actions, case.env).reshape(-1, case.env.action_dim)
    spread = parts.std(0)
    edges = ((parts < EDGE) | (parts > 1 - EDGE)).mean(0)
    alike = bool(spread.max() <= WIDER * spread.min() + EDGE and edges.max() - edges.min() <= FULLER)
    expected = "actions that fill the ranges of all their numbers about alike"
    deviations, bounds = (", ".join(f"{part:.0%}" for part in parts) for parts in (spread, edges))
    got = f"{deviations} of each range as deviations, {bounds} of samples at a bound"
    remedy = "scale each number by its own ModelContext.env.action_low and action_high"
    case.f.expect(alike, "sample_chunk: actions", expected, got, remedy)


def _made_up_bounds(action_dim: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    info = synthetic.env_info(action_dim=action_dim)
    return info.action_low, info.action_high


def check_other_bounds(
    case: ModelCase, build: Callable[[Any, ModelContext], VLAModel], config: Any, context: ModelContext
) -> None:
    """The same weights, built for an environment with other bounds, choose the same parts of the ranges, and clone
    demonstrations there as well. A checkpoint's own statistics may be tied to one simulator: not asked of these."""
    if (case.env.action_low, case.env.action_high) != _made_up_bounds(case.env.action_dim):
        return
    if getattr(config, "checkpoint", None) is not None or context.scaling is not None:
        return
    bounds = synthetic.env_info(action_dim=case.env.action_dim, bounds=FAR)
    env = attrs.evolve(case.env, action_low=bounds.action_low, action_high=bounds.action_high)
    try:
        other: VLAModel = build(config, attrs.evolve(context, env=env))
    except UserError:
        return
    with case.moved_weights(MOVED):
        other.load_weights([(name, tensor.clone()) for name, tensor in case.model.weights()])
        worst = 0.0
        for greedy in (False, True):
            own_shares = range_shares(case.draw_chunks(greedy).actions, case.env)
            other_shares = range_shares(other.sample_chunk(case.obs, case.make_noise(), greedy).actions, env)
            worst = max(worst, float(np.abs(own_shares - other_shares).max()))
        actions = case.draw_chunks().actions
        low, high = np.array(env.action_low), np.array(env.action_high)
        moved = (low + range_shares(actions, case.env) * (high - low)).astype(np.float32)
        pairs = ((case.model, actions), (other, moved))
        losses = [float(model.imitation_loss(case.obs, chosen).detach()) for model, chosen in pairs]
    expected = "the same parts of the ranges where bounds are others"
    remedy = "scale each number by its own ModelContext.env.action_low and action_high"
    case.f.expect(worst < 1e-2, "sample_chunk: actions", expected, f"{worst:.0%} of a range apart", remedy)
    holds = abs(losses[0] - losses[1]) <= 2 * (1 + abs(losses[0]))
    expected = "about the same loss for the same parts of other ranges"
    got, remedy = f"{losses[0]:.3g} and {losses[1]:.3g}", "scale demonstrated actions as sampled ones are scaled back"
    case.f.expect(holds, "imitation_loss", expected, got, remedy)

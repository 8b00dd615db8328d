"""The world model `edm`: DIAMOND's sizes, what a prediction depends on, exact resume, and that it learns."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

from vla_rl import EnvInfo, Noise, TaskInfo, UserError, Windows, WorldModelContext, build, load
from vla_rl.plugins.world_models.edm.motion import LeastSquares, Motion
from vla_rl.toolkit.world_models.measures import compute_psnr
from vla_rl.toolkit.world_models.windows import frames_of, take_frames

CHUNK = 2
INFO = EnvInfo(
    cameras={"top": (16, 16), "wrist": (16, 16)},
    state_dim=2,
    action_low=(-1.0, 0.0),
    action_high=(1.0, 4.0),
    tasks=(TaskInfo(name="push", instruction="push it", max_steps=8),),
)
SMALL = {"history": 2, "fold": 4, "channels": (32, 32), "depths": (1, 1), "condition": 32, "heads": 8}
SMALL |= {
    "evaluations": 1,
    "residual": True,
    "sigma_loc": 1.6,
    "sigma_scale": 0.4,
    "lr": 3e-3,
    "heads_lr": 3e-3,
    "warm_up": 5,
}


def make(seed: int = 0, info: EnvInfo = INFO, **keys: Any) -> Any:
    config = load("world_model", "edm").config(**{**SMALL, **keys})
    return build("world_model", "edm", config, WorldModelContext(env=info, chunk=CHUNK, seed=seed))


def pushed(count: int = 32, frames: int = 4, seed: int = 0) -> Windows:
    """A bright square that the first number of each action moves by up to 2 pixels; pushed past the right edge of a
    line, the episode ends there: a success if it says `push it`, a failure if it says `leave it`."""
    draws = np.random.default_rng(seed)
    actions = np.stack(
        [draws.uniform(-1, 1, (count, frames - 1, CHUNK)), draws.uniform(0, 4, (count, frames - 1, CHUNK))], -1
    )
    place = draws.uniform(4, 12, count)
    images = {name: np.full((count, frames, 16, 16, 3), 60, np.uint8) for name in INFO.cameras}
    state = np.zeros((count, frames, 2), np.float32)
    outcomes = np.zeros((count, frames - 1), np.int64)
    texts = tuple("push it" if i % 2 else "leave it" for i in range(count))
    for t in range(frames):
        if t:
            place = np.clip(place + actions[:, t - 1, :, 0].sum(1), 2, 13)
            over = place > 10
            outcomes[:, t - 1] = np.where(over, [1 + (CHUNK if text[0] == "l" else 0) + 1 for text in texts], 0)
        state[:, t, 0] = place / 8 - 1
        for row in range(count):
            left = int(place[row])
            images["top"][row, t, 6:9, left - 1 : left + 2] = (220, 40, 40)
            images["wrist"][row, t, :, 8:] = 30 + 10 * left
    zeros = np.zeros(count, np.int64)
    return Windows(
        images=images,
        state=state,
        actions=actions.astype(np.float32),
        executed=np.ones((count, frames - 1, CHUNK), bool),
        outcomes=outcomes,
        first=zeros,
        states=np.arange(count),
        seeds=zeros,
        instructions=texts,
    )


def noise(count: int, number: int = 0) -> Noise:
    return Noise(0, "test", list(range(count)), [0] * count, [number] * count)


def test_the_preset_diamond_has_the_size_of_diamond():
    """4.41 million parameters (paper), of which the embedding of actions is another here."""
    info = evolve(INFO, cameras={"top": (64, 64)}, state_dim=0)
    model = build("world_model", "edm", load("world_model", "edm").config(), WorldModelContext(env=info, chunk=1))
    count = sum(p.numel() for p in model.module["networks"].denoiser.parameters())
    assert count == pytest.approx(4.41e6, rel=0.005)


def test_the_preset_tiny_has_about_two_million_parameters():
    plugin, info = load("world_model", "edm"), evolve(INFO, cameras={"top": (64, 64), "wrist": (64, 64)})
    model = build("world_model", "edm", plugin.config(**plugin.presets["tiny"]), WorldModelContext(env=info, chunk=4))
    assert 1.5e6 < sum(p.numel() for p in model.module["networks"].denoiser.parameters()) < 2.5e6


def test_folding_and_unfolding_lose_nothing():
    model, windows = make(), pushed(3)
    windows.images["top"][:] = np.random.default_rng(0).integers(0, 256, windows.images["top"].shape, np.uint8)
    frames = model._fold_images(model._build_batch(windows).images)
    assert frames.shape == (3, 4, 2 * 3 * 16, 4, 4)
    back = model._unfold_images(frames[:, 1], windows)
    assert all(np.array_equal(back[name], windows.images[name][:, 1]) for name in INFO.cameras)


def test_before_training_the_residual_model_repeats_the_last_frame():
    model, windows = make(), take_frames(pushed(4), 0, 2)
    after = model.imagine(windows, np.zeros((4, CHUNK, 2), np.float32), noise(4))
    for name in INFO.cameras:
        assert np.abs(after.images[name].astype(int) - windows.images[name][:, -1]).max() <= 8, (
            "c_skip of the noise is left"
        )
    assert after.state.shape == (4, 2) and after.instructions == windows.instructions


def trained(model: Any, windows: Windows, first: int, last: int) -> list[dict[str, float]]:
    return [model.fit(windows, noise(len(windows.instructions), number)) for number in range(first, last)]


def test_a_prediction_depends_on_its_row_only_and_on_all_of_it():
    model, windows = make(residual=False), pushed(6)
    trained(model, windows, 0, 3)
    start, actions = take_frames(windows, 0, 2), windows.actions[:, 1]
    whole = model.imagine(start, actions, noise(6)).numpy()
    alone = model.imagine(start.take(np.array([4])), actions[4:5], Noise(0, "test", [4], [0], [0])).numpy()
    assert np.abs(alone.images["top"][0].astype(int) - whole.images["top"][4]).max() <= 1
    assert alone.state[0] == pytest.approx(whole.state[4], abs=1e-5)
    chances = model.outcome(start, actions, whole)
    assert chances.shape == (6, 1 + 2 * CHUNK) and chances.sum(1) == pytest.approx(np.ones(6), abs=1e-5)
    for changed in (
        (start, -actions),
        (evolve(start, state=start.state + 1), actions),
        (evolve(start, images={**start.images, "wrist": 255 - start.images["wrist"]}), actions),
        (evolve(start, executed=~start.executed), actions),
    ):
        assert not np.array_equal(model.imagine(*changed, noise(6)).images["top"], whole.images["top"])
    other = evolve(start, instructions=start.instructions[1:] + start.instructions[:1])
    assert not np.array_equal(model.outcome(other, actions, whole), chances)


def test_a_resumed_fit_continues_exactly():
    windows = pushed(8)
    whole = make()
    trained(whole, windows, 0, 2)
    weights, state = copy.deepcopy(whole.module.state_dict()), copy.deepcopy(whole.training_state())
    rest = trained(whole, windows, 2, 4)
    again = make(seed=1)
    again.module.load_state_dict(weights)
    again.load_training_state(state)
    assert trained(again, windows, 2, 4) == rest
    assert all(
        torch.equal(a, b)
        for a, b in zip(whole.module.state_dict().values(), again.module.state_dict().values(), strict=True)
    )


def test_chunks_that_were_not_played_teach_nothing():
    model, windows = make(), pushed(8)
    ended = np.array(windows.executed)
    ended[:, 1:] = False
    assert set(model.measure(evolve(windows, executed=ended), noise(8)).values()) == {0.0}
    ended[:4, 1:] = True
    images = {
        name: np.where(ended[:, :1, :1, None, None] | ended[:, 2:, :1, None, None], i, 0)
        for name, i in windows.images.items()
    }
    one = model.measure(evolve(windows, executed=ended), noise(8))
    two = model.measure(
        evolve(windows, executed=ended, images={n: i.astype(np.uint8) for n, i in images.items()}), noise(8)
    )
    assert one == two


def test_frames_after_an_end_teach_the_denoiser_nothing():
    """An end comes in the midst of its chunk, so that the frame is not what the whole chunk would have led to."""
    model, windows = make(), pushed(8, frames=3)
    outcomes = np.zeros((8, 2), np.int64)
    outcomes[:4, 1] = 1
    windows = evolve(windows, outcomes=outcomes)
    images = {name: np.array(frames) for name, frames in windows.images.items()}
    for frames in images.values():
        frames[:4, 2] = 0
    one, two = (model.measure(w, noise(8)) for w in (windows, evolve(windows, images=images)))
    assert one == two
    going_on = evolve(windows, outcomes=np.zeros_like(outcomes))
    one, two = (model.measure(w, noise(8)) for w in (going_on, evolve(going_on, images=images)))
    assert one["denoising"] != two["denoising"]


def test_measuring_changes_nothing_and_says_the_losses():
    model, windows = make(), pushed(8)
    before = copy.deepcopy(model.module.state_dict())
    found = model.measure(windows, noise(8))
    assert set(found) == {"denoising", "state", "outcome"} and all(value > 0 for value in found.values())
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.module.state_dict().values(), strict=True))
    assert trained(model, windows, 0, 1)[0]["denoising"] == pytest.approx(found["denoising"], rel=1e-5)


def test_it_learns_32_windows_by_heart():
    """Actions move the square, which a copy of the frame before does not; ends follow from frames and instruction."""
    model, windows = make(), pushed(32, frames=3)
    trained(model, windows, 0, 250)
    start, actions, real = take_frames(windows, 0, 2), windows.actions[:, 1], frames_of(windows, 2)
    after = model.imagine(start, actions, noise(32)).numpy()
    copied = frames_of(windows, 1)
    assert (
        compute_psnr(after.images["top"], real.images["top"])
        > compute_psnr(copied.images["top"], real.images["top"]) + 1.5
    )
    moved = model.imagine(start, np.roll(actions, 1, axis=0), noise(32)).numpy()
    assert (
        compute_psnr(after.images["top"], real.images["top"])
        > compute_psnr(moved.images["top"], real.images["top"]) + 2
    )
    assert np.abs(after.state - real.state).mean() < 0.3 * np.abs(copied.state - real.state).mean()
    chances = model.outcome(start, actions, after)
    assert (chances.argmax(1) == windows.outcomes[:, 1]).mean() > 0.9


def test_it_looks_where_the_robot_makes_pixels_change():
    """The square is at 8 (1 + state) pixels from the left and in row 7, whatever the second number of the state says;
    what both cameras show of it is linear in the state, and so is the state in the actions."""
    model, windows = make(), pushed(32, frames=3)
    trained(model, windows, 0, 4)
    states = torch.tensor([[[-0.5, 0.0]], [[0.25, 0.0]]])
    found = model.module["motion"].places[0](states)[:, 0]
    assert found == pytest.approx(np.array([[-0.4375, -0.0625], [0.3125, -0.0625]]), abs=0.15)


def test_images_shift_as_far_as_their_camera_goes():
    """A camera that moves over a landscape by 4 pixels an action, one that stands still, and one that sees nothing."""
    draws = np.random.default_rng(0)
    land = torch.from_numpy(draws.uniform(-1, 1, (3, 12, 16))).float()
    land = torch.nn.functional.interpolate(land[None], (96, 128), mode="bilinear")[0]
    steps = torch.from_numpy(draws.integers(-1, 2, (40, CHUNK, 2))).float()
    steps[:4] = 1
    moves = 4 * steps.sum(1).long()
    starts = torch.from_numpy(draws.integers(20, 40, (40, 2)))
    nothing, still = torch.zeros(3, 32, 48), land[:, :32, :48]

    def seen(corners: torch.Tensor) -> torch.Tensor:
        views = [torch.cat((land[:, y : y + 32, x : x + 48], still, nothing)) for x, y in corners.tolist()]
        return torch.stack(views)

    motion, played, state = Motion(3, 2, 0, (32, 48)), torch.full((40,), CHUNK), torch.zeros(40, 0)
    before, after, chunk = seen(starts), seen(starts + moves), steps.flatten(1)
    for rows in (slice(0, 20), slice(20, 40)):
        pair = before[rows], after[rows]
        motion.add_chunks(chunk[rows], state[rows], state[rows], played[rows], pair)
    scene, _, usual = motion.build_layers(before, motion.predict_path(chunk, state)).unbind(1)
    assert torch.equal(scene[:, :, 8:-8, 8:-8], after[:, :, 8:-8, 8:-8])
    assert torch.equal(scene[:, 3:], before[:, 3:])
    assert torch.allclose(usual, before.mean(0).expand_as(usual), atol=1e-5)
    assert torch.allclose(scene[:4, :3, -8:], usual[:4, :3, -8:], atol=1e-5), "what comes into view"


def test_a_layer_has_the_robot_where_it_will_be():
    """A square that goes 2 pixels an action over a table that stands still, in an image of noise that stays."""
    draws = np.random.default_rng(0)
    table = torch.from_numpy(draws.uniform(-1, 0, (3, 32, 48))).float()
    steps = torch.from_numpy(draws.integers(-1, 2, (64, CHUNK, 2))).float()
    starts = torch.from_numpy(draws.integers(8, 20, (64, 2)))
    ends = starts + 2 * steps.sum(1).long()

    def seen(corners: torch.Tensor) -> torch.Tensor:
        views = table.repeat(64, 1, 1, 1)
        for view, (x, y) in zip(views, corners.tolist(), strict=True):
            view[:, y : y + 6, x : x + 6] = 1
        return views

    motion, played = Motion(1, 2, 2, (32, 48)), torch.full((64,), CHUNK)
    states, after, chunk = starts / 10, ends / 10, steps.flatten(1)
    motion.add_chunks(chunk, states, after, played, (seen(starts), seen(ends)))
    robot = motion.build_layers(seen(starts), motion.predict_path(chunk, states))[:, 1]
    hits = [float(view[:, y : y + 6, x : x + 6].mean()) for view, (x, y) in zip(robot, ends.tolist(), strict=True)]
    assert np.mean(hits) > 0.85, "a pixel off at most, and usually none"


def test_an_end_may_depend_on_the_action_before():
    """Whoever raises the second number twice in a row succeeds: no single action says so, nor does an image."""
    model, windows = make(), pushed(64, frames=3)
    actions = np.random.default_rng(1).integers(0, 2, (64, 2, CHUNK, 2)).astype(np.float32) * 4
    actions[..., 0] = 0
    outcomes = np.where(actions[..., 1].all(2), CHUNK, 0)
    windows = evolve(windows, actions=actions, outcomes=outcomes)
    trained(model, windows, 0, 130)
    chances = model.outcome(take_frames(windows, 0, 2), actions[:, 1], frames_of(windows, 2))
    assert (chances.argmax(1) == outcomes[:, 1]).mean() > 0.95


def test_least_squares_are_of_all_that_counted_in_any_batches():
    draws = np.random.default_rng(0)
    x, counted = torch.from_numpy(draws.normal(size=(40, 3))).float(), torch.arange(40) % 4 > 0
    y = x @ torch.tensor([[1.0, 2.0], [0.0, -1.0], [3.0, 0.5]]) + torch.tensor([0.25, -4.0])
    once, parts = LeastSquares(3, 2), LeastSquares(3, 2)
    wrong = torch.where(counted[:, None], y, 100.0)
    once.observe(x, wrong, counted)
    for rows in (slice(0, 1), slice(1, 25), slice(25, 40)):
        parts.observe(x[rows], wrong[rows], counted[rows])
    assert torch.allclose(once(x), y, atol=0.01) and torch.allclose(parts(x), once(x), atol=1e-4)
    parts.observe(x, wrong, torch.zeros(40, dtype=torch.bool))
    assert torch.allclose(parts(x), once(x), atol=1e-4)


@pytest.mark.parametrize("keys", [{"precision": "bfloat16"}, {}], ids=["bfloat16", "no state"])
def test_it_learns_without_a_state_and_in_bfloat16(keys):
    info = INFO if keys else evolve(INFO, state_dim=0)
    model, windows = make(info=info, **keys), pushed(32, frames=3)
    if not keys:
        windows = evolve(windows, state=np.zeros((32, 3, 0), np.float32))
    losses = trained(model, windows, 0, 30)
    assert losses[-1]["outcome"] < 0.5 * losses[0]["outcome"] and losses[-1]["denoising"] < losses[0]["denoising"]
    start, real = take_frames(windows, 0, 2), frames_of(windows, 2)
    after = model.imagine(start, windows.actions[:, 1], noise(32)).numpy()
    assert (after.state is None) == (not keys)
    assert compute_psnr(after.images["top"], real.images["top"]) > compute_psnr(
        np.roll(after.images["top"], 1, 0), real.images["top"]
    )


def test_what_it_cannot_be_built_for_is_said():
    with pytest.raises(
        UserError, match=r"cameras of one size, a multiple of `fold` 4; there are: top 16 x 16, wrist 8 x 8"
    ):
        make(info=evolve(INFO, cameras={"top": (16, 16), "wrist": (8, 8)}))
    with pytest.raises(UserError, match="a multiple of `fold` 4; there are: top 18 x 18"):
        make(info=evolve(INFO, cameras={"top": (18, 18)}))
    with pytest.raises(ValueError, match="2 channels and 1 depths"):
        make(depths=(1,))
    with pytest.raises(ValueError, match="condition 33 must be a multiple of history 2"):
        make(condition=33)


def test_the_light_part_says_that_it_is_experimental():
    assert load("world_model", "edm").summary.startswith("Experimental")
    assert (Path(__file__).parents[3] / "docs" / "reference" / "world-models.md").read_text().count("xperimental")

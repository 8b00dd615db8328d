"""Imagination: what every simulator promises, kept with the true simulator as the world model; and its own rules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attrs import evolve
from recorded_episodes import CHUNK, STEPS, recorder, recordings, tabletop

from vla_rl import EnvContext, Noise, Observation, UserError, Windows, WorldModel, WorldModelContext, build, load, wrap
from vla_rl.runtime.imagination.worker.imagined_env import ImaginedEnv
from vla_rl.testing import check_env, check_world_model
from vla_rl.toolkit.world_models.measures import measure_quality, thresholds_met


def oracle(num_envs: int = 8, history: int = STEPS + 1, chunk: int = CHUNK) -> WorldModel:
    config = load("world_model", "oracle").config(
        env="tabletop", keys=("image_size=16",), history=history, num_envs=num_envs
    )
    tabletop = load("env", "tabletop")
    info = tabletop.build(tabletop.config(image_size=16), EnvContext()).info
    return build("world_model", "oracle", config, WorldModelContext(chunk=chunk, env=info))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return recorder(tmp_path_factory.mktemp("recorded"), 48)


def imagination(recorded, model: WorldModel, num_envs: int = 3, **settings: Any) -> ImaginedEnv:
    info = tabletop(1).info
    return ImaginedEnv(model, recorded, info, num_envs, **{"horizon": 4, **settings})


def test_it_keeps_to_the_contract_of_a_simulator(recorded) -> None:
    """All but the eval split, which it says does not exist."""
    env = imagination(recorded, wrap("world_model", oracle(3, history=2 * STEPS), "oracle"))
    with pytest.raises(UserError, match="evaluation is on the real simulator"):
        env.reset_states("eval")
    check_env(env, chunk=CHUNK, expert=False, seconds=4)


def test_with_the_oracle_it_continues_as_the_simulator_does(recorded) -> None:
    """Recorded episodes, played again from each of their chunks on."""
    history = STEPS // CHUNK + 1
    starts = recorded.start_windows("any")
    ids = np.array([state.id for state in starts])
    env = imagination(recorded, oracle(16, history), len(ids))
    windows = recorded.read_windows(ids, history=history, rollout=1)
    env.reset(np.arange(len(ids)), ids, np.zeros(len(ids), np.int64))
    result = env.chunk_step(windows.actions[:, -1], np.ones(len(ids), bool), True)
    for camera, frames in windows.images.items():
        assert np.array_equal(result.obs.images[camera], frames[:, -1])
    assert np.array_equal(result.obs.state, windows.state[:, -1])
    assert np.array_equal(result.executed, windows.executed[:, -1])
    won = (windows.outcomes[:, -1] > 0) & (windows.outcomes[:, -1] <= CHUNK)
    assert np.array_equal(result.success, won) and np.array_equal(result.rewards.sum(1), won.astype(np.float32))
    assert np.array_equal(result.terminated.any(1), windows.outcomes[:, -1] > 0)
    assert won.any() and (windows.outcomes[:, -1] > CHUNK).any(), "both ends are among them"


def test_the_oracle_opens_all_gates(recorded) -> None:
    model = oracle(16, history=5)
    ids = np.array([state.id for state in recorded.start_windows("first")])
    found = measure_quality(model, recorded.read_windows(ids, history=5, rollout=4))
    assert found["psnr/1"] == found["changed_psnr/3"] == np.inf and found["state_mae/2"] == 0
    assert found["outcome_auc"] == found["outcome_auc_imagined"] == found["replay_auc"] == 1
    assert found["action_error"] == 0 and all(thresholds_met(found).values())


def test_the_oracle_keeps_to_the_contract_of_a_world_model(recorded) -> None:
    model = oracle(3, history=3)
    ids = np.array([state.id for state in recorded.start_windows("first")][:5])
    check_world_model(model, env=tabletop(1).info, windows=recorded.read_windows(ids, history=3, rollout=2))


def test_the_oracle_says_when_it_lacks_the_beginning(recorded) -> None:
    late = [state.id for state in recorded.start_windows("any") if state.id % recorded.shape.longest == 2][:1]
    windows = recorded.read_windows(np.array(late), history=2)
    with pytest.raises(UserError, match=r"history 2 lack the first 1; set its `history`"):
        oracle(history=2).imagine(windows, np.zeros((1, CHUNK, 3), np.float32), None)


class Scripted(WorldModel):
    """Every chunk makes the image brighter by one, and ends as its script says."""

    history = 2

    def __init__(self, chances: list[float]) -> None:
        self.chances = np.array([chances], np.float32)

    def fit(self, windows, noise):
        return {}

    def imagine(self, windows: Windows, actions, noise) -> Observation:
        images = {camera: frames[:, -1] + np.uint8(1) for camera, frames in windows.images.items()}
        return Observation(images=images, instructions=windows.instructions, state=windows.state[:, -1])

    def outcome(self, windows: Windows, actions, after):
        return np.repeat(self.chances, len(actions), axis=0)


CONTINUES = [1.0] + [0.0] * 2 * CHUNK
ACTIONS = np.zeros((3, CHUNK, 3), np.float32)


def begin(env: ImaginedEnv, seeds: tuple[int, ...] = (0, 1, 2)) -> None:
    env.reset(np.arange(3), np.full(3, env.reset_states("train")[0].id), np.array(seeds))


def test_an_env_is_truncated_at_the_horizon_and_then_stands_still(recorded) -> None:
    env = imagination(recorded, Scripted(CONTINUES), horizon=2)
    begin(env)
    first, second, third = (env.chunk_step(ACTIONS, np.ones(3, bool), False) for _ in range(3))
    assert not first.truncated.any() and not second.truncated[:, :-1].any() and second.truncated[:, -1].all()
    assert not second.success.any() and not second.terminated.any()
    brighter = second.obs.images["overhead"].astype(int) - first.obs.images["overhead"]
    assert set(np.unique(brighter)) == {1}
    assert np.array_equal(third.obs.images["overhead"], second.obs.images["overhead"])
    assert not third.truncated.any() and not third.rewards.any()


@pytest.mark.parametrize(("outcome", "won", "last"), [(2, True, 1), (1 + CHUNK + 2, False, 2)])
def test_an_outcome_ends_an_env_at_its_action(recorded, outcome: int, won: bool, last: int) -> None:
    env = imagination(recorded, Scripted(np.eye(1 + 2 * CHUNK)[outcome].tolist()))
    begin(env)
    result = env.chunk_step(ACTIONS, np.array([True, True, False]), True)
    assert result.terminated.tolist() == [[i == last for i in range(CHUNK)]] * 2 + [[False] * CHUNK]
    assert result.executed.tolist() == [[i <= last for i in range(CHUNK)]] * 2 + [[False] * CHUNK]
    assert result.rewards.sum(1).tolist() == [won, won, 0] and result.success.tolist() == [won, won, False]


def test_outcomes_are_drawn_by_the_seed_of_the_reset(recorded) -> None:
    env = imagination(recorded, Scripted([0.5, 0.5] + [0.0] * (2 * CHUNK - 1)))
    drawn = []
    for lap, turned in enumerate(((0, 1, 2), (2, 0, 1)) * 8):
        begin(env, tuple(seed + 3 * (lap // 2) for seed in turned))
        drawn.append(env.chunk_step(ACTIONS, np.ones(3, bool), True).success.tolist())
    assert all(b == [a[2], a[0], a[1]] for a, b in zip(drawn[::2], drawn[1::2], strict=True)), "whatever the env"
    assert 4 < sum(map(sum, drawn[::2])) < 20
    likely = imagination(recorded, Scripted([0.3, 0.4] + [0.3] + [0.0] * (2 * CHUNK - 2)), outcome="most likely")
    begin(likely)
    assert likely.chunk_step(ACTIONS, np.ones(3, bool), True).terminated[:, 0].all()


def test_numbers_that_are_not_finite_are_a_fault_of_their_env(recorded) -> None:
    class Broken(Scripted):
        def outcome(self, windows, actions, after):
            chances = super().outcome(windows, actions, after)
            chances[1] = np.nan
            return chances

    env = imagination(recorded, Broken(CONTINUES))
    begin(env)
    before = env.chunk_step(ACTIONS, np.zeros(3, bool), True).obs.images["wrist"]
    after = env.chunk_step(ACTIONS, np.ones(3, bool), True).obs.images["wrist"]
    assert list(env.faults()) == [1] and not env.faults()
    assert np.array_equal(after[1], before[1]) and not np.array_equal(after[0], before[0])


def test_a_trajectory_that_broke_is_tried_again_with_other_noise_and_not_for_ever(recorded) -> None:
    drawn = []

    class Broken(Scripted):
        def imagine(self, windows, actions, noise):
            drawn.append(noise.uniforms().tolist())
            return super().imagine(windows, actions, noise)

        def outcome(self, windows, actions, after):
            chances = super().outcome(windows, actions, after)
            chances[1] = np.inf
            return chances

    env = imagination(recorded, Broken(CONTINUES))
    for _ in range(2):
        begin(env)
        env.chunk_step(ACTIONS, np.ones(3, bool), True)
    begin(env)
    with pytest.raises(UserError, match=r"not finite 3 times in one trajectory, .*lower learning rate"):
        env.chunk_step(ACTIONS, np.ones(3, bool), True)
    assert [len(set(of_env)) for of_env in zip(*drawn, strict=True)] == [1, 3, 1], "the others are drawn as before"
    env.refresh_starts()
    begin(env)
    env.chunk_step(ACTIONS, np.ones(3, bool), True)
    assert drawn[-1] == drawn[0], "in the next step it counts from 0 again"


def test_what_is_recorded_meanwhile_is_started_from_after_refresh(tmp_path) -> None:
    small = recorder(tmp_path, 8, capacity=12, held_out=0.0)
    env = imagination(small, Scripted(CONTINUES), start="first")
    small.add(recordings(4, tabletop(4), small.shape.longest))
    assert len(env.reset_states("train")) == 8, "a step starts from the episodes available at its beginning"
    env.refresh_starts()
    assert [state.id // small.shape.longest for state in env.reset_states("train")] == list(range(12))


def test_episodes_of_another_simulator_are_refused(recorded) -> None:
    other = tabletop(1, size=32).info
    with pytest.raises(UserError, match=r"holds episodes with cameras .*16.*, and the simulator has .*32.*; give"):
        ImaginedEnv(Scripted(CONTINUES), recorded, other, 3, horizon=2)


def test_it_says_that_it_is_imagined(recorded) -> None:
    env = imagination(recorded, Scripted(CONTINUES))
    assert env.info == evolve(tabletop(1).info, notes=("imagined by a world model",))


def test_a_fitted_model_plays_the_same_whatever_the_envs(recorded) -> None:
    """`edm`, from recorded windows to imagined episodes."""
    plugin, info = load("world_model", "edm"), tabletop(1).info
    small = {"channels": (16, 16), "depths": (1, 1), "condition": 32, "heads": 16, "warm_up": 0}
    config = plugin.config(**{**plugin.presets["tiny"], **small})
    model = build("world_model", "edm", config, WorldModelContext(env=info, chunk=CHUNK))
    for number in range(2):
        batch = recorded.draw(8, history=model.history, rollout=2, seed=0, number=number)
        losses = model.fit(batch, Noise(0, "fit", range(8), [0] * 8, [number] * 8))
        assert all(np.isfinite(value) for value in losses.values())
    ids = [state.id for state in recorded.start_windows("any")][:4]
    actions = np.linspace(-1, 1, 4 * CHUNK * 3, dtype=np.float32).reshape(4, CHUNK, 3)
    seen = []
    for order in ([0, 1, 2, 3], [2, 0, 3, 1]):
        env = imagination(recorded, model, 4)
        env.reset(np.arange(4), np.array(ids)[order], np.array(order))
        results = [env.chunk_step(actions[order], np.ones(4, bool), True) for _ in range(2)]
        back = np.argsort(order)
        seen.append([(r.executed[back], r.terminated[back], r.obs.take(back)) for r in results])
    for (executed, ended, one), (as_before, too, other) in zip(*seen, strict=True):
        assert np.array_equal(executed, as_before) and np.array_equal(ended, too)
        assert np.abs(one.images["wrist"].astype(int) - other.images["wrist"]).max() <= 1
        assert one.state == pytest.approx(other.state, abs=1e-4)

"""The small policy: sampling and scoring, what it sees, imitation, critic and reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from film_resnet_cases import CHUNK, ENV, SMALL, demonstrated, observation, policy
from model_cases import changed, noise, read_only_and_tensors

from vla_rl.core.capabilities import ActionTokens, Reparameterised
from vla_rl.core.catalogue import load
from vla_rl.core.contexts import EnvContext, ModelContext
from vla_rl.core.hookspecs import SimEnv
from vla_rl.core.spec.structure import Problems, Structurer
from vla_rl.core.types import Chunk, EnvInfo, Observation, to_numpy
from vla_rl.plugins.models.film_resnet import plugin
from vla_rl.plugins.models.film_resnet.builder import BinCodec, shift_images, target_distributions
from vla_rl.plugins.models.film_resnet.config import FilmResnetConfig, FilmValueHeadConfig, Gaussian, NetworkConfig
from vla_rl.plugins.models.film_resnet.network import encode_waves, soft_argmax
from vla_rl.testing import check_model
from vla_rl.toolkit.models.bag_of_words import BagOfWords
from vla_rl.toolkit.models.checkpoints.fitting import MismatchError
from vla_rl.toolkit.models.checkpoints.lerobot import FeatureScale

CPU = torch.device("cpu")
GAUSSIAN = NetworkConfig(channels=(8, 16), keypoints=4, words=64, instruction=8, hidden=(32,), head=Gaussian())


@pytest.mark.parametrize(
    ("values", "config"),
    [
        ("none", {"use_state": False, "cameras": ("camera1",), "smoothing": 0.0}),
        ("chunk", {"shift": 0, "greedy": "median", "value_head": FilmValueHeadConfig(hidden=(), detach=False)}),
        ("chunk", {"network": GAUSSIAN}),
        ("action", {"network": attrs.evolve(SMALL, image_size=48, channels=(16,), blocks=2, state_waves=0)}),
    ],
)
def test_contract(values: Any, config: dict[str, Any]) -> None:
    given = FilmResnetConfig(**{"network": SMALL, **config})
    check_model(plugin, given, env=ENV, chunk=CHUNK, values=values, temperature=0.7, atol=2e-5)


def test_scores_repeat_the_sampled_log_probs_exactly() -> None:
    model, obs = policy(context={"temperature": 0.6, "values": "chunk"}), observation(5)
    chunk = model.sample_chunk(obs, noise(5), False)
    scores = model.chunk_log_probs(obs, chunk)
    assert torch.equal(scores.log_probs, chunk.log_probs)
    assert torch.equal(scores.values, chunk.values)
    assert torch.equal(model.decode_actions(chunk.extras["tokens"]), chunk.actions)


def test_other_batch_sizes_score_within_tolerance() -> None:
    model, obs = policy(), observation(6)
    chunk = model.sample_chunk(obs, noise(6), False)
    for rows in (np.array([0]), np.array([4, 1]), np.arange(6).repeat(3)):
        part = Chunk(
            actions=chunk.actions[rows],
            log_probs=chunk.log_probs[rows],
            extras={"tokens": chunk.extras["tokens"][rows]},
        )
        scores = model.chunk_log_probs(obs.take(rows), part)
        torch.testing.assert_close(scores.log_probs, chunk.log_probs[rows], rtol=0, atol=1e-5)


def test_greedy_takes_the_most_likely_bin() -> None:
    model, obs = policy(), observation(3)
    tokens = model.sample_chunk(obs, noise(3), True).extras["tokens"]
    assert torch.equal(tokens, model._predict_distribution(model.module, obs)[0].argmax(-1))


def test_or_the_middle_of_the_probability() -> None:
    model, obs = policy(greedy="median"), observation(3)
    tokens = model.sample_chunk(obs, noise(3), True).extras["tokens"]
    shares = model._predict_distribution(model.module, obs)[0].exp().cumsum(-1)
    upto = shares.gather(-1, tokens[..., None])[..., 0]
    below = torch.where(tokens > 0, shares.gather(-1, (tokens[..., None] - 1).clamp(min=0))[..., 0], 0)
    assert (upto > 0.5 - 1e-6).all() and (below < 0.5 + 1e-6).all()


def test_all_inputs_matter() -> None:
    model, obs = policy(), observation(2)
    base = model._predict_distribution(model.module, obs)[0]
    for other in changed(obs):
        assert (model._predict_distribution(model.module, other)[0] - base).abs().max() > 1e-4


def test_read_only_and_device_arrays_are_taken() -> None:
    model, (obs, tensors) = policy(), read_only_and_tensors(observation(2))
    a, b = (model.sample_chunk(o, noise(2), False) for o in (obs, tensors))
    assert torch.equal(a.log_probs, b.log_probs)
    actions = demonstrated(2)
    actions.setflags(write=False)
    assert model.imitation_loss(obs, actions) == model.imitation_loss(tensors, torch.from_numpy(actions.copy()))


def test_frames_of_any_size_are_scaled() -> None:
    env = EnvInfo(cameras={"front": (48, 80)}, state_dim=0, action_low=(-1.0,), action_high=(1.0,), tasks=ENV.tasks)
    model, obs = policy(env=env), observation(2, env)
    assert model.sample_chunk(obs, noise(2), True).actions.shape == (2, CHUNK, 1)
    assert model._prepare_inputs(obs)[0][0].shape == (2, 3, 64, 64)


def test_a_state_that_is_expected_and_not_there_is_an_error() -> None:
    with pytest.raises(ValueError, match="the observation has none"):
        policy().sample_chunk(attrs.evolve(observation(1), state=None), noise(1), True)


# ----------------------------------------------------------------------------------------------------- Gaussian head


def test_gaussian_scores_repeat_the_sampled_log_probs_exactly() -> None:
    model, obs = policy(network=GAUSSIAN, context={"temperature": 0.6, "values": "chunk"}), observation(5)
    chunk = model.sample_chunk(obs, noise(5), False)
    scores = model.chunk_log_probs(obs, chunk)
    assert torch.equal(scores.log_probs, chunk.log_probs)
    assert torch.equal(model.reference_log_probs(obs, chunk), chunk.log_probs)
    torch.testing.assert_close(torch.tanh(chunk.extras["unsquashed"]), chunk.actions)  # bounds are -1 and 1


def test_gaussian_clones_continuous_actions() -> None:
    model, obs, actions = policy(network=GAUSSIAN, shift=0), observation(4), 0.9 * demonstrated(4)
    optimiser = torch.optim.Adam(model.module.parameters(), 1e-2)
    first = model.imitation_loss(obs, actions).item()
    for _ in range(150):
        optimiser.zero_grad()
        model.imitation_loss(obs, actions).backward()
        optimiser.step()
    assert model.imitation_loss(obs, actions).item() < first - 1
    acted = model.sample_chunk(obs, noise(4), True).actions
    assert np.abs(acted.numpy() - actions).mean() < 0.1


def test_keys_of_bins_are_refused_with_a_gaussian_head(tmp_path: Path) -> None:
    with pytest.raises(Problems, match="network.head.count: unknown key"):
        Structurer().read_class({"network": {"head": {"type": "gaussian", "count": 9}}}, FilmResnetConfig)
    with pytest.raises(Problems, match="network.bins: unknown key; now head: {type: bins, count: ...}"):
        Structurer().read_class({"network": {"bins": 9}}, FilmResnetConfig)
    for keys in ({"smoothing": 0.0}, {"greedy": "median"}):
        with pytest.raises(ValueError, match="has no effect with a Gaussian head"):
            FilmResnetConfig(network=GAUSSIAN, **keys)
        policy(network=GAUSSIAN).save(tmp_path)
        with pytest.raises(MismatchError, match=f"model.{next(iter(keys))} has no effect"):
            policy(checkpoint=str(tmp_path), **keys)


def test_only_a_gaussian_head_has_reparameterised_actions() -> None:
    assert not isinstance(policy(), Reparameterised)
    assert isinstance(policy(network=GAUSSIAN), Reparameterised)
    assert not isinstance(policy(network=GAUSSIAN), ActionTokens)


# ---------------------------------------------------------------------------------------------------- words, images


def test_words_tell_order_and_take_any_text() -> None:
    words = BagOfWords(1024, CPU)
    texts = [
        "put the bowl on the plate",
        "put the plate on the bowl",
        "",
        "schiebe die Schüssel!",
        "PUT the bowl, on the plate",
    ]
    bags = words(texts)
    assert bags.shape == (5, 1024)
    assert (bags[0] != bags[1]).any()
    assert not bags[2].any()
    assert bags[3].sum() == pytest.approx(5 / 5**0.5)  # three words, two pairs
    assert torch.equal(bags[4], bags[0])
    assert torch.equal(words(texts[1:2]), bags[1:2])
    assert torch.equal(BagOfWords(1024, CPU, texts)(texts), bags)


def test_shifted_images_by_hand() -> None:
    image = np.arange(9, dtype=np.uint8).reshape(1, 3, 3, 1)
    moved = shift_images(image.repeat(3, 0), np.array([[0, 0], [1, 0], [-1, 2]]), CPU)[..., 0]
    assert moved[0].tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert moved[1].tolist() == [[0, 1, 2], [0, 1, 2], [3, 4, 5]]
    assert moved[2].tolist() == [[3, 3, 3], [6, 6, 6], [6, 6, 6]]


def test_soft_argmax_of_a_peak() -> None:
    maps = torch.zeros(1, 2, 3, 5)
    maps[0, 0, 2, 0], maps[0, 1, 0, 3] = 50.0, 50.0
    torch.testing.assert_close(soft_argmax(maps), torch.tensor([[-1.0, 0.5, 1.0, -1.0]]))


def test_waves_by_hand() -> None:
    torch.testing.assert_close(encode_waves(torch.tensor([[0.5]]), 2), torch.tensor([[0.5, 1.0, 0.0, 0.0, -1.0]]))
    assert encode_waves(torch.ones(2, 3), 0).shape == (2, 3)


# --------------------------------------------------------------------------------------------------------------- bins


def test_bins_reach_both_ends_and_the_middle() -> None:
    codec = BinCodec(FeatureScale(mode="MIN_MAX", values=((-2.0, 0.0), (2.0, 10.0)), dim=2), 5, CPU)
    bins = torch.tensor([[0, 0], [1, 1], [2, 2], [4, 4]])
    actions = torch.tensor([[-2.0, 0.0], [-1.0, 2.5], [0.0, 5.0], [2.0, 10.0]])
    torch.testing.assert_close(codec.decode_bins(bins), actions)
    assert torch.equal(codec.encode_actions(actions), bins)
    assert codec.encode_actions(torch.tensor([[-9.0, 99.0]])).tolist() == [[0, 4]]
    assert codec.encode_actions(torch.tensor([[-1.4, 3.7]])).tolist() == [[1, 1]]
    assert codec.bin_positions(torch.tensor([[-1.5, 3.75]])).tolist() == [[0.5, 1.5]]


def test_targets_are_around_the_place() -> None:
    aim = target_distributions(torch.tensor([4.0, 2.3, 0.0]), 9, 0.7)
    torch.testing.assert_close(aim.sum(-1), torch.ones(3))
    assert aim[0].argmax() == 4
    torch.testing.assert_close(aim[0, 3], aim[0, 5])
    assert (aim[1] * torch.arange(9)).sum() == pytest.approx(2.3, abs=0.01)
    assert aim[2].argmax() == 0


# ---------------------------------------------------------------------------------------------------------- imitation


def test_imitation_starts_at_chance_and_learns_to_repeat() -> None:
    model, obs, actions = policy(shift=0, smoothing=0.0), observation(4), demonstrated(4)
    assert model.imitation_loss(obs, actions).item() == pytest.approx(np.log(9), abs=0.3)
    optimiser = torch.optim.Adam(model.module.parameters(), 1e-2)
    for _ in range(80):
        optimiser.zero_grad()
        model.imitation_loss(obs, actions).backward()
        optimiser.step()
    assert model.imitation_loss(obs, actions).item() < 0.3
    acted = model.sample_chunk(obs, noise(4), True).actions
    assert (np.abs(acted.numpy() - actions) <= 1 / 8 + 1e-6).mean() > 0.9


def test_smoothing_is_the_cross_entropy_of_its_targets() -> None:
    obs, actions = observation(3), demonstrated(3)
    model, sharp = policy(shift=0, smoothing=0.7), policy(shift=0, smoothing=0.0)
    logits = model._predict_distribution(model.module, obs)[0]
    aim = target_distributions(model.codec.bin_positions(torch.as_tensor(actions)), 9, 0.7)
    torch.testing.assert_close(model.imitation_loss(obs, actions), -(aim * logits).sum(-1).mean())
    one_hot = torch.nn.functional.one_hot(sharp.encode_actions(actions), 9)
    torch.testing.assert_close(sharp.imitation_loss(obs, actions), -(one_hot * logits).sum(-1).mean())


def test_images_are_moved_in_imitation_only_and_by_the_batch() -> None:
    still, model, obs, actions = policy(shift=0), policy(shift=4), observation(4), demonstrated(4)
    assert torch.equal(
        model._predict_distribution(model.module, obs)[0], still._predict_distribution(still.module, obs)[0]
    )
    loss = model.imitation_loss(obs, actions)
    assert loss == model.imitation_loss(obs, actions) != still.imitation_loss(obs, actions)
    offsets, turned = model._draw_offsets(actions), model._draw_offsets(actions[::-1])
    assert offsets.shape == (2, 4, 2)
    assert np.abs(offsets).max() <= 4
    assert (offsets != turned).any()


def play(env: SimEnv, split: str, rows: int, act: Any) -> tuple[float, list[tuple[Observation, Any]]]:
    """One episode a row: success, and what was seen and what the expert would have done."""
    states = env.reset_states(split)
    obs = env.reset(np.arange(rows), np.array([s.id for s in states[:: len(states) // rows][:rows]]), np.arange(rows))
    seen, active, solved = [], np.ones(rows, bool), np.zeros(rows, bool)
    for _ in range(16 // CHUNK):
        label = to_numpy(env.expert_chunk())
        seen.append((obs.numpy().take(np.flatnonzero(active)), label[active]))
        result = env.chunk_step(act(obs, label), active, True)
        solved |= to_numpy(result.success) & active
        active &= ~to_numpy(result.terminated).any(1)
        obs = result.obs
    return float(solved.mean()), seen


def test_it_clones_the_tabletop_expert() -> None:
    """200 updates on 256 episodes of one task; four seeds came from 0.00 to 0.09 to 0.56 to 0.70."""
    rows, draws = 64, np.random.default_rng(0)
    simulator = load("env", "tabletop")
    env = simulator.build(simulator.config(tasks=("pick_red",)), EnvContext(chunk=CHUNK, num_envs=rows))
    model = policy(env.info, network=NetworkConfig(channels=(16, 32)))

    def noisy(obs: Observation, label: Any) -> Any:
        return np.clip(label + 0.2 * draws.standard_normal(label.shape), -1, 1).astype(np.float32)

    def greedy(obs: Observation, label: Any) -> Any:
        return model.sample_chunk(obs, noise(rows), True).actions

    before, _ = play(env, "eval", rows, greedy)
    samples = [pair for _ in range(4) for pair in play(env, "train", rows, noisy)[1]]
    obs, actions = Observation.concat([o for o, _ in samples]), np.concatenate([a for _, a in samples])
    optimiser = torch.optim.Adam(model.module.parameters(), 2e-3)
    losses = []
    for step in range(200):
        optimiser.param_groups[0]["lr"] = 2e-3 * min((step + 1) / 20, 1 - step / 200)
        rows_of = draws.integers(0, len(actions), 32)
        optimiser.zero_grad()
        loss = model.imitation_loss(obs.take(rows_of), actions[rows_of])
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    after, _ = play(env, "eval", rows, greedy)
    assert before < 0.2 < 0.4 < after
    assert np.mean(losses[-10:]) < np.mean(losses[:10]) - 0.5


# ------------------------------------------------------------------------------------------------ critic and reference


def test_critic_starts_near_zero_and_can_be_detached() -> None:
    obs = observation(4)
    for detach in (False, True):
        model = policy(context={"values": "action"}, value_head=FilmValueHeadConfig(detach=detach))
        values = model.values(obs)
        assert values.shape == (4, CHUNK)
        assert values.abs().max() < 0.5
        chunk = model.sample_chunk(obs, noise(4), False)
        assert torch.equal(chunk.values, values)
        model.chunk_log_probs(obs, chunk).values.sum().backward()
        assert (model.module.words.weight.grad is None) == detach
        assert model.module.value_head.layers[0].weight.grad.abs().sum() > 0


def test_reference_is_the_policy_before_training() -> None:
    model, obs = policy(context={"temperature": 1.3, "values": "chunk"}), observation(3)
    start = model.sample_chunk(obs, noise(3), False)
    optimiser = torch.optim.Adam(model.module.parameters(), 1e-2)
    for _ in range(3):
        optimiser.zero_grad()
        model.chunk_log_probs(obs, start).log_probs.sum().backward()
        optimiser.step()
    assert (model.chunk_log_probs(obs, start).log_probs - start.log_probs).abs().max() > 0.01
    reference = model.reference_log_probs(obs, start)
    assert torch.equal(reference, start.log_probs)
    assert not reference.requires_grad


# ------------------------------------------------------------------------------------------------------------ weights


def test_weights_are_a_function_of_the_seed_and_leave_the_global_generator_alone() -> None:
    state = torch.random.get_rng_state()
    models = [policy(context={"seed": seed, "values": "chunk"}) for seed in (5, 5, 6)]
    assert torch.equal(torch.random.get_rng_state(), state)
    same, again, other = (dict(m.module.named_parameters()) for m in models)
    assert all(torch.equal(same[name], again[name]) for name in same)
    for name in ("head.weight", "cameras.1.stages.0.down.weight", "value_head.layers.0.weight"):
        assert not torch.equal(same[name], other[name])


def test_bfloat16_weights_score_in_float32() -> None:
    model, obs = policy(dtype="bfloat16", context={"values": "chunk"}), observation(2)
    assert model.module.head.weight.dtype == torch.bfloat16
    assert model.module.value_head.layers[0].weight.dtype == torch.float32
    chunk = model.sample_chunk(obs, noise(2), False)
    assert chunk.log_probs.dtype == chunk.values.dtype == torch.float32
    assert torch.equal(model.chunk_log_probs(obs, chunk).log_probs, chunk.log_probs)
    model.imitation_loss(obs, demonstrated(2)).backward()


def test_the_default_is_small() -> None:
    env = EnvInfo(
        cameras={"a": (64, 64), "b": (64, 64)},
        state_dim=9,
        action_low=(-1.0,) * 7,
        action_high=(1.0,) * 7,
        tasks=ENV.tasks,
    )
    model = plugin.build(FilmResnetConfig(), ModelContext(env=env, chunk=8))
    assert 4 * sum(p.numel() for p in model.module.parameters()) < 5e6

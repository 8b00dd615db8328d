"""Numbers of the original implementations: RLinf 0.3.0, siiRL and AcceRL, run on small random inputs."""

from __future__ import annotations

import math

import pytest
import torch
from algorithm_cases import cases_of, close, rollout_of, tensors

from vla_rl.core.samples import by_action, by_chunk
from vla_rl.core.types import Batch, Chunk, Observation, Scores
from vla_rl.plugins.algorithms.grpo.config import GRPOConfig
from vla_rl.plugins.algorithms.grpo.impl import GRPO
from vla_rl.plugins.algorithms.ppo.config import PPOConfig
from vla_rl.plugins.algorithms.ppo.impl import PPO
from vla_rl.toolkit.algorithms import functional as F
from vla_rl.toolkit.algorithms.checks import ShapeError
from vla_rl.toolkit.algorithms.policy_gradient import Decoupled, aggregation_weights
from vla_rl.toolkit.algorithms.statistics import EffectiveSize, Mean

LEVELS = {"chunk_level": "chunk", "action_level": "action", "token_level": "token"}


def until_end(dones):
    """RLinf's dones [T+1, N, C], whose row t+1 belongs to step t: -> (ended, valid) [T, N, C]."""
    ended = dones[1:]
    return ended, by_chunk(F.valid_until_end(by_action(ended)), dones.shape[-1])


def coarse(tensor):
    """[..., 1] without its last dimension: a chunk-level tensor of RLinf."""
    return tensor.squeeze(-1) if tensor.shape[-1] == 1 else tensor


def with_values(inputs, ended, level):
    """A rollout of RLinf's rewards and values [T+1, N, C or 1]; the last row follows the last chunk."""
    values = coarse(inputs["values"]) if level == "chunk" else inputs["values"]
    next_values = torch.zeros(ended.shape[:2])
    next_values[-1] = values[-1] if level == "chunk" else values[-1][:, 0]
    return rollout_of(inputs["rewards"], ended, values=values[:-1], next_values=next_values)


# ------------------------------------------------------------------------------------------------- masks and advantages


def test_valid_masks():
    for _, case in cases_of("rlinf_masks.json"):
        outputs = tensors(case["outputs"])
        ended, valid = until_end(tensors(case["inputs"])["dones"])
        assert torch.equal(valid, outputs["loss_mask"])
        assert torch.equal(valid.sum((0, 2))[None, :, None].expand(valid.shape), outputs["loss_mask_sum"])
        lengths = by_chunk(F.episode_lengths(by_action(valid), by_action(ended)), valid.shape[-1])
        close(lengths[0, :, 0], outputs["loss_mask_sum"][0, :, 0])


def test_generalised_advantages():
    for _, case in cases_of("rlinf_gae.json"):
        inputs, outputs, k = tensors(case["inputs"]), tensors(case["outputs"]), case["kwargs"]
        ended, until = until_end(inputs["dones"])
        valid = until if k["mask"] else torch.ones_like(ended)
        level = LEVELS[k["reward_type"]]
        rollout = with_values(inputs, ended, level)
        config = PPOConfig(
            gamma=k["gamma"], lam=k["gae_lambda"], advantage=level, normalize_advantages=None, time_limit="terminal"
        )
        found = PPO(config).advantages(rollout)
        mask = valid.any(-1) if level == "chunk" else valid
        wanted = coarse(outputs["advantages"]) if level == "chunk" else outputs["advantages"]
        advantages = (
            F.normalize_masked(found.advantages, mask, eps=1e-5) if k["normalize_advantages"] else found.advantages
        )
        assert found.returns is not None
        close(advantages[mask], wanted[mask])
        returns = coarse(outputs["returns"]) if level == "chunk" else outputs["returns"]
        close(found.returns[mask], returns[mask])


def test_a_truncation_is_bootstrapped_like_a_reward():
    """RLinf adds gamma * V(final) to the reward of a chunk's last action where that was cut ("standard") or ended in any
    way, and ends the episode there; without auto_reset it treats the cut as an end."""
    cuts = 0
    for _, case in cases_of("rlinf_bootstrap.json"):
        inputs, k = tensors(case["inputs"]), case["kwargs"]
        wanted = tensors({"o": case["outputs"]})["o"]
        if not k["auto_reset"]:
            close(wanted, inputs["rewards"])
            continue
        dones = inputs["dones"]
        cut = inputs["truncations"] if k["bootstrap_type"] == "standard" else dones
        values = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
        bootstrap = inputs["bootstrap_values"].expand(8, 4)
        keys = {"gamma": k["gamma"], "lam": 0.9}
        never = torch.zeros_like(dones)

        def time_major(tensor):
            return tensor.T.contiguous()

        theirs = F.gae(*map(time_major, (wanted, values, bootstrap, dones, never)), **keys)
        last_done = dones[:, -1]
        ours = F.gae(*map(time_major, (inputs["rewards"], values, bootstrap, dones & ~cut, cut)), **keys)
        close(ours[0][:, last_done], theirs[0][:, last_done])
        cuts += int(cut.sum())
    assert cuts > 0


def test_group_advantages():
    for _, case in cases_of("rlinf_grpo.json"):
        inputs, outputs, k = tensors(case["inputs"]), tensors(case["outputs"]), case["kwargs"]
        ended, valid = until_end(inputs["dones"])
        chunk_level = k["reward_type"] == "chunk_level"
        if chunk_level:  # its mask keeps the whole chunk in which an episode ends, and its rewards
            valid = outputs["loss_mask"].expand(valid.shape)
            ended = torch.zeros_like(ended)
        rollout = rollout_of(inputs["rewards"] * valid, ended, valid=valid, group_size=k["group_size"])
        found = GRPO(GRPOConfig()).advantages(rollout).advantages
        wanted = outputs["advantages"][..., 0]
        close(found, wanted * valid.any(-1))


def test_group_advantages_of_siirl():
    for _, case in cases_of("grpo_advantage.json"):
        data = tensors(case)
        scores, groups = data["token_level_rewards"].sum(-1), data["index"]
        found = F.group_advantages(scores, groups, normalize_by_std="group" if data["norm_by_std"] else None)
        alone = torch.tensor([int((groups == group).sum()) == 1 for group in groups])
        close((found[:, None] * data["response_mask"])[~alone], data["advantages"][~alone])
        assert not found[alone].any()  # there is nothing to compare with; siiRL gives the raw score


def test_advantages_of_siirl():
    for name, case in cases_of("siirl_gae_value_kl.json"):
        if not name.startswith("gae"):
            continue
        data = tensors(case)
        rewards, values, mask = (data[key].T for key in ("rewards", "values", "mask"))
        never = torch.zeros(rewards.shape, dtype=torch.bool)
        keys = {"gamma": data["gamma"], "lam": data["lam"], "valid": mask.bool()}
        advantages, returns = F.gae(rewards, values, torch.zeros_like(values), never, never, **keys)
        inside = mask.bool()
        close(returns[inside], data["returns"].T[inside])
        close(F.normalize_masked(advantages, inside)[inside], data["advantages_whitened"].T[inside])


def test_advantages_of_accerl():
    for _, case in cases_of("accerl_gae.json"):
        data = tensors(case)
        steps = len(data["rewards"])
        next_values, terminated = torch.zeros(steps, 1), torch.zeros(steps, 1, dtype=torch.bool)
        next_values[-1], terminated[-1] = data["bootstrap_value"], data["is_terminal"]
        rewards, values = data["rewards"][:, None], data["values"][:, None]
        never = torch.zeros_like(terminated)
        found = F.gae(rewards, values, next_values, terminated, never, gamma=data["gamma"], lam=data["lam"])
        close(found[0][:, 0], data["advantages"])
        close(found[1][:, 0], data["returns"])


# --------------------------------------------------------------------------------------------------------------- losses


def test_clipped_losses():
    for name, case in cases_of("rlinf_actor_loss.json"):
        inputs, outputs, k = tensors(case["inputs"]), tensors(case["outputs"]), case["kwargs"]
        samples, width = inputs["logprobs"].shape
        shape = (samples, width // k["single_action_dim"], k["single_action_dim"])
        level = LEVELS[k["logprob_type"]]
        new = inputs["logprobs"].reshape(shape).clone().requires_grad_()
        everything = torch.ones(shape[:2], dtype=torch.bool)
        fine = F.reduce_tokens(new, everything, level)
        old = F.reduce_tokens(inputs["old_logprobs"].reshape(shape), everything, level)
        if "error" in outputs:  # an advantage of each action with a ratio of the chunk
            with pytest.raises(ShapeError, match="cannot be expanded"):
                F.expand_to(inputs["advantages"], fine)
            continue
        advantages = F.expand_to(coarse(inputs["advantages"]), fine)
        bounds = {"low": k["clip_ratio_low"], "high": k["clip_ratio_high"], "dual_clip": k["clip_ratio_c"]}
        entries = F.clipped_surrogate(fine, old, advantages, **bounds)
        mask = (
            F.expand_to(coarse(inputs["loss_mask"]).float(), fine) if "loss_mask" in inputs else torch.ones(fine.shape)
        )
        if k["mode"] == "mask_ratio":
            lengths = F.expand_to(coarse(inputs["loss_mask_sum"]).float(), fine)
            loss = F.weighted_sum(entries, mask * k["max_episode_steps"] / lengths) / mask.numel()
        else:  # it divides by the mask's own number of entries; we broadcast the mask before counting
            loss = F.weighted_sum(entries, mask) / (inputs["loss_mask"].sum() if "loss_mask" in inputs else mask.sum())
        loss.backward()
        close(loss.detach(), outputs["loss"])
        close(new.grad.reshape(samples, width), outputs["grad_logprobs"])
        clipped = F.find_clipped(fine.detach(), old, advantages, low=bounds["low"], high=bounds["high"])
        ours = Mean.of(clipped.float(), mask > 0).read("share")["share"]
        assert 0 <= ours <= 1, name
        if k["mode"] == "no_mask":
            close(torch.tensor(ours), torch.tensor(outputs["metrics"]["actor/clip_fraction"]), 1e-5)


def proximal_of(inputs, k):
    """log pi_old as RLinf has it, in the shape of its log-probs: given, or between mu and pi by their versions."""
    if "proximal_logprobs" in inputs:
        return inputs["proximal_logprobs"]
    mu, pi = inputs["old_logprobs"], inputs["logprobs"]
    now = k["current_version"]
    return mu + (now - 1 - inputs["versions"]) / (now - inputs["versions"]) * (pi - mu)


def test_decoupled_losses():
    """Actor and critic at once, with gradients. RLinf's divisor counts the entries of its mask, which is narrower than
    the entries where these are tokens, unless the threshold made it theirs."""
    for name, case in cases_of("rlinf_decoupled.json"):
        inputs, outputs, k = tensors(case["inputs"]), tensors(case["outputs"]), case["kwargs"]
        samples, width = inputs["logprobs"].shape
        tokens, threshold = k["single_action_dim"], k["behave_weight_threshold"]
        shape = (samples, width // tokens, tokens)
        level, value_level = LEVELS[k["logprob_type"]], LEVELS[k["reward_type"]]
        config = PPOConfig(
            log_prob=level,
            advantage=value_level,
            clip_low=k["clip_ratio_low"],
            clip_high=k["clip_ratio_high"],
            dual_clip=k["clip_ratio_c"],
            value_clip=k["value_clip"],
            huber_delta=k["huber_delta"],
            value_coef=1.0,
            correction=Decoupled(
                proximal="forward" if "proximal_logprobs" in inputs else "interpolate", threshold=threshold
            ),
        )
        everything = torch.ones(shape[:2], dtype=torch.bool)
        fine = F.reduce_tokens((proximal_of(inputs, k) - inputs["old_logprobs"]).reshape(shape), everything, level)
        mask = coarse(inputs["loss_mask"])
        entries = F.expand_to(mask, fine)
        kept = entries & (fine.exp() <= (math.inf if threshold is None else threshold))
        divisor = mask.sum() if threshold is None else kept.sum()
        new = inputs["logprobs"].reshape(shape).clone().requires_grad_()
        values = inputs["values"].clone().requires_grad_()
        versions = inputs["versions"][:, 0].long() if "versions" in inputs else torch.zeros(samples, dtype=torch.long)
        old = inputs["old_logprobs"].reshape(shape)
        batch = Batch(
            obs=Observation(images={}, instructions=("",) * samples),
            chunk=Chunk(actions=torch.zeros(*shape[:2], 1), log_probs=old),
            valid=everything,
            log_probs=old,
            proximal_log_probs=proximal_of(inputs, k).reshape(shape) if "proximal_logprobs" in inputs else None,
            values=coarse(inputs["prev_values"]),
            advantages=coarse(inputs["advantages"]),
            weights=mask.float() * (fine[0].numel() / mask[0].numel()) / divisor,
            returns=coarse(inputs["returns"]),
            value_weights=mask.float() / mask.sum(),
            lag=k.get("current_version", 1) - 1 - versions,
        )
        loss = PPO(config).loss(Scores(log_probs=new, entropy=torch.zeros(shape), values=coarse(values)), batch)
        loss.total.backward()
        close(loss.total.detach(), outputs["loss"])
        close(new.grad.reshape(samples, width), outputs["grad_logprobs"])
        close(values.grad, outputs["grad_values"])
        metrics = tensors(outputs["metrics"])
        close(loss.metrics["loss/policy"], torch.tensor(metrics["actor/policy_loss"]))
        if entries.shape == mask.shape:
            cut = loss.statistics.get("policy/behaviour_cut")
            share = 0.0 if cut is None else cut.read("c")["c"]
            assert share == pytest.approx(metrics["actor/behav_clip_fraction"], abs=1e-6), name
            clipped = loss.statistics["loss/clip_fraction"].read("c")[
                "c"
            ]  # theirs apart: by the clip, by the dual clip
            theirs = metrics["actor/clip_fraction"] + metrics["actor/dual_clip_fraction"]
            assert clipped == pytest.approx(theirs, abs=1e-6), name


def test_clipped_losses_of_siirl():
    for _, case in cases_of("dual_clip_ppo.json"):
        data = tensors(case)
        new = data["log_prob"].clone().requires_grad_()
        triple = (new, data["old_log_prob"], data["advantages"])
        bounds = {"low": data["clip_low"], "high": data["clip_high"]}
        entries = F.clipped_surrogate(*triple, **bounds, dual_clip=data["clip_c"])
        mask = data["mask"]
        columns = mask.T.bool()
        name = {"token-mean": "step-mean", "seq-mean-token-mean": "trajectory-mean"}.get(data["agg"])
        if name is None:
            continue
        weights, counts = F.loss_weights(columns, torch.zeros_like(columns), name)
        loss = F.weighted_sum(entries.T, weights) / counts.sum()
        loss.backward()
        close(loss.detach(), data["loss"])
        close(new.grad, data["grad_log_prob"])
        clipped = F.find_clipped(*(t.detach() for t in triple), **bounds)
        assert Mean.of(clipped.float(), mask.bool()).read("c")["c"] == pytest.approx(float(data["clipfrac"]), abs=1e-6)
        kl = F.kl_estimate(data["old_log_prob"], data["log_prob"], "k1")
        assert Mean.of(kl, mask.bool()).read("k")["k"] == pytest.approx(float(data["ppo_kl"]), abs=1e-6)


def test_critic_losses():
    for _, case in cases_of("rlinf_critic_loss.json"):
        inputs, outputs, k = tensors(case["inputs"]), tensors(case["outputs"]), case["kwargs"]
        values = inputs["values"].clone().requires_grad_()
        mask = inputs.get("loss_mask", torch.ones(values.shape, dtype=torch.bool))
        keys = {"clip": k["value_clip"], "huber_delta": k["huber_delta"]}
        entries = F.value_loss(values, inputs["returns"], inputs["prev_values"], **keys)
        loss = F.weighted_sum(entries, mask.float()) / mask.sum()
        loss.backward()
        close(loss.detach(), outputs["loss"])
        close(values.grad, outputs["grad_values"])
        explained = F.explained_variance(values.detach(), inputs["returns"], mask)
        metrics = tensors(outputs["metrics"])
        assert explained == pytest.approx(float(metrics["critic/explained_variance"]), abs=1e-5)


def test_critic_losses_and_divergences_of_siirl():
    estimators = {"kl_kl": "k1", "kl_mse": "k2", "kl_low_var_kl": "k3"}
    for name, case in cases_of("siirl_gae_value_kl.json"):
        data = tensors(case)
        if name.startswith("value_loss_clip_"):
            keys = {"clip": float(name.rpartition("_")[2]), "huber_delta": None}
            triple = (data["vpreds"], data["returns"], data["values"])
            mask = data["mask"].bool()
            assert Mean.of(F.value_loss(*triple, **keys), mask).read("l")["l"] == pytest.approx(
                float(data["loss"]), abs=1e-5
            )
            found = Mean.of(F.value_clipped(*triple, **keys).float(), mask).read("c")["c"]
            assert found == pytest.approx(float(data["clipfrac"]), abs=1e-6)
        elif name in estimators:
            close(F.kl_estimate(data["logprob"], data["ref_logprob"], estimators[name]), data["kl"])
        elif name == "kl_abs":
            close(F.kl_estimate(data["logprob"], data["ref_logprob"], "k1").abs(), data["kl"])


def test_trust_weighted_losses_of_accerl():
    for _, case in cases_of("gipo_loss.json"):
        data = tensors(case)
        tokens = data["action_tokens"]
        samples = len(tokens)
        logits = data["logits"].clone().requires_grad_()
        all_log_probs = logits.log_softmax(-1)
        new = all_log_probs.gather(-1, tokens[..., None]).squeeze(-1)
        old = data["behaviour_logits"].log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
        advantages = F.expand_to(data["normalized_advantage"], new)
        trust = F.trust_weights(new, old, sigma=data["sigma"])
        close((new - old).exp().detach().reshape(samples, -1), data["ratio"])
        close(trust.reshape(samples, -1), data["trust_weight"])
        policy = F.trust_surrogate(new, old, advantages, sigma=data["sigma"]).mean()
        close(policy.detach(), data["policy_loss"])
        (gradient,) = torch.autograd.grad(policy, logits, retain_graph=True)
        close(gradient, data["grad_policy_loss_logits"])
        value = data["value"].clone().requires_grad_()
        critic = (
            2
            * data["vf_coef"]
            * F.value_loss(value, data["value_target"], value.detach(), clip=None, huber_delta=None).mean()
        )
        close(critic.detach(), data["value_loss"])
        entropy = -(all_log_probs.exp() * all_log_probs).sum(-1).mean()
        close(entropy.detach(), data["entropy"])
        if data["kl_coef"] == 0:  # theirs is the divergence of whole distributions; ours is estimated from the tokens
            loss = policy + critic - data["ent_coef"] * entropy
            loss.backward()
            close(loss.detach(), data["loss"])
            close(logits.grad, data["grad_loss_logits"])
            close(value.grad, data["grad_loss_value"])


def test_diagnostics_of_accerl():
    for name, case in cases_of("accerl_full_formulas.json"):
        data = tensors(case)
        if "sigma" in data:
            new, old = data["ratio"].log(), torch.zeros_like(data["ratio"])
            close(F.trust_weights(new, old, sigma=data["sigma"]), data["weight"])
            close(F.trust_surrogate(new, old, data["advantage"], sigma=data["sigma"]).mean(), data["loss"])
        elif name.startswith("diagnostics_gipo"):
            sigma = float(name.rpartition("sigma")[2])
            new, old = data["ratio"].log(), torch.zeros_like(data["ratio"])
            used = F.trust_weights(new, old, sigma=sigma) * data["ratio"]
            close(used, data["u"])
            everything = torch.ones(used.shape, dtype=torch.bool)
            size = EffectiveSize.of(used, everything).read("size")["size"]
            assert size == pytest.approx(float(data["ess_eff_norm"]), abs=1e-6)
            dead = F.find_clipped(new, old, data["advantage"], low=0.2, high=0.2)
            assert float(dead.float().mean()) == float(data["ppo_dead_frac_0.2"])


# ------------------------------------------------------------------------------------------------------ from end to end


def test_a_whole_pipeline_of_rlinf():
    """Rewards, ends, values and log-probs in, loss and gradients out, with the aggregation of its code."""
    for _, case in cases_of("rlinf_pipeline.json"):
        inputs, outputs, k = tensors(case["inputs"]), tensors(case["outputs"]), case["kwargs"]
        ended, valid = until_end(inputs["dones"])
        masked = "loss_mask" in outputs
        level, value_level = LEVELS[k["logprob_type"]], LEVELS[k["reward_type"]]
        everything = torch.ones_like(valid)
        mask = outputs["loss_mask"].expand(valid.shape) if masked else everything
        config = PPOConfig(
            gamma=k["gamma"],
            lam=k["gae_lambda"],
            log_prob=level,
            advantage=value_level,
            time_limit="terminal",
            normalize_advantages=None,
        )
        if k["adv_type"] == "grpo":
            rewards = inputs["rewards"] * mask
            first = torch.zeros_like(ended) if value_level == "chunk" else ended & valid
            rollout = rollout_of(rewards, first, valid=mask, group_size=k["group_size"])
            advantages = GRPO(GRPOConfig(log_prob=level)).advantages(rollout).advantages
            close(advantages, outputs["advantages"][..., 0] * mask.any(-1))
            returns = None
        else:
            found = PPO(config).advantages(with_values(inputs, ended, value_level))
            inside = mask.any(-1) if value_level == "chunk" else mask
            advantages, returns = F.normalize_masked(found.advantages, inside, eps=1e-5), found.returns
            wanted = coarse(outputs["advantages"]) if value_level == "chunk" else outputs["advantages"]
            close(advantages[inside], wanted[inside])
        weighed = rollout_of(inputs["rewards"], ended & valid, valid=valid if masked else everything)
        aggregation = "rlinf" if masked else "step-mean"
        weights, counts = aggregation_weights(weighed, "chunk" if value_level == "chunk" else level, aggregation)
        shape = (*valid.shape, k["single_action_dim"])
        new = inputs["logprobs"].reshape(shape).flatten(0, 1).clone().requires_grad_()
        old, flat = inputs["old_logprobs"].reshape(shape).flatten(0, 1), everything.flatten(0, 1)
        fine = F.reduce_tokens(new, flat, level)
        entries = F.clipped_surrogate(
            fine,
            F.reduce_tokens(old, flat, level),
            F.expand_to(advantages.flatten(0, 1), fine),
            low=k["clip_ratio_low"],
            high=k["clip_ratio_high"],
            dual_clip=k.get("clip_ratio_c"),
        )
        loss = F.weighted_sum(entries, F.expand_to(weights.flatten(0, 1), fine, mean=True)) / counts.sum()
        given = (coarse(t) if value_level == "chunk" else t for t in (inputs["new_values"], inputs["values"][:-1]))
        now, before = (t.flatten(0, 1).clone() for t in given)
        now.requires_grad_()
        if returns is not None:
            weights, counts = aggregation_weights(weighed, value_level, aggregation)
            keys = {"clip": k["value_clip"], "huber_delta": k["huber_delta"]}
            errors = F.value_loss(now, returns.flatten(0, 1), before, **keys)
            loss = loss + F.weighted_sum(errors, weights.flatten(0, 1)) / counts.sum()
        loss.backward()
        close(loss.detach(), outputs["loss"])
        close(new.grad.reshape(outputs["grad_logprobs"].shape), outputs["grad_logprobs"])
        if "grad_values" in outputs:
            close(now.grad.reshape(outputs["grad_values"].shape), outputs["grad_values"])

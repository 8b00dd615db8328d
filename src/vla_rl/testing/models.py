"""`check_model`: does a policy keep to the contract of `VLAModel`?"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

from vla_rl.core.capabilities import ActionTokens, Compilable, HasCritic, HasFeatures, Reparameterised
from vla_rl.core.contexts import ModelContext
from vla_rl.core.declarations import ModelPlugin
from vla_rl.core.errors import UserError
from vla_rl.core.hookspecs import VLAModel
from vla_rl.core.types import Chunk, EnvInfo, ValueGranularity, pick_rows, to_numpy
from vla_rl.testing import synthetic
from vla_rl.testing.common.comparison import same_data
from vla_rl.testing.common.findings import Findings, build_component, check_array
from vla_rl.testing.common.generators import run_from
from vla_rl.testing.model_case import ModelCase, check_continuing
from vla_rl.testing.policies import KERNELS, check_policy, check_temperature
from vla_rl.testing.policy_inputs import check_inputs, check_other_bounds, check_tokenizer
from vla_rl.testing.policy_traces import check_building, check_traces, other_seed
from vla_rl.toolkit.models.adapters import MARK, MergedAdapters, has_adapters
from vla_rl.toolkit.models.blocks import find_blocks
from vla_rl.toolkit.models.frozen_weights import FrozenLinear

MERGED_KL = 1e-4
"""Largest KL(acting || recomputed) in nats a token where adapters are merged for acting; bfloat16 gives about 1e-5."""
ADAPTERS_MOVED = 0.02
"""Standard deviation of the numbers that are added to trained weights: B of an adapter starts at 0."""


def check_model(
    model: VLAModel | ModelPlugin,
    config: Any = None,
    *,
    env: EnvInfo | None = None,
    chunk: int = 2,
    values: ValueGranularity = "none",
    device: str = "cpu",
    temperature: float = 1.0,
    rows: int = 4,
    atol: float = 1e-5,
    reload: Callable[[Path], Any] | None = None,
) -> None:
    """Sample, score, clone, publish and save a model. Raises CheckFailed with all findings.

    Args:
        model: a component, or a `ModelPlugin` that is built with `config` for `env`, `chunk`, `values`, `device` and
            `temperature`. For a component, pass what it was built with.
        env: default: two 64-px cameras, a state of 4 numbers, two tasks, 3 action dimensions from -0.2 to 0.3, 0 to 1
            and -3 to 3. With the default a `ModelPlugin` is built for other bounds too, unless its config names a
            checkpoint.
        rows: batch size of the checks.   atol: tolerance of log-probs, values and actions; raise it below fp32.
        reload: folder -> config that loads what `save` wrote there. Default, for a `ModelPlugin` whose config has
            a `checkpoint`: the config with it set.
    The weights are the same afterwards.
    """
    env = synthetic.env_info() if env is None else env
    context = ModelContext(env=env, chunk=chunk, values=values, device=device, temperature=temperature)
    building = run_from(11, lambda: build_component("model", model, config, context))
    policy, name = building.result
    f = Findings(f"check_model of {name}")
    obs = synthetic.observation(env, rows)
    case = ModelCase(model=policy, f=f, env=env, chunk=chunk, values=values, obs=obs, atol=atol)
    plugin = model if isinstance(model, ModelPlugin) else None
    given = plugin.config() if plugin is not None and config is None else config
    with f.section("sample_chunk"):
        if _check_sampling(case):
            if plugin is not None:  # before anything moves its weights
                with f.section("build"):
                    hot = attrs.evolve(context, temperature=2 * temperature)
                    again = run_from(12, lambda: plugin.build(given, hot))
                    check_building(f, attrs.evolve(building, result=policy), again)
            own = (_recorded_scores, _keyed_noise, _critic_values, _token_round_trip, _compiled_layers)
            f.run_checks((*own, _trained_gradients, _merged_adapters, check_traces), case)
            check_inputs(case, getattr(given, "cameras", None))
            check_policy(case)
            check_continuing(case, case.model)
            if plugin is not None:
                with f.section("temperature"):
                    check_temperature(case, again.result)
                with f.section("other bounds"):
                    check_other_bounds(case, plugin.build, given, context)
            if getattr(given, "checkpoint", None) is not None:
                with f.section("tokenizer"):
                    check_tokenizer(case, Path(given.checkpoint))
            with f.section("publishing"):
                _check_publishing(case)
            with f.section("save"):
                _check_saving(case, plugin, given, context, reload)
    f.close()


def _merged_adapters(case: ModelCase) -> None:
    """Compare chunks that are sampled with merged adapters (`lora.merge_for_acting`) with their scores."""
    module = case.model.module
    fp8 = any(isinstance(part, FrozenLinear) and part.kind == "fp8" for part in module.modules())
    if not has_adapters(module) or fp8:  # FP8 is not merged
        return
    where = "merged adapters"
    with case.moved_weights(ADAPTERS_MOVED):
        before = {name: p.detach().clone() for name, p in module.named_parameters()}
        adapters = MergedAdapters(module, "copy")
        adapters.merge_weights()
        try:
            chunk = case.draw_chunks()
        finally:
            adapters.restore_weights()
        kept = all(torch.equal(p, before[name]) for name, p in module.named_parameters())
        with torch.no_grad():
            scores = case.model.chunk_log_probs(case.obs, chunk).log_probs.double()
    case.f.expect(kept, where, "the same weights after acting", "others", "leave frozen weights alone while acting")
    log_ratio = scores - torch.as_tensor(chunk.log_probs).to(scores)
    kl = float((torch.expm1(log_ratio) - log_ratio).mean())
    remedy = "compute an adapted layer as W x + scale B A x, and nothing else from its weights"
    case.f.expect(kl <= MERGED_KL, where, f"a KL of at most {MERGED_KL:g} nats a token", f"{kl:.2g}", remedy)


def _value_shape(case: ModelCase) -> tuple[int, ...]:
    return (case.row_count,) if case.values == "chunk" else (case.row_count, case.chunk)


def _check_sampling(case: ModelCase) -> bool:
    per_action = case.model.tokens_per_action
    case.f.expect(per_action >= 1, "tokens_per_action", "M >= 1", per_action, "log-probs of one action")
    valid = True
    for where, greedy in (("sample_chunk", False), ("sample_chunk (greedy)", True)):
        chunk = case.draw_chunks(greedy)
        if _check_chunk(case, chunk, where):
            case.within_bounds(chunk.actions, where)
        else:
            valid = False
    return valid


def _check_chunk(case: ModelCase, chunk: Chunk, where: str) -> bool:
    """Check types and shapes of the sampled chunk."""
    f, per_action = case.f, case.model.tokens_per_action
    valid = case.is_array(chunk.actions, (case.row_count, case.chunk, case.env.action_dim), f"{where}: actions")
    valid &= case.is_array(chunk.log_probs, (case.row_count, case.chunk, per_action), f"{where}: log_probs")
    if case.values == "none":
        f.expect(chunk.values is None, f"{where}: values", "None", "values", "ModelContext.values is none")
    elif f.expect(chunk.values is not None, f"{where}: values", _value_shape(case), "None", "add a value head"):
        valid &= case.is_array(chunk.values, _value_shape(case), f"{where}: values")
    for name, array in chunk.extras.items():
        holds, expected = len(array) == case.row_count, f"batch first ({case.row_count} rows)"
        valid &= f.expect(holds, f"{where}: replay {name!r}", expected, list(array.shape), "one entry for each row")
    graph = any(getattr(array, "requires_grad", False) for array in (chunk.actions, chunk.log_probs))
    f.expect(not graph, where, "no gradient", "tensors with a graph", "decorate it with torch.no_grad()")
    return valid


def _recorded_scores(case: ModelCase) -> None:
    sampled = case.draw_chunks()
    scores = case.model.chunk_log_probs(case.obs, sampled)
    where = "chunk_log_probs"
    shape = (case.row_count, case.chunk, case.model.tokens_per_action)
    if case.is_array(scores.log_probs, shape, f"{where}: log_probs"):
        what, remedy = "the log_probs recorded at sampling", "same temperature, same mode (no dropout), same precision"
        case.expect_near(scores.log_probs, sampled.log_probs, where, what, remedy)
        case.draw_chunks(seed=1)
        again, gap = case.model.chunk_log_probs(case.obs, sampled).log_probs, 10 * case.atol
        unaffected = bool(torch.allclose(again, scores.log_probs, rtol=0, atol=gap))
        expected, got = "the same log_probs of a chunk after another one was sampled", "others"
        case.f.expect(unaffected, where, expected, got, "keep what scoring needs in Chunk.extras, not in the model")
    has_gradient = scores.log_probs.requires_grad
    case.f.expect(has_gradient, where, "log_probs with gradient", "none", "drop no_grad or detach")
    if case.is_array(scores.entropy, shape, f"{where}: entropy") and not scores.entropy.requires_grad:
        with case.moved_weights(0.3):
            moved = case.model.chunk_log_probs(case.obs, sampled).entropy
        fixed = bool(torch.equal(moved, scores.entropy))  # as that of a Gaussian of fixed deviation
        expected = "an entropy with gradient, as it moves with the weights"
        case.f.expect(fixed, where, expected, "none", "compute it without detach or no_grad")
    if case.values != "none":
        if not case.f.expect(scores.values is not None, where, "values", "None", "score the critic too"):
            return
        if case.is_array(scores.values, _value_shape(case), f"{where}: values"):
            what = "the values recorded at sampling"
            case.expect_near(scores.values, sampled.values, where, what, "same forward pass")
    loss = case.model.imitation_loss(case.obs, sampled.actions)
    case.f.expect(loss.dtype == torch.float32, "imitation_loss", "float32", loss.dtype, "convert it")
    scalar = loss.ndim == 0 and bool(torch.isfinite(loss)) and loss.requires_grad
    case.f.expect(scalar, "imitation_loss", "a finite scalar with gradient", loss, "take the mean over the batch")
    what, remedy = "the same log_probs as before an imitation_loss", "put dropout and mode back"
    case.expect_near(case.draw_chunks().log_probs, sampled.log_probs, "sample_chunk", what, remedy)
    _check_weighable(case, sampled)


def _check_weighable(case: ModelCase, sampled: Chunk) -> None:
    """Findings on what trainers use that weigh samples: a loss for each, and features for critics."""
    with suppress(UserError):  # optional
        terms = case.model.imitation_terms(case.obs, sampled.actions)
        if case.is_array(terms, (case.row_count, case.chunk), "imitation_terms"):
            loss = case.model.imitation_loss(case.obs, sampled.actions)
            what = "losses whose mean is imitation_loss"
            case.expect_near(terms.mean(), loss, "imitation_terms", what, "average over each action's numbers", slack=1)
    losses = case.model.imitation_losses(case.obs, sampled.actions)
    if case.is_array(losses, (case.row_count,), "imitation_losses"):
        fine = losses.requires_grad and losses.dtype == torch.float32
        expected = "float32 with gradient"
        case.f.expect(fine, "imitation_losses", expected, losses.dtype, "average over the chunk of each sample alone")
        rows = np.arange(1)
        alone = case.model.imitation_losses(case.obs.take(rows), pick_rows(sampled.actions, rows))
        shifted = not torch.allclose(alone, losses[:1], rtol=0.5, atol=0.1)
        expected = "about the loss of a sample alone, whatever other rows there are"
        case.f.expect(not shifted, "imitation_losses", expected, float(losses[0].detach()), "do not mix rows")
    model = case.model
    if not isinstance(model, HasFeatures):
        return
    features = model.policy_features(case.obs)
    fine = features.ndim == 2 and len(features) == case.row_count and features.dtype == torch.float32
    got = f"{features.dtype} {list(features.shape)}"
    expected, remedy = f"float32 [{case.row_count}, D]", "flatten what comes before the head"
    if case.f.expect(fine, "policy_features", expected, got, remedy):
        again = model.policy_features(case.obs.take(np.arange(1)))
        apart = torch.allclose(again, features[:1], rtol=1e-3, atol=1e-4)
        expected = "the same features of a row whatever other rows there are"
        case.f.expect(apart, "policy_features", expected, "others", "do not mix rows")
        if isinstance(case.model, Reparameterised):
            _check_reparameterised(case, case.model, features.detach())


def _check_reparameterised(case: ModelCase, model: Reparameterised, features: torch.Tensor) -> None:
    """Findings on the actions of features, which have to be distributed as those of `sample_chunk`."""
    where = "reparameterised_actions"
    shape = (case.row_count, case.chunk, case.env.action_dim)
    normals = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(features.device)
    greedy = case.draw_chunks(greedy=True)
    middle, middle_log_probs = model.reparameterised_actions(features, torch.zeros_like(normals))
    if not case.is_array(middle_log_probs, (*shape[:2], case.model.tokens_per_action), f"{where}: log_probs"):
        return
    expected = "the greedy chunk from noise that is 0"
    case.expect_near(middle, greedy.actions, where, expected, "draw around what is greedy")
    with torch.no_grad():
        scored = case.model.chunk_log_probs(case.obs, greedy).log_probs
    case.expect_near(middle_log_probs, scored, where, "the log_probs of chunk_log_probs", "score the same distribution")
    leaf = features.clone().requires_grad_()
    actions, log_probs = model.reparameterised_actions(leaf, normals)
    case.is_array(actions, shape, f"{where}: actions")
    case.within_bounds(actions.detach(), where)
    moved = bool((actions.detach() != middle.detach()).all())
    case.f.expect(moved, where, "other actions from other noise", "the same", "draw with the noise that is given")
    for name, tensor in (("actions", actions), ("log_probs", log_probs)):
        (gradient,) = torch.autograd.grad(tensor.sum(), leaf, retain_graph=True, allow_unused=True)
        moves = gradient is not None and bool((gradient != 0).any(1).all())
        expected = f"a gradient of {name} in the features of every row"
        case.f.expect(moves, where, expected, "none", "use no detach or no_grad")


def _keyed_noise(case: ModelCase) -> None:
    where = "sample_chunk"
    one = case.draw_chunks(seed=1)
    copied = copy.deepcopy(one.numpy())
    same, other = case.draw_chunks(seed=1), case.draw_chunks(seed=2)
    unchanged = same_data((one.actions, one.log_probs), (copied.actions, copied.log_probs))
    expected, got = "a chunk that stays as it is", "one that the next call wrote into"
    case.f.expect(unchanged, where, expected, got, "return new arrays")
    what = "the same chunk from the same noise"
    remedy = "draw from `noise` only, never from torch or NumPy's own generators"
    case.expect_near(one.actions, same.actions, where, what, remedy)
    moved = not np.array_equal(to_numpy(one.actions), to_numpy(other.actions))
    case.f.expect(moved, where, "another chunk from other noise", "the same", "use `noise` when greedy is False")
    best, again = (case.draw_chunks(greedy=True, seed=seed).actions for seed in (1, 2))
    case.expect_near(best, again, where, "a greedy chunk without chance", "ignore noise: the mode")
    order = list(range(case.row_count))[::-1]
    turned = case.model.sample_chunk(case.obs.take(np.array(order)), case.make_noise(order, seed=1), False)
    what = "a row's chunk wherever it stands in the batch"
    remedy = "row b uses draws of row b alone, and no statistics of the batch"
    case.expect_near(to_numpy(turned.actions)[order], one.actions, where, what, remedy)


def _critic_values(case: ModelCase) -> None:
    model = case.model
    if case.values == "none":
        without = not isinstance(model, HasCritic) or model.critic is None
        case.f.expect(without, "critic", "None", "a module", "leave it out where ModelContext.values is none")
        return
    if not isinstance(model, HasCritic):
        got = f"{model.__class__.__name__}, which does not inherit it"
        case.f.expect(False, "values", f"vla_rl.HasCritic with values={case.values!r}", got, "inherit it, or use none")
        return
    values = model.values(case.obs)
    if case.is_array(values, _value_shape(case), "values"):
        of_chunk, remedy = case.draw_chunks().values, "read the same hidden state"
        case.expect_near(values, of_chunk, "values", "the values of sample_chunk", remedy)
        case.f.expect(not values.requires_grad, "values", "no gradient", "a graph", "decorate it with torch.no_grad()")
    part = "the part of `module` that values come from"
    remedy = "the learner gives it a separate learning rate"
    if case.f.expect(model.critic is not None, "critic", part, "None", remedy):
        case.f.expect(bool(case.of_critic), "critic", part, "one without parameters of `module`", remedy)


def _token_round_trip(case: ModelCase) -> None:
    model, actions = case.model, case.draw_chunks().actions
    if not isinstance(model, ActionTokens):
        return
    tokens = model.encode_actions(actions)
    check_array(case.f, tokens, (case.row_count, case.chunk, case.model.tokens_per_action), "int64", "encode_actions")
    decoded = model.decode_actions(tokens)
    what = "sampled actions back from their tokens"
    case.expect_near(decoded, actions, "decode_actions", what, "invert encode_actions")
    again = torch.equal(model.encode_actions(decoded), tokens)
    case.f.expect(again, "encode_actions", "the tokens of decoded tokens", "others", "round to the nearest bin")


def _compiled_layers(case: ModelCase) -> None:
    """Check that a model that can be compiled names layers that it has."""
    model = case.model
    if isinstance(model, Compilable):
        names = ", ".join(layer.__name__ for layer in model.blocks) or "none"
        layers = find_blocks(case.model.module, model.blocks)
        holds, expected = bool(model.blocks and layers), "classes of layers of `module`"
        case.f.expect(holds, "blocks", expected, names, "name the repeated layers")


def _trained_gradients(case: ModelCase) -> None:
    """Check that everything a learner minimises has a gradient in all trained parameters and in no other."""
    module, f = case.model.module, case.f
    trained = case.trained_parameters
    if not f.expect(bool(trained), "module", "parameters with requires_grad", "none", "unfreeze some, or add LoRA"):
        return
    with case.moved_weights(0.02):
        module.zero_grad(set_to_none=True)
        sampled = case.draw_chunks()
        scores = case.model.chunk_log_probs(case.obs, sampled)
        draws = torch.Generator().manual_seed(0)
        weights = torch.rand(scores.log_probs.shape, generator=draws).to(scores.log_probs.device)
        total = (scores.log_probs * weights).sum() + (scores.entropy * weights).sum()
        total = total + case.model.imitation_loss(case.obs, sampled.actions)
        if scores.values is not None:
            total = total + (scores.values**2).sum()
        total.backward()
        missed = [name for name, p in trained.items() if p.grad is None or not bool((p.grad != 0).any())]
        remedy = "connect them, or set requires_grad_(False)"
        if any(MARK in name for name in missed):
            remedy += "; leave layers without adapters whose adapters the network goes around: a merge would add them"
        f.expect(not missed, "gradient", "one in every trained parameter", f"none in {_name_some(missed)}", remedy)
        reached = [name for name, p in module.named_parameters() if not p.requires_grad and p.grad is not None]
        got = f"one in {_name_some(reached)}"
        f.expect(not reached, "gradient", "none in frozen parameters", got, "freeze before building")
        broken = [name for name, p in trained.items() if p.grad is not None and not bool(torch.isfinite(p.grad).all())]
        f.expect(not broken, "gradient", "finite numbers", f"NaN or inf in {_name_some(broken)}", "find the cause")
        _check_reach(case, "log_probs", critic=False)
        if case.values != "none":
            _check_reach(case, "values", critic=True)


def _check_reach(case: ModelCase, part: str, critic: bool) -> None:
    """A loss on one part of the scores reaches the policy, or the value head."""
    scores = case.model.chunk_log_probs(case.obs, case.draw_chunks())
    gradients = zip(case.trained_parameters, case.compute_gradient(getattr(scores, part).square().sum()), strict=True)
    reached = any(bool((g != 0).any()) for name, g in gradients if (name in case.of_critic) == critic)
    whom = "the critic" if critic else "the policy's parameters"
    case.f.expect(reached, "gradient", f"one of {part} in {whom}", "none", "connect them")


def _check_publishing(case: ModelCase) -> None:
    model, f = case.model, case.f
    before = case.draw_chunks()
    pairs = [(name, tensor.clone()) for name, tensor in model.weights()]
    names = [name for name, _ in pairs]
    trained = {name for name, p in model.module.named_parameters() if p.requires_grad}
    f.expect(len(set(names)) == len(names), "weights", "each name once", "some twice", "list each parameter once")
    missing = sorted(trained - set(names)) if len(names) < len(trained) else []
    f.expect(not missing, "weights", "every trained parameter", f"no {_name_some(missing)}", "policies would miss it")
    draws = torch.Generator().manual_seed(0)
    noise = [(0.1 * torch.randn(tensor.shape, generator=draws)).to(tensor) for _, tensor in pairs]
    sent = [(name, tensor + more) for (name, tensor), more in zip(pairs, noise, strict=True)]
    expected_weights = [(name, tensor.clone()) for name, tensor in sent]
    parameters, flags = dict(model.module.named_parameters()), [p.requires_grad for p in model.module.parameters()]
    model.load_weights(pair for pair in sent)  # an iterable, which can be gone through once
    _expect_weights(f, model, expected_weights, "load_weights", "the weights that were loaded")
    now = dict(model.module.named_parameters())
    renewed = [name for name, p in parameters.items() if now.get(name) is not p]
    expected, remedy = "the same parameters, with other numbers", "an optimiser holds the old ones: use p.copy_(tensor)"
    f.expect(not renewed, "load_weights", expected, f"new ones for {_name_some(renewed)}", remedy)
    same = flags == [p.requires_grad for p in model.module.parameters()]
    f.expect(same, "load_weights", "`requires_grad` that stays as it is", "a change", "copy under torch.no_grad()")
    for _, tensor in sent:
        tensor.zero_()
    expected = "unchanged numbers after the sender wrote into the loaded tensors"
    _expect_weights(f, model, expected_weights, "load_weights", expected)
    moved = case.model.chunk_log_probs(case.obs, before).log_probs
    changed = not torch.allclose(torch.as_tensor(before.log_probs).to(moved), moved)
    f.expect(changed, "load_weights", "other log_probs from other weights", "the same ones", "copy into the module")
    model.load_weights([(name, to_numpy(tensor.float())) for name, tensor in pairs])  # as learners publish
    _expect_weights(f, model, pairs, "load_weights", "the old weights, loaded as NumPy arrays")
    what, remedy = "the old log_probs from the old weights", "take NumPy arrays as well as tensors"
    case.expect_near(case.draw_chunks().log_probs, before.log_probs, "load_weights", what, remedy)
    try:
        model.load_weights([("no such parameter", torch.zeros(1))])
    except KeyError:
        return
    f.expect(False, "load_weights", "KeyError for a name that is not there", "nothing", "a silent loss of weights")


def _expect_weights(
    f: Findings, model: VLAModel, pairs: list[tuple[str, torch.Tensor]], where: str, expected: str
) -> None:
    now = dict(model.weights())
    changed = [name for name, tensor in pairs if name not in now or not torch.equal(now[name], tensor.to(now[name]))]
    got = f"others in {_name_some(changed)}"
    f.expect(not changed, where, f"{expected} in weights()", got, "copy every pair into the module")


def _check_saving(
    case: ModelCase,
    plugin: ModelPlugin | None,
    config: Any,
    context: ModelContext,
    reload: Callable[[Path], Any] | None,
) -> None:
    """Check saving and loading, with moved weights and another seed: equal initial weights would hide lost ones."""
    with tempfile.TemporaryDirectory() as folder, case.moved_weights(0.02):
        target = Path(folder) / "model"
        target.mkdir()
        case.model.save(target)
        files = [path for path in target.rglob("*") if path.is_file()]
        case.f.expect(bool(files), "save", "files in the folder", "none", "write weights and statistics")
        check_tokenizer(case, target)
        if not files or plugin is None:
            return
        if reload is None:
            if "checkpoint" not in {a.name for a in attrs.fields(plugin.config)}:
                return
            reload = lambda path: attrs.evolve(config, checkpoint=str(path))  # noqa: E731
        loaded: VLAModel = plugin.build(reload(target), other_seed(context))
        remedy = "save everything that `checkpoint:` reads"
        again, best = loaded.sample_chunk(case.obs, case.make_noise(), True), case.draw_chunks(greedy=True)
        what = "the same greedy actions once loaded"
        case.expect_near(again.actions, best.actions, "save", what, remedy, KERNELS)
        sampled = case.draw_chunks().numpy()
        with torch.no_grad():
            scores, original_scores = (m.chunk_log_probs(case.obs, sampled) for m in (loaded, case.model))
        for name in ("log_probs", "values"):
            one, other, what = getattr(scores, name), getattr(original_scores, name), f"the same {name} once loaded"
            if one is not None and other is not None:
                case.expect_near(one, other, "save", what, remedy, KERNELS)


def _name_some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")

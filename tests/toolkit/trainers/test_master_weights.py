"""float32 masters: what they make of gradients, steps and weights that are narrower."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vla_rl.core.hookspecs import VLAModel
from vla_rl.core.spec.sections import TrainSpec
from vla_rl.testing import synthetic
from vla_rl.testing.linear import LinearModel
from vla_rl.toolkit.trainers.master_weights import MasterWeights
from vla_rl.toolkit.trainers.trained_model import TrainedModel

INFO = synthetic.env_info(cameras=1, pixels=8, state_dim=4, action_dim=2)
LR = 2e-5


def narrow_model(dtype: torch.dtype = torch.bfloat16) -> LinearModel:
    """Weights of about 0.3, of which one step at LR is a sixtieth of the distance between bfloat16 numbers."""
    model = LinearModel(INFO, 2, bins=4, values="chunk")
    draws = torch.Generator().manual_seed(0)
    for parameter in model.module.parameters():
        parameter.data = (0.25 + 0.1 * torch.rand(parameter.shape, generator=draws)).to(dtype)
    return model


def trained_model(model: VLAModel) -> TrainedModel:
    train = TrainSpec(steps=1, lr=LR, micro_batch=1, max_grad_norm=None)
    return TrainedModel(model, train, name="linear", device="cpu", info=INFO, acting=True)


def step(trained: TrainedModel, gradient: float = 1.0, parts: int = 1) -> None:
    trained.optimizer.zero_grad(set_to_none=True)
    for _ in range(parts):
        torch.stack([(gradient * p).sum().float() for p in trained.model.module.parameters()]).sum().backward()
    trained.optimizer_step("test", torch.zeros(()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_steps_that_the_weights_cannot_hold_add_up(dtype: torch.dtype) -> None:
    """With a constant gradient each AdamW step is one learning rate, so that 200 steps move every weight by 0.004. In
    bfloat16 alone none would move."""
    model = narrow_model(dtype)
    trained = trained_model(model)
    before = {name: p.detach().clone() for name, p in model.module.named_parameters()}
    for _ in range(200):
        step(trained)
    for name, weight in model.module.named_parameters():
        master = trained.parameters[name]
        assert master.dtype == torch.float32 and weight.dtype == dtype
        assert torch.allclose(before[name].float() - master, torch.tensor(200 * LR), rtol=1e-2)
        assert torch.equal(weight, master.to(dtype)), "rounded once"
        assert not torch.equal(weight, before[name])
        state = trained.optimizer.state[master]
        assert {state["exp_avg"].dtype, state["exp_avg_sq"].dtype} == {torch.float32}
        assert state["exp_avg_sq"].mean() == pytest.approx(1 - 0.999**200, rel=1e-3)


def test_gradients_of_micro_batches_are_summed_in_float32() -> None:
    """1 + 512 / 512 is 2, and in bfloat16 it is 1."""
    model = narrow_model()
    trained = trained_model(model)
    step(trained, 1.0)
    trained.optimizer.zero_grad(set_to_none=True)
    parts = [1.0, *[2**-9] * 512]
    for part in parts:
        torch.stack([(part * p).sum().float() for p in model.module.parameters()]).sum().backward()
    for name, weight in model.module.named_parameters():
        gradient = trained.parameters[name].grad
        assert weight.grad is None, "no second gradient is kept"
        assert gradient is not None and torch.equal(gradient, torch.full_like(gradient, 2.0))


def test_float32_weights_are_trained_themselves() -> None:
    model = narrow_model(torch.float32)
    trained = trained_model(model)
    assert not trained.master_weights.masters
    assert all(trained.parameters[name] is p for name, p in model.module.named_parameters())


def test_frozen_weights_have_no_master_and_keep_their_type() -> None:
    model = narrow_model()
    model.module.policy.bias.requires_grad_(False)
    trained = trained_model(model)
    assert "policy.bias" not in trained.parameters and "policy.weight" in trained.parameters
    before = model.module.policy.bias.detach().clone()
    step(trained)
    assert torch.equal(model.module.policy.bias, before) and before.dtype == torch.bfloat16


def test_a_step_that_is_not_finite_leaves_weights_and_masters() -> None:
    model = narrow_model()
    trained = trained_model(model)
    step(trained)
    before = {name: p.detach().clone() for name, p in trained.parameters.items()}
    weights = {name: p.detach().clone() for name, p in model.module.named_parameters()}
    step(trained, float("nan"))
    assert all(torch.equal(trained.parameters[name], tensor) for name, tensor in before.items())
    assert all(torch.equal(p, weights[name]) for name, p in model.module.named_parameters())


def test_other_weights_act_for_a_while_without_a_trace_in_training() -> None:
    """A policy in the learner's process that acts with an older version puts the newest back afterwards."""
    model = narrow_model()
    trained = trained_model(model)
    newest = [(name, p.clone()) for name, p in model.weights()]
    masters = {name: p.detach().clone() for name, p in trained.parameters.items()}
    model.load_weights([(name, tensor + 0.5) for name, tensor in newest])
    model.load_weights(newest)
    assert all(torch.equal(trained.parameters[name], tensor) for name, tensor in masters.items())


def test_wide_weights_need_no_master() -> None:
    weights = {"wide": nn.Parameter(torch.ones(2)), "double": nn.Parameter(torch.ones(2, dtype=torch.float64))}
    assert not MasterWeights(weights).masters


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_on_a_gpu_equals_the_cpus() -> None:
    """Two micro-batches of a tiny OpenVLA-OFT in bfloat16, forward, backward and AdamW, on both devices."""
    from vla_rl.core.contexts import ModelContext
    from vla_rl.plugins.models.openvla import openvla_oft
    from vla_rl.plugins.models.openvla.config import OpenVLAOFTConfig

    info = synthetic.env_info(cameras=1, pixels=64)
    stepped = {}
    for device in ("cpu", "cuda"):
        context = ModelContext(env=info, chunk=2, device=device, values="chunk")
        model = openvla_oft.build(OpenVLAOFTConfig(preset="fast", dtype="bfloat16"), context)
        train = TrainSpec(steps=1, lr=1e-3, micro_batch=4)
        trained = TrainedModel(model, train, name="tiny", device=device, info=info, acting=True)
        before = {name: p.detach().cpu().clone() for name, p in trained.parameters.items()}
        assert {p.dtype for p in trained.parameters.values()} == {torch.float32}
        actions = torch.linspace(-0.9, 0.9, 4 * 2 * info.action_dim).view(4, 2, info.action_dim)
        for seed in (0, 1):
            model.imitation_loss(synthetic.observation(info, 4, seed=seed), actions.numpy()).backward()
        trained.optimizer_step("test", torch.zeros((), device=device))
        trained.check_finite()
        for name, weight in model.module.named_parameters():
            assert not weight.requires_grad or torch.equal(weight, trained.parameters[name].to(weight.dtype))
        moments = {name: trained.optimizer.state[p].get("exp_avg") for name, p in trained.parameters.items()}
        assert all(moment is None or moment.dtype == torch.float32 for moment in moments.values())
        gradient = torch.cat([m.cpu().flatten() for m in moments.values() if m is not None])
        stepping = [name for name, moment in moments.items() if moment is not None]
        moved = [trained.parameters[name].detach().cpu() - before[name] for name in stepping]
        stepped[device] = gradient, torch.cat([difference.flatten() for difference in moved])
    (cpu_gradient, cpu_moved), (gpu_gradient, gpu_moved) = stepped["cpu"], stepped["cuda"]
    similarity = torch.nn.functional.cosine_similarity(cpu_gradient, gpu_gradient, dim=0)
    assert float(similarity) > 0.99, "gradients differ by bfloat16's rounding alone"
    assert gpu_gradient.norm() == pytest.approx(float(cpu_gradient.norm()), rel=0.02)
    assert float(cpu_moved.abs().max()) <= 1.01e-3 and float(gpu_moved.abs().max()) <= 1.01e-3
    large = cpu_gradient.abs() > cpu_gradient.abs().mean()  # AdamW's first step has the sign of the gradient alone
    assert float((cpu_moved[large].sign() == gpu_moved[large].sign()).float().mean()) > 0.99

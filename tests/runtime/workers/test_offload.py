"""Roles that leave their device between phases come back exactly as they were."""

from __future__ import annotations

import copy
import weakref
from pathlib import Path

import pytest
import torch
from scripted_runs import read_metrics, scripted_spec

from updates import policy_gradient
from vla_rl.core.errors import PluginError
from vla_rl.core.plan import Plan, Slot
from vla_rl.core.spec.spec import load_spec, parse_spec
from vla_rl.plugins.trainers.policy_gradient.impl import PolicyGradient
from vla_rl.runtime.placement.assignments import assign_workers
from vla_rl.runtime.placement.components import build_algorithm
from vla_rl.runtime.start import run
from vla_rl.runtime.workers.env.env_worker import EnvWorker
from vla_rl.runtime.workers.learner.learner import Learner
from vla_rl.runtime.workers.learner.trainers import Trainers
from vla_rl.runtime.workers.offload import Offload
from vla_rl.testing.linear import LinearModel
from vla_rl.testing.scripted import ScriptedEnv
from vla_rl.toolkit.no_settings import NoSettings
from vla_rl.toolkit.trainers.context import TrainerContext

TABLETOP = Path(__file__).parents[3] / "examples" / "tabletop_ppo.yaml"
OFFLOAD = {"sim": True, "learner": True}


def without_offload(lines):
    """Metrics, and whether any of them says that memory was freed."""
    freed = [line.pop("offload/freed_mib", 0.0) for line in lines]
    return lines, any(mib > 0 for mib in freed)


@pytest.mark.parametrize(
    "changes",
    [
        {"eval": {"every": 2}, "bc_warmup": {"episodes": 8, "epochs": 1, "lr": 1e-2}},
        {
            "algorithm": {"type": "ppo"},
            "rollout": {"episodes": None, "auto_reset": {"steps": 6}, "group_size": 1},
            "train": {"steps": 2, "checkpoint_every": 1},
        },
    ],
    ids=["groups", "auto-reset"],
)
def test_a_run_with_offload_equals_one_without(train, changes):
    _, expected = train("plain", **changes)
    _, got = train("offload", placement={"type": "collocated", "offload": OFFLOAD}, **changes)
    got, freed = without_offload(got)
    assert got == expected and freed


def test_the_tabletop_is_rebuilt_and_continues(tmp_path):
    shorter = [
        "env.num_envs=4",
        "train.steps=2",
        "eval.before=false",
        "eval.episodes_per_task=1",
        "rollout.auto_reset.steps=8",
    ]
    changes = {"plain": [], "offload": ["placement={type: collocated, offload: {sim: true, learner: true}}"]}
    for name, change in changes.items():
        spec = load_spec(TABLETOP, ["runtime.backend=local", "placement={type: collocated}", *shorter, *change])
        run(spec, tmp_path / name, False)
    got, freed = without_offload(read_metrics(tmp_path / "offload"))
    assert got == read_metrics(tmp_path / "plain") and freed


@pytest.mark.ray
def test_policies_and_learners_apart_leave_with_their_weights(train):
    _, expected = train("plain")
    apart = {"type": "disaggregated", "offload": {**OFFLOAD, "policy": True}}
    _, got = train("offload", runtime={"backend": "ray"}, placement=apart)
    got, freed = without_offload(got)
    assert got == expected and freed


def roles_of(spec, assignment):
    """A simulator's and a learner's, as a worker makes them."""
    env = ScriptedEnv(8)
    sim = EnvWorker(
        spec,
        {0: env},
        assignment.lanes,
        bootstrap="none",
        framed=False,
        camera=None,
        local=True,
        heartbeat=lambda: None,
    )
    model, algorithm = LinearModel(env.info, 2), build_algorithm(spec)
    return sim, Learner(
        model,
        policy_gradient(algorithm),
        spec.train,
        name="linear",
        device="cpu",
        world=1,
        info=env.info,
        acting=True,
        heartbeat=lambda: None,
    )


def test_what_leaves_is_really_gone():
    spec = parse_spec(scripted_spec())
    plan = Plan(slots=(Slot(roles=("sim", "policy", "learner")),), offload=frozenset({"sim", "learner"}))
    (assignment,) = assign_workers(plan, 8, one_process=True)
    sim, learner = roles_of(spec, assignment)
    offload = Offload({"sim": sim, "learner": learner}, assignment, lambda lane: ScriptedEnv(8))
    optimizer = learner.trained.optimizer
    for parameter in learner.trained.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    moments = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    values, places = [value.clone() for value in moments], [value.data_ptr() for value in moments]
    env = weakref.ref(sim.envs[0])

    assert offload.offload_for("act") == sum(value.nbytes for value in moments)  # learners leave
    there = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    assert all(value.data_ptr() not in places for value in there)
    assert all(p.grad is None for p in learner.trained.parameters.values())
    offload.offload_for("learn")  # simulators leave
    assert sim.envs == {} and env() is None

    offload.reload_for("act")
    offload.reload_for("learn")
    again = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    assert all(torch.equal(a, b) for a, b in zip(again, values, strict=True))
    assert list(sim.envs) == [0] and offload.away == set()


def test_a_simulator_that_cannot_be_offloaded_is_named(train, tmp_path):
    (tmp_path / "firm.py").write_text(
        "import dataclasses\n"
        "from vla_rl.core.hookspecs import SimEnv\n"
        "from vla_rl.testing.scripted import ScriptedEnv, vla_rl_plugins as doubles\n"
        "class Firm(SimEnv):\n"
        "    def __init__(self, env): self.env, self.num_envs, self.info = env, env.num_envs, env.info\n"
        "    def reset_states(self, split): return self.env.reset_states(split)\n"
        "    def reset(self, env_ids, state_ids, seed): return self.env.reset(env_ids, state_ids, seed)\n"
        "    def chunk_step(self, actions, active, stop_at_end): return self.env.chunk_step(actions, active, stop_at_end)\n"
        "def build(config, context):\n"
        "    return Firm(ScriptedEnv(context.num_envs, chunk=context.chunk))\n"
        "vla_rl_plugins = {'env': {'firm': dataclasses.replace(doubles['env']['scripted'], build=build)}}\n"
    )
    plugins = ["vla_rl.testing.scripted", str(tmp_path / "firm.py")]
    with pytest.raises(
        PluginError, match="env 'firm' cannot be offloaded: it does not inherit vla_rl.Offloadable; leave out"
    ):
        train(plugins=plugins, env={"type": "firm"}, placement={"type": "collocated", "offload": OFFLOAD})


def test_networks_of_a_trainer_leave_too():
    class WithHead(PolicyGradient):
        def __init__(self, training):
            super().__init__(NoSettings(), training)
            self.head = torch.nn.Linear(3, 1)
            self.target = copy.deepcopy(self.head)
            self.adam = torch.optim.Adam(self.head.parameters())
            self.head(torch.ones(1, 3)).sum().backward()
            self.adam.step()

        def modules(self):
            return {**super().modules(), "head": self.head}

        def targets(self):
            return {"head": self.target}

        def optimizers(self):
            return {**super().optimizers(), "head": self.adam}

    spec = parse_spec(scripted_spec())
    plan = Plan(slots=(Slot(roles=("sim", "policy", "learner")),), offload=frozenset({"sim", "learner"}))
    (assignment,) = assign_workers(plan, 8, one_process=True)
    sim, learner = roles_of(spec, assignment)
    trained = learner.trained
    trainer = WithHead(TrainerContext(trained=trained, algorithm=build_algorithm(spec), heartbeat=lambda: None))
    learner.trainers = Trainers(collected=trainer, demonstrations=learner.trainers.demonstrations)
    offload = Offload({"sim": sim, "learner": learner}, assignment, lambda lane: ScriptedEnv(8))
    moments = [value for state in trainer.adam.state.values() for value in state.values() if value.dim()]
    tensors = [*trainer.head.parameters(), *trainer.target.parameters(), *moments]
    values = [tensor.detach().clone() for tensor in tensors]
    before = [tensor.data_ptr() for tensor in tensors]
    offload.offload_for("act")
    offload.reload_for("learn")
    moments = [value for state in trainer.adam.state.values() for value in state.values() if value.dim()]
    tensors = [*trainer.head.parameters(), *trainer.target.parameters(), *moments]
    assert all(torch.equal(tensor, value) for tensor, value in zip(tensors, values, strict=True))
    assert all(tensor.data_ptr() != place for tensor, place in zip(tensors, before, strict=True))

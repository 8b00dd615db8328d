"""`vla-rl sft` on the test doubles: it clones, reports, stops and continues, whatever the micro-batches."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from scripted_runs import read_metrics, scripted_spec

from vla_rl.core.errors import SpecError, UserError
from vla_rl.core.interrupts import RunStopped
from vla_rl.core.spec.spec import parse_spec
from vla_rl.runtime.driver.training.behaviour_cloning import Epochs, ImitationTrainer, Mixture
from vla_rl.runtime.start import clone
from vla_rl.testing.linear import LinearModel

EXPERT = {"expert": {"episodes": 16}, "steps": 60, "lr": 3e-2, "batch": 16, "report_every": 20}


def start(folder, resume=False, imitation=EXPERT, **changes):
    """-> (results, metrics without times)."""
    results = clone(parse_spec(scripted_spec(imitation=imitation, **changes)), folder, resume)
    return results, read_metrics(folder)


def weights(folder):
    return torch.load(folder / "checkpoints" / "last" / "trainer" / "learner.pt", weights_only=True)["weights"]


def test_it_clones_the_expert(tmp_path):
    results, metrics = start(tmp_path, imitation=EXPERT | {"eval_every": 30})
    assert results["mode"] == "imitation" and results["steps"] == 60
    assert results["success_before"]["rate"] <= 0.7 and results["success"]["rate"] >= 0.95
    lines = [m for m in metrics if "loss/imitation" in m]
    assert [m["step"] for m in lines] == [20, 30, 40, 60]
    assert lines[-1]["loss/imitation"] < lines[0]["loss/imitation"] / 2
    assert lines[0]["imitation/samples"] >= 16 and lines[0]["imitation/expert_success"] == 1.0
    assert [m["step"] for m in metrics if "eval/success_rate" in m] == [0, 30, 60]
    assert (tmp_path / "checkpoints" / "last" / "model").is_dir()


def test_a_resumed_run_equals_one_that_went_through(tmp_path):
    whole, _ = start(tmp_path / "whole")
    start(tmp_path / "parts", imitation=EXPERT | {"steps": 40})
    resumed, metrics = start(tmp_path / "parts", resume=True)
    assert resumed["success"] == whole["success"]
    assert [m["step"] for m in metrics if "loss/imitation" in m] == [20, 40, 60]
    for name, tensor in weights(tmp_path / "whole").items():
        assert torch.equal(tensor, weights(tmp_path / "parts")[name])


def test_micro_batches_and_schedule(tmp_path):
    one, few = (start(tmp_path / str(size), train={"micro_batch": size})[1] for size in (16, 3))
    losses = [[m["loss/imitation"] for m in metrics if "loss/imitation" in m] for metrics in (one, few)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    _, metrics = start(tmp_path / "linear", imitation=EXPERT | {"lr_schedule": "linear", "lr_warmup_steps": 39})
    rates = [m["imitation/lr"] for m in metrics if "imitation/lr" in m]
    assert rates == pytest.approx([3e-2 * 20 / 40, 3e-2 * (0.05 + 0.95 * 20 / 21), 3e-2 * 0.05])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_where_it_stopped(tmp_path, monkeypatch, number):
    train = ImitationTrainer.train

    def interrupted(self, first, last, rate, progress):
        def stop(step):
            progress(step)
            if step == 31:
                os.kill(os.getpid(), number)

        return train(self, first, last, rate, stop)

    monkeypatch.setattr(ImitationTrainer, "train", interrupted)
    with pytest.raises(RunStopped, match="stopped after step 40"):
        start(tmp_path / "stopped", imitation=EXPERT | {"report_every": 60})
    monkeypatch.undo()
    state = json.loads((tmp_path / "stopped" / "checkpoints" / "last" / "trainer" / "state.json").read_text())
    assert state["step"] == 40
    start(tmp_path / "stopped", resume=True)
    start(tmp_path / "whole")
    for name, tensor in weights(tmp_path / "whole").items():
        assert torch.equal(tensor, weights(tmp_path / "stopped")[name])


@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=pytest.mark.ray)])
def test_recorded_demonstrations(tmp_path, backend):
    recorded = Path(__file__).with_name("expert_data.py")
    results, metrics = start(
        tmp_path,
        imitation={"data": {"type": "recorded"}, "steps": 60, "lr": 3e-2, "batch": 16, "report_every": 60},
        plugins=["vla_rl.testing.scripted", "vla_rl.testing.slot_placement", str(recorded)],
        runtime={"backend": backend},
        placement={"type": "slots", "learner": 2 if backend == "ray" else 1},
    )
    assert results["success"]["rate"] >= 0.95
    assert [m["imitation/samples"] for m in metrics if "loss/imitation" in m] == [32]
    assert metrics[1]["imitation/epochs"] == 30


def test_ranks_share_every_epoch_out():
    samples = [np.arange(0, 11, 2), np.arange(1, 11, 2)]
    imitation = ImitationTrainer(None, [Epochs(0, "imitation", rank, samples[rank], 3, 2) for rank in (0, 1)], {})
    steps = [imitation.split_step(step, 0.1) for step in range(1, 2 * imitation.steps_per_epoch + 1)]
    for epoch in (steps[: imitation.steps_per_epoch], steps[imitation.steps_per_epoch :]):
        assert sorted(int(i) for shares in epoch for share in shares for i in share.indices) == list(range(11))
    assert all(shares[0].total == sum(len(s.indices) for s in shares) <= 6 for shares in steps)
    assert [imitation.batch_size(step) for step in range(1, 2 * imitation.steps_per_epoch + 1)] == [6, 5, 6, 5]
    assert not np.array_equal(steps[0][0].indices, steps[imitation.steps_per_epoch][0].indices)


def test_what_a_spec_has_to_say(tmp_path):
    with pytest.raises(UserError, match=r"no `imitation:` section.*\n.*imitation: \{expert"):
        clone(parse_spec(scripted_spec()), tmp_path, False)
    both = {"data": {"type": "lerobot", "folder": "x"}, "expert": {"episodes": 1}}
    for wrong, message in (
        ({"steps": 1, "lr": 1.0}, "imitation.data: give exactly one of `expert`"),
        ({"steps": 1, "lr": 1.0, **both}, "imitation.data: give exactly one of `expert`"),
        ({**EXPERT, "statistics": "data"}, "imitation.statistics: data: needs `data`"),
        ({"steps": 1, "lr": 1.0, "data": {"type": "lerobto"}}, "did you mean 'lerobot'"),
        (
            {"steps": 1, "lr": 1.0, "data": {"type": "lerobot", "foldre": "x"}},
            "foldre: unknown key; did you mean 'folder'",
        ),
    ):
        with pytest.raises(SpecError, match=message):
            parse_spec(scripted_spec(imitation=wrong))
    spec = parse_spec(scripted_spec(imitation={"steps": 1, "lr": 1.0, "data": {"type": "lerobot", "folder": "x"}}))
    assert parse_spec(spec.to_dict()) == spec and spec.to_dict()["imitation"]["data"]["folder"] == "x"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("actions[..., :1]", r"the actions of a sample are \(1, 2, 1\), and \(1, 2, \d\) is wanted"),
        ("actions[:, :1]", r"the actions of a sample are \(1, 1, \d\), and \(1, 2, \d\) is wanted"),
        ("dict(state=None)", r"the states of a sample are None, and \(1, \d\) is wanted"),
        ("dict(images={'other': obs.images['main']})", r"the cameras of a sample are \['other'\], and"),
        ("57 * actions", r"sample \d, actions: expected number \d within -1 and 1, the simulator's bounds, got"),
        ("dict(state=obs.state * np.float32([[1], [1], [np.nan], [1]]))", "sample 2, states: expected finite states"),
    ],
)
def test_data_of_other_shapes_is_refused_before_there_is_a_model(tmp_path, change, message):
    (tmp_path / "odd.py").write_text(
        "import attrs\n"
        "import numpy as np\n"
        "from expert_data import RecordedConfig, build as right\n"
        "from vla_rl.toolkit.data.samples import InMemoryDataset\n"
        "from vla_rl.core.declarations import DataPlugin\n"
        "def build(config, context):\n"
        "    obs, actions = right(config, context).read_samples(range(4))\n"
        f"    changed = {change}\n"
        "    return InMemoryDataset([(attrs.evolve(obs, **changed), actions) if isinstance(changed, dict) else (obs, changed)])\n"
        "vla_rl_plugins = {'data': {'odd': DataPlugin(config=RecordedConfig, build=build, summary='for tests')}}\n"
    )
    with pytest.raises(UserError, match=rf"data 'odd' does not go with env 'scripted': {message}"):
        start(
            tmp_path / "run",
            imitation={"data": {"type": "odd"}, "steps": 1, "lr": 3e-2},
            plugins=["vla_rl.testing.scripted", str(tmp_path / "odd.py")],
        )


def counts_of_sets(order, sizes, steps):
    """Samples of each data set in the first steps of an order. `sizes`: samples of each data set."""
    indices = np.concatenate([order.batch_indices(step) for step in range(1, steps + 1)])
    return np.bincount(np.searchsorted(np.cumsum(sizes), indices, side="right"), minlength=len(sizes)), indices


@pytest.mark.parametrize("weights", [(0.7, 0.3), (0.7, 0.2901, 0.0099)])
def test_data_sets_are_mixed_by_their_weights(weights):
    sizes = (50, 700, 3)[: len(weights)]
    samples = [np.arange(end - size, end) for size, end in zip(sizes, np.cumsum(sizes), strict=True)]
    order = Mixture(0, "imitation", 0, samples, weights, 16)
    for steps in (5, 100, 2000):
        counts, _ = counts_of_sets(order, sizes, steps)
        assert counts.sum() == steps * 16 and abs(counts - np.array(weights) * steps * 16).max() < 3
    _, indices = counts_of_sets(order, sizes, 2000)
    first_set = indices[indices < 50]
    for epoch in range(3):
        assert sorted(first_set[epoch * 50 : (epoch + 1) * 50]) == list(range(50))
    assert not np.array_equal(first_set[:50], first_set[50:100])
    assert np.array_equal(
        Mixture(0, "imitation", 0, samples, weights, 16).batch_indices(1234), order.batch_indices(1234)
    )
    assert order.steps_per_epoch == round(50 / (16 * 0.7))


def test_two_data_sets_train_together(tmp_path, monkeypatch, caplog):
    """One has images of another size, which are resized to those of the first; a resumed run equals a whole one."""
    (tmp_path / "larger.py").write_text(
        "import attrs\n"
        "import numpy as np\n"
        "from expert_data import RecordedConfig, build as right\n"
        "from vla_rl.core.declarations import DataPlugin\n"
        "from vla_rl.toolkit.data.samples import InMemoryDataset\n"
        "def build(config, context):\n"
        "    obs, actions = right(config, context).read_samples(range(config.num_envs))\n"
        "    images = {name: np.kron(image, np.ones((1, 2, 2, 1), np.uint8)) for name, image in obs.images.items()}\n"
        "    return InMemoryDataset([(attrs.evolve(obs, images=images), actions)])\n"
        "vla_rl_plugins = {'data': {'larger': DataPlugin(config=RecordedConfig, build=build, summary='for tests')}}\n"
    )
    seen = []
    loss = LinearModel.imitation_loss

    def watched(self, obs, actions):
        seen.append(hash(obs.images["main"].tobytes()))
        return loss(self, obs, actions)

    monkeypatch.setattr(LinearModel, "imitation_loss", watched)
    further = [{"type": "larger", "num_envs": 8, "weight": 0.25}]
    keys = {"data": {"type": "recorded"}, "co_training": further, "augment": {"random_brightness": 0.2}}
    settings = {"lr": 3e-2, "batch": 16, "report_every": 20, **keys}
    plugins = ["vla_rl.testing.scripted", str(Path(__file__).with_name("expert_data.py")), str(tmp_path / "larger.py")]
    results, metrics = start(tmp_path / "whole", imitation={**settings, "steps": 60}, plugins=plugins)
    whole = list(seen)
    assert results["success"]["rate"] >= 0.95 and metrics[1]["imitation/samples"] == 40
    assert metrics[1]["imitation/epochs"] == pytest.approx(20 * 12 / 32, rel=0.2)
    assert "imitation.co_training.0 (larger): images of main are" in caplog.text
    seen.clear()
    start(tmp_path / "parts", imitation={**settings, "steps": 40}, plugins=plugins)
    start(tmp_path / "parts", resume=True, imitation={**settings, "steps": 60}, plugins=plugins)
    assert seen == whole and len(set(seen)) == len(seen)
    for name, tensor in weights(tmp_path / "whole").items():
        assert torch.equal(tensor, weights(tmp_path / "parts")[name])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"co_training": [{"type": "recorded", "weight": 1.0}]}, r"co_training.0.weight: .*1"),
        ({"co_training": [{"type": "recorded"}]}, r"co_training.0.weight: required, but missing"),
        ({"co_training": [{"type": "recorded", "weight": 0.00003}]}, "is not a multiple of 0.0001"),
        ({"co_training": [{"type": "recorded", "weight": 0.6}] * 2}, r"co_training: the weights sum to 1.2, which"),
        ({"co_training": {"type": "recorded", "weight": 0.6}}, r"expected a list such as \[\{type: ...\}\], got"),
        ({"augment": {"random_brightnes": 0.2}}, "did you mean 'random_brightness'"),
        ({"augment": {}}, "imitation.augment: changes nothing"),
    ],
)
def test_wrong_mixtures(keys, message):
    plugins = ["vla_rl.testing.scripted", str(Path(__file__).with_name("expert_data.py"))]
    section = {"data": {"type": "recorded"}, "steps": 60, "lr": 3e-2, **keys}
    with pytest.raises(SpecError, match=message):
        parse_spec(scripted_spec(imitation=section, plugins=plugins))
    with pytest.raises(SpecError, match="co_training: mixes recorded demonstrations: needs `data`"):
        further = [{"type": "recorded", "weight": 0.5}]
        parse_spec(scripted_spec(imitation={**EXPERT, "co_training": further}, plugins=plugins))


REWARDED = ["vla_rl.testing.scripted", str(Path(__file__).with_name("reward_data.py"))]


@pytest.mark.parametrize("algorithm", ["awr", "iql"])
def test_the_better_actions_of_recordings_are_learnt(tmp_path, algorithm):
    """Half of the recorded chunks are good; a resumed run equals one that went through, critics included."""
    offline = {"type": "offline", "algorithm": {"type": algorithm}, "critic_steps": 30, "lr": 1e-2, "hidden": [32]}
    section = {"data": {"type": "rewarded"}, "trainer": offline, "lr": 3e-2, "batch": 16, "report_every": 30}
    results, metrics = start(tmp_path / "whole", imitation={**section, "steps": 90}, plugins=REWARDED)
    assert results["success"]["rate"] >= 0.95
    values = [line["loss/value"] for line in metrics if "loss/value" in line]
    assert len(values) == 3 and values[-1] < values[0]
    start(tmp_path / "parts", imitation={**section, "steps": 60}, plugins=REWARDED)
    start(tmp_path / "parts", resume=True, imitation={**section, "steps": 90}, plugins=REWARDED)
    files = [
        folder / "checkpoints" / "last" / "trainer" / "learner.pt"
        for folder in (tmp_path / "whole", tmp_path / "parts")
    ]
    one, other = (torch.load(file, weights_only=True) for file in files)
    assert one["weights"].keys() == other["weights"].keys()
    owned = one["trainers"]["demonstrations"]
    assert owned["state"] == {"updates": 90} and len(owned) == (5 if algorithm == "iql" else 3)
    assert _flat(one) == _flat(other)


def test_plain_cloning_of_the_same_recordings_is_undecided(tmp_path):
    section = {"data": {"type": "rewarded"}, "lr": 3e-2, "batch": 16, "steps": 60}
    results, _ = start(tmp_path, imitation=section, plugins=REWARDED)
    assert results["success"]["rate"] <= 0.8


def test_a_run_of_one_trainer_is_not_resumed_with_another(tmp_path):
    section = {"data": {"type": "rewarded"}, "lr": 3e-2, "batch": 16, "steps": 2}
    start(tmp_path, imitation=section, plugins=REWARDED)
    with pytest.raises(UserError, match=r"imitation\.trainer"):
        start(
            tmp_path, resume=True, imitation={**section, "steps": 4, "trainer": {"type": "offline"}}, plugins=REWARDED
        )


def _flat(state):
    """All numbers of a checkpoint, by their place."""
    if isinstance(state, dict):
        return {key: _flat(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [_flat(value) for value in state]
    return state.tolist() if isinstance(state, torch.Tensor) else state

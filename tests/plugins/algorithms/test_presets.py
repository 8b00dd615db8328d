"""Published recipes: `preset: NAME` stands for plain keys."""

from __future__ import annotations

import pytest

from vla_rl.core.errors import SpecError
from vla_rl.core.spec.spec import make_component, parse_spec
from vla_rl.plugins.algorithms import gipo, grpo, ppo, srpo
from vla_rl.toolkit.algorithms.policy_gradient import Decoupled

PLUGINS = {"gipo": gipo.plugin, "grpo": grpo.plugin, "ppo": ppo.plugin, "srpo": srpo.plugin}
REQUIRED = {"srpo": {"encoder": "tiny"}}


def config(name, **keys):
    return make_component("algorithm", name, **keys).config


def spec(algorithm):
    return {
        "name": "presets",
        "plugins": ["vla_rl.testing.scripted"],
        "model": {"type": "linear"},
        "env": {"type": "scripted", "num_envs": 8},
        "rollout": {"chunk": 2, "episodes": 8, "group_size": 4},
        "algorithm": algorithm,
        "train": {"steps": 1, "lr": 1e-3, "micro_batch": 8},
    }


RLINF_CRITIC = {
    "gamma": 0.99,
    "lam": 0.95,
    "normalize_advantages": "unbiased",
    "value_clip": 0.2,
    "huber_delta": 10.0,
    "entropy_coef": 0.0,
}
GAE = {"gamma": 0.99, "lam": 0.95}
CLIP = {"clip_low": 0.2, "clip_high": 0.28, "entropy_coef": 0.0}
# what facts and public code say of each recipe
WANTED = {
    ("ppo", "paper"): {**RLINF_CRITIC, **CLIP, "advantage": "action", "log_prob": "token", "dual_clip": None},
    ("ppo", "rlinf"): {**RLINF_CRITIC, **CLIP, "advantage": "action", "dual_clip": None, "value_coef": 1.0},
    ("ppo", "rlinf-async"): {
        **RLINF_CRITIC,
        "advantage": "action",
        "log_prob": "action",
        "clip_low": 0.3,
        "clip_high": 0.3,
        "dual_clip": 3.0,
        "correction": Decoupled(proximal="interpolate", threshold=2.0),
        "value_coef": 1.0,
    },
    ("ppo", "rlinf-flow"): {  # libero_spatial_ppo_openpi.yaml:40-70; env_worker.py:739, losses.py:227 and 420
        **RLINF_CRITIC,
        "advantage": "chunk",
        "log_prob": "chunk",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "dual_clip": None,
        "value_coef": 1.0,
        "time_limit": "terminal",
        "aggregation": "rlinf",
    },
    ("grpo", "paper"): {**CLIP, "aggregation": "trajectory-mean", "dual_clip": None},
    ("grpo", "rlinf"): {**CLIP, "aggregation": "rlinf", "dual_clip": None},
    ("grpo", "simplevla"): {**CLIP, "aggregation": "trajectory-mean", "dual_clip": None},  # dp_rob.py:440, 511-513
    ("gipo", "paper"): {
        **GAE,
        "sigma": 0.5,
        "behaviour_kl_coef": 0.0,
        "time_limit": "bootstrap",
        "huber_delta": None,
        "normalize_advantages": "population",
        "recompute_values": True,
    },
    ("gipo", "accerl-minimal"): {
        **GAE,
        "sigma": 0.5,
        "behaviour_kl_coef": 0.0,
        "time_limit": "terminal",
        "value_coef": 1.0,
        "entropy_coef": 0.01,
        "normalize_advantages": "population",
        "recompute_values": False,
    },
    ("gipo", "accerl-full"): {
        **GAE,
        "sigma": 1.0,
        "behaviour_kl_coef": 0.1,
        "time_limit": "terminal",
        "value_coef": 1.0,
        "entropy_coef": 0.0,
        "normalize_advantages": "population",
        "recompute_values": False,
    },
    ("srpo", "siirl-srpo"): {
        **CLIP,
        "image_size": 384,  # run_openvla_oft_libero_long.sh:168
        "cluster_eps": 0.5,
        "aggregation": "trajectory-mean",  # siirl/engine/actor/embodied_actor.py:417, 480; params/model_args.py:278
        "dual_clip": None,  # clip_ratio_c=10000.0, run_openvla_oft_libero_long.sh:144
        "frames": 64,
        "reward_scale": 0.6,
    },
}


@pytest.mark.parametrize(("name", "preset"), WANTED)
def test_a_preset_is_its_published_recipe(name, preset):
    found = config(name, preset=preset, **REQUIRED.get(name, {}))
    assert {key: getattr(found, key) for key in WANTED[name, preset]} == WANTED[name, preset]
    if name in ("grpo", "srpo"):
        assert (found.filter.lower, found.filter.upper) == (0.1, 0.9)


def test_no_preset_is_untested():
    assert {(name, preset) for name, plugin in PLUGINS.items() for preset in plugin.presets or ()} == set(WANTED)


def test_keys_next_to_a_preset_win():
    found = config("grpo", preset="rlinf", dual_clip=3.0, filter=None)
    assert (found.dual_clip, found.filter, found.aggregation) == (3.0, None, "rlinf")


def test_the_resolved_spec_holds_plain_keys():
    plain = parse_spec(spec({"type": "grpo", "preset": "rlinf", "clip_high": 0.3})).to_dict()["algorithm"]
    assert "preset" not in plain
    assert (plain["aggregation"], plain["clip_high"], plain["filter"]["lower"]) == ("rlinf", 0.3, 0.1)
    assert parse_spec(spec(plain)).algorithm.config == config("grpo", preset="rlinf", clip_high=0.3)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (
            {"type": "grpo", "preset": "rlnf"},
            r"algorithm.preset: 'grpo' has no preset 'rlnf'; did you mean 'rlinf'\?; there are",
        ),
        (
            {"type": "ppo", "preset": 3},
            r"'ppo' has no preset 3; there are: 'paper', 'rlinf', 'rlinf-async', 'rlinf-flow'",
        ),
        ({"type": "grpo", "preset": "rlinf", "clip_hgh": 0.3}, r"clip_hgh: unknown key; did you mean 'clip_high'"),
        ({"type": "grpo", "prest": "rlinf"}, r"prest: unknown key; did you mean 'preset'"),
        (
            {"type": "ppo", "preset": "rlinf", "log_prob": "chunk"},
            r"advantage: action cannot be used with log_prob: chunk",
        ),
    ],
)
def test_a_wrong_preset_is_refused(algorithm, message):
    with pytest.raises(SpecError, match=message):
        parse_spec(spec(algorithm))


def test_a_models_own_preset_key_is_left_to_it():
    assert make_component("model", "openvla_oft", preset="tiny").config.preset == "tiny"

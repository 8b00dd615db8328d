"""What users of other projects reported about checkpoints: the same spec is refused, warned of, or right by itself here."""

from __future__ import annotations

import pytest

from vla_rl.core.errors import SpecError
from vla_rl.core.spec.spec import Spec, parse_spec
from vla_rl.runtime.checks.known_checkpoints import checkpoint_lines, checkpoint_warnings

OFT_SPATIAL = "moojink/openvla-7b-oft-finetuned-libero-spatial"
OFT_TOGETHER = "moojink/openvla-7b-oft-finetuned-libero-spatial-object-goal-10"
OPENVLA_LONG = "openvla/openvla-7b-finetuned-libero-10"
SIMPLEVLA = "Haozhan72/Openvla-oft-SFT-libero-spatial-traj1"
PI05 = "lerobot/pi05_libero_finetuned"

REFUSED = [
    (
        "moojink/openvla-oft#106: one image for a network of two, success far below the paper's",
        "openvla_oft",
        OFT_SPATIAL,
        {"cameras": ["agentview"]},
        r"model\.cameras: .*contradicts.*run_libero_eval\.py:96",
    ),
    (
        "buaa-colalab/RoboCerebra#10: OpenVLA's checkpoint without action head in OFT's script",
        "openvla_oft",
        OPENVLA_LONG,
        {},
        r"model\.type: .*is a checkpoint of openvla \(says openvla/openvla@",
    ),
    (
        "UT-Austin-RobIn/continual-vla-rl#3: reinforcement learning of tokens that an L1 head never trained, success 0",
        "openvla_oft",
        OFT_SPATIAL,
        {"head": "discrete"},
        r"model\.head: 'discrete' contradicts.*'l1'",
    ),
    (
        "PRIME-RL/SimpleVLA-RL README: an L1 head that SimpleVLA-RL's checkpoints do not have",
        "openvla_oft",
        SIMPLEVLA,
        {"head": "l1"},
        r"model\.head: 'l1' contradicts.*'discrete'",
    ),
    (
        "openvla/openvla README: its evaluation asks for the crop",
        "openvla",
        OPENVLA_LONG,
        {"center_crop": False},
        r"model\.center_crop: False contradicts.*README\.md:586",
    ),
    (
        "openvla/openvla#203: a checkpoint with another suite's statistics, success 0",
        "openvla",
        OPENVLA_LONG,
        {"unnorm_key": "libero_spatial"},
        r"model\.unnorm_key: 'libero_spatial' contradicts.*'libero_10'",
    ),
    (
        "huggingface/lerobot#3638: 0 % since lerobot does not pad the state of pi0.5's prompt",
        "pi05",
        PI05,
        {"state_in_prompt": "exact"},
        r"model\.state_in_prompt: 'exact' contradicts.*'padded'",
    ),
]
"""(Report, model plugin, checkpoint, keys of `model`, message)."""


def spec_of(kind: str, checkpoint: str, suite: str = "libero_spatial", **keys: object) -> Spec:
    return parse_spec(
        {
            "name": "reported",
            "model": {"type": kind, "checkpoint": checkpoint, **keys},
            "env": {"type": "libero", "suite": suite, "num_envs": 8},
            "rollout": {"episodes": 8, "group_size": 4} | ({"chunk": 10} if kind == "pi05" else {}),
            "algorithm": {"type": "grpo"},
            "train": {"steps": 1, "lr": 1e-5, "micro_batch": 8},
            "hooks": [],
        }
    )


@pytest.mark.parametrize(
    ("kind", "checkpoint", "keys", "message"),
    [case[1:] for case in REFUSED],
    ids=[case[0].partition(":")[0] for case in REFUSED],
)
def test_a_spec_that_failed_elsewhere_is_refused(kind, checkpoint, keys, message):
    with pytest.raises(SpecError, match=message):
        spec_of(kind, checkpoint, **keys)


def test_the_state_of_lerobots_pi05_is_padded_by_itself():
    """huggingface/lerobot#3638: no file of the checkpoint says that its training padded the state."""
    assert spec_of("pi05", PI05).model.config.state_in_prompt == "padded"
    assert spec_of("pi05", f"{PI05}_v044").model.config.state_in_prompt == "padded"


def test_a_checkpoint_that_users_measured_at_zero_says_so():
    """huggingface/lerobot#2533 and #4206."""
    spec = spec_of("pi05", "lerobot/pi05_libero_base")
    assert any("users measured 0 % with it" in line for line in checkpoint_lines(spec))


def test_a_suite_that_a_checkpoint_was_not_trained_on_is_pointed_out():
    """sylvestf/LIBERO-plus#66: a suite's own checkpoint on the three other suites, success 0."""
    (text,) = [text for path, text in checkpoint_warnings(spec_of("openvla_oft", OFT_SPATIAL, "libero_goal"))]
    assert text.startswith(f"{OFT_SPATIAL} was trained on libero_spatial (says moojink/openvla-oft@")
    assert text.endswith("not on libero_goal; success there may be 0")
    assert list(checkpoint_warnings(spec_of("openvla_oft", OFT_SPATIAL))) == []


def test_a_checkpoint_of_several_suites_asks_which_statistics_go_with_the_run():
    """moojink/openvla-oft#156: dataset_statistics.json has an entry for each suite."""
    ((_, text),) = checkpoint_warnings(spec_of("openvla_oft", OFT_TOGETHER, "libero_goal"))
    assert "model.unnorm_key" in text and "the suite that is run" in text
    assert list(checkpoint_warnings(spec_of("openvla_oft", OFT_TOGETHER, unnorm_key="libero_spatial_no_noops"))) == []

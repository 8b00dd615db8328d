"""Test which episodes are recorded, and how images are stored."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from vla_rl.core.spec.spec import make_component
from vla_rl.toolkit.data.recording import RecordSettings, encode_png, settings_in


@pytest.mark.parametrize(
    ("settings", "evaluations", "rollouts"),
    [
        ({}, [0, 1, 2, 3, 4], []),
        ({"what": "rollout"}, [], [0, 1, 2, 3, 4]),
        ({"what": "both", "every": 2}, [0, 2, 4], [0, 2, 4]),
    ],
)
def test_what_is_recorded(settings, evaluations, rollouts):
    settings = RecordSettings(**settings)
    assert [step for step in range(5) if settings.is_recorded("evaluation", step)] == evaluations
    assert [step for step in range(5) if settings.is_recorded("rollout", step)] == rollouts


def test_which_episodes_are_kept():
    kept = {
        only: [RecordSettings(only=only).keeps_episode(s) for s in (True, False)]
        for only in ("all", "success", "failure")
    }
    assert kept == {"all": [True, True], "success": [True, False], "failure": [False, True]}


def test_settings_are_found_among_hooks():
    hooks = [make_component("hook", "jsonl"), make_component("hook", "lerobot", only="success")]
    assert settings_in(hooks).only == "success"
    assert settings_in(hooks[:1]) is None


def test_images_come_back_exactly():
    image = np.random.default_rng(0).integers(0, 256, (7, 5, 3), dtype=np.uint8)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(encode_png(image[:, ::-1])))), image[:, ::-1])

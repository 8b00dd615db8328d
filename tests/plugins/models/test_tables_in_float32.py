"""`dtype: bfloat16` narrows weights, and never the tables of positions: rounded rotary frequencies turn far tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from openvla_cases import CHUNK, ENV

from vla_rl.core.contexts import ModelContext
from vla_rl.plugins.models import gr00t, pi0, smolvla
from vla_rl.plugins.models.gr00t.config import GrootConfig
from vla_rl.plugins.models.pi0.config import Pi0Config, Pi05Config
from vla_rl.plugins.models.smolvla.config import SmolVLAConfig

MODELS: dict[str, tuple[Any, Any, str]] = {
    "pi0": (pi0.plugin, Pi0Config, "tiny"),
    "pi05": (pi0.pi05, Pi05Config, "tiny"),
    "smolvla": (smolvla.plugin, SmolVLAConfig, "tiny"),
    "gr00t": (gr00t.plugin, GrootConfig, "tiny"),
    "gr00t N1.7": (gr00t.plugin, GrootConfig, "tiny_n1_7"),
}


@pytest.mark.parametrize("name", MODELS)
def test_buffers_are_as_without_bfloat16(name: str, tmp_path: Path) -> None:
    plugin, config, preset = MODELS[name]
    context = ModelContext(env=ENV, chunk=CHUNK)
    full, narrow = (plugin.build(config(preset=preset, dtype=d), context) for d in ("float32", "bfloat16"))
    narrow.save(tmp_path)
    loaded = plugin.build(config(checkpoint=str(tmp_path), dtype="bfloat16"), context)
    expected = dict(full.module.named_buffers())
    assert any("inv_freq" in key for key in expected) or name == "smolvla"  # which computes its factors in each pass
    for model in (narrow, loaded):
        assert any(p.dtype == torch.bfloat16 for p in model.module.parameters())
        buffers = dict(model.module.named_buffers())
        assert buffers.keys() == expected.keys()
        assert all(torch.equal(buffers[key], wanted) for key, wanted in expected.items())

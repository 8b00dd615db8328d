"""The generated pages of the keys of a spec are those of the code, and their snippets are read."""

from __future__ import annotations

import re

import pytest
import yaml

import spec_reference
from vla_rl import load_spec
from vla_rl.core.catalogue import KINDS, installed_plugins
from vla_rl.core.installation import OWN_DIST
from vla_rl.core.spec.spec import Spec
from vla_rl.core.spec.structure import keys_of

BASE = """
name: base
model: {type: openvla_oft, preset: fast}
env: {type: tabletop, num_envs: 16}
rollout: {chunk: 8, episodes: 64}
algorithm: {type: grpo}
train: {steps: 1, lr: 1.0e-4, micro_batch: 64}
"""
NEEDS = {"imagination": {"world_model"}, "world_model": {"imagination"}}
"""Sections that are only valid with others."""


@pytest.mark.parametrize("file", spec_reference.PAGES, ids=lambda file: file.stem)
def test_the_page_is_that_of_the_code(file):
    assert file.read_text() == spec_reference.PAGES[file](), "run: python tools/spec_reference.py"


@pytest.mark.parametrize("name", keys_of(Spec))
def test_the_snippet_of_a_section_is_read(name, tmp_path):
    snippets = {key: text for key, (_, text) in spec_reference.sections().items()}
    data = yaml.safe_load(BASE)
    for section in {name} | NEEDS.get(name, set()):
        data |= yaml.safe_load(snippets[section])
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(data))
    assert load_spec(tmp_path / "spec.yaml").env.num_envs == 16


def test_every_section_and_every_plugin_has_its_keys_on_a_page():
    page = spec_reference.spec_page()
    assert re.findall(r"^## (.+)$", page, flags=re.MULTILINE) == list(keys_of(Spec))
    plugins = spec_reference.plugins_page()
    for kind in KINDS:
        names = [
            name for name, items in installed_plugins(kind).items() if any(item.dist == OWN_DIST for item in items)
        ]
        for name in names:
            assert f"\n### {kind}: {name}\n" in plugins


def test_pages_show_words_and_no_python():
    text = spec_reference.spec_page() + spec_reference.plugins_page()
    assert not re.findall(r"field\(|validator|Factory|Config\b|NoneType|<class", text)
    assert "| `chunk` | integer, 1 to 10,000 | **required** |" in text
    assert "| `auto_reset.mode` | `immediate` or `deferred` |" in text
    assert "| `value_lr` | number, 1e-12 to 10, or `null` |" in text

"""What `import vla_rl` offers: every name is there, loads when it is used, and is known to type checkers."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import vla_rl


@pytest.mark.parametrize("name", vla_rl.__all__)
def test_a_public_name_is_what_its_module_has(name):
    assert getattr(vla_rl, name) is not None and name in dir(vla_rl)


def test_type_checkers_see_the_same_names():
    tree = ast.parse(Path(vla_rl.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body for alias in node.names}
    assert seen == vla_rl._MODULE_OF and set(seen) == set(vla_rl.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'SimEnvironment'"):
        vla_rl.SimEnvironment  # noqa: B018

"""What `import vla_rl` offers: every name is there and loads when it is used. Type checkers read the same list."""

from __future__ import annotations

import pytest

import vla_rl


@pytest.mark.parametrize("name", vla_rl.__all__)
def test_a_public_name_is_what_its_module_has(name):
    assert getattr(vla_rl, name) is not None and name in dir(vla_rl)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="SimEnvironment"):
        vla_rl.SimEnvironment  # noqa: B018

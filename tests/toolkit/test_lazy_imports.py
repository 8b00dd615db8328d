"""Modules that are imported on first use."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from vla_rl.toolkit.lazy_imports import LazyModule


def test_a_module_is_imported_by_its_first_attribute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "numbers_of_lazy.py").write_text("ONE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = LazyModule("numbers_of_lazy")
    assert "numbers_of_lazy" not in sys.modules
    assert module.ONE == 1
    module_itself = sys.modules.pop("numbers_of_lazy")
    module_itself.ONE = 2
    monkeypatch.setitem(sys.modules, "numbers_of_lazy", module_itself)
    assert module.ONE == 2, "an attribute is the module's own each time, so that a test can replace it there"
    with pytest.raises(AttributeError, match="TWO"):
        module.TWO  # noqa: B018

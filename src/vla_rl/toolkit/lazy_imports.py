"""Modules that are imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class LazyModule:
    """Stands for a module, and imports it when its first attribute is read. Meant for files that contain both settings,
    which specs are read with, and functions on tensors: a spec is read without torch."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(import_module(self._name), attribute)

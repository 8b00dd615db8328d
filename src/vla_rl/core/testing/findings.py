"""How checks collect what they find, so that an author sees everything at once."""

from __future__ import annotations

import traceback
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import attrs

from vla_rl.core.types import Context, Plugin


class CheckFailed(AssertionError):
    """A component does not keep to its contract. `findings` holds every finding: expected, got, remedy."""

    def __init__(self, title: str, findings: tuple[str, ...]) -> None:
        count = f"{len(findings)} finding" + "s" * (len(findings) > 1)
        super().__init__(f"{title}: {count}\n" + "\n".join(f"  {i}. {text}" for i, text in enumerate(findings, 1)))
        self.findings = findings


class Findings:
    """Collects findings; `close` raises them as one `CheckFailed`. A finding that repeats is kept once."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._found: dict[str, None] = {}

    def expect(self, holds: bool, where: str, expected: object, got: object, remedy: str) -> bool:
        """Record a finding unless `holds`. -> `holds`."""
        if not holds:
            self._found[f"{where}: expected {expected}, got {got}; {remedy}"] = None
        return holds

    @contextmanager
    def section(self, what: str) -> Generator[None]:
        """An exception in here is a finding, and the check goes on after it."""
        try:
            yield
        except Exception as exc:
            frame = traceback.extract_tb(exc.__traceback__)[-1]
            at = f"{type(exc).__name__}: {exc} ({frame.filename}:{frame.lineno})"
            self._found[f"{what}: expected no exception, got {at}; mend what raises it"] = None

    def close(self) -> None:
        if self._found:
            raise CheckFailed(self._title, tuple(self._found))


def built(component: Any, config: Any, context: Context) -> Any:
    """The component itself, or what its `Plugin` builds (with `config`, or the config's defaults)."""
    if not isinstance(component, Plugin):
        if config is not None:
            raise TypeError("a config goes with a Plugin; this component is built already")
        return component
    if config is None:
        required = [a.name for a in attrs.fields(component.config) if a.init and a.default is attrs.NOTHING]
        if required:
            raise TypeError(f"{component.config.__name__} has required keys ({', '.join(required)}): give a config")
        config = component.config()
    return component.build(config, context)

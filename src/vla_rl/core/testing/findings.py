"""How checks collect what they find, so that an author sees everything at once."""

from __future__ import annotations

import traceback
from collections.abc import Generator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import attrs
from attrs import frozen

from vla_rl.core.errors import PluginError
from vla_rl.core.plugins import KINDS
from vla_rl.core.seats import seat
from vla_rl.core.types import Context, Plugin


class CheckFailed(AssertionError):
    """A component does not keep to its contract. `findings` holds every finding: expected, got, remedy."""

    def __init__(self, title: str, findings: tuple[str, ...]) -> None:
        count = f"{len(findings)} finding" + "s" * (len(findings) > 1)
        super().__init__(f"{title}: {count}\n" + "\n".join(f"  {i}. {text}" for i, text in enumerate(findings, 1)))
        self.findings = findings


@frozen
class Section:
    """A part of a check: what it found, or why it was left out."""

    name: str
    findings: tuple[str, ...]
    seconds: float
    skipped: str = ""


class NotOffered(Exception):
    """Raised inside a section whose optional methods the component does not have."""


class Findings:
    """Collects findings; `close` raises them as one `CheckFailed`. A finding that repeats is kept once."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._found: dict[str, None] = {}
        self.sections: list[Section] = []

    def expect(self, holds: bool, where: str, expected: object, got: object, remedy: str) -> bool:
        """Record a finding unless `holds`. -> `holds`."""
        if not holds:
            self._found[f"{where}: expected {expected}, got {got}; {remedy}"] = None
        return holds

    @contextmanager
    def section(self, what: str) -> Generator[None]:
        """An exception in here is a finding, and the check goes on after it."""
        known, before, skipped = len(self._found), perf_counter(), ""
        try:
            yield
        except NotOffered as exc:
            skipped = str(exc)
        except Exception as exc:
            frame = traceback.extract_tb(exc.__traceback__)[-1]
            at = f"{type(exc).__name__}: {exc} ({frame.filename}:{frame.lineno})"
            self._found[f"{what}: expected no exception, got {at}; mend what raises it"] = None
        found = tuple(self._found)[known:]
        self.sections.append(Section(what, found, perf_counter() - before, skipped))

    def close(self) -> None:
        if self._found:
            raise CheckFailed(self._title, tuple(self._found))


def built(kind: str, component: Any, config: Any, context: Context) -> tuple[Any, str]:
    """The component, or what its `Plugin` builds (with `config`, or the config's defaults), seated as core does it:
    so signatures are compared with the contract. -> (component, name of its class)."""
    if isinstance(component, Plugin):
        component = component.build(_config(component, config), context)
    elif config is not None:
        raise TypeError("a config goes with a Plugin; this component is built already")
    name = type(component).__name__
    base = KINDS[kind].base
    if not isinstance(component, base):
        text = f"build: expected a {base.__name__}, got {name}; subclass {base.__name__}"
        raise CheckFailed(f"check_{kind} of {name}", (text,))
    try:
        return seat(kind, component, name), name
    except PluginError as exc:
        raise CheckFailed(f"check_{kind} of {name}", (str(exc),)) from exc


def _config(plugin: Plugin, config: Any) -> Any:
    if config is not None:
        return config
    required = [a.name for a in attrs.fields(plugin.config) if a.init and a.default is attrs.NOTHING]
    if required:
        raise TypeError(f"{plugin.config.__name__} has required keys ({', '.join(required)}): give a config")
    return plugin.config()

"""Findings of checks, collected so that an author sees all of them at once."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol, TypeVar

import attrs
import numpy as np
from attrs import frozen

from vla_rl.core.catalogue import KINDS
from vla_rl.core.contexts import Context
from vla_rl.core.errors import PluginError, UserError
from vla_rl.core.manager import wrap

C = TypeVar("C")


class CheckFailed(AssertionError):
    """A component does not keep to its contract. `findings` holds every finding: expected, got, remedy."""

    def __init__(self, title: str, findings: tuple[str, ...]) -> None:
        count = f"{len(findings)} finding" + "s" * (len(findings) > 1)
        super().__init__(f"{title}: {count}\n" + "\n".join(f"  {i}. {text}" for i, text in enumerate(findings, 1)))
        self.findings = findings


@frozen
class Section:
    """A section of a check: its findings, or the reason why it was left out."""

    name: str
    findings: tuple[str, ...]
    seconds: float
    skipped: str = ""
    notices: tuple[str, ...] = ()
    """Parts that could not be checked or were left out; these are not findings."""


class Expects(Protocol):
    """Takes findings."""

    def expect(self, holds: bool, where: str, expected: object, got: object, remedy: str) -> bool: ...
    def notice(self, text: str) -> None: ...


class LeftOut(Exception):
    """Raised inside a section that is not for this component, with the reason."""


class Unfit(Exception):
    """Raised inside a section that cannot continue; its findings are already recorded."""


class Findings:
    """Collects findings; `close` raises them as one `CheckFailed`. A finding that repeats is kept once."""

    def __init__(self, title: str, on_section: Callable[[str], None] = lambda name: None) -> None:
        """`on_section` is called with the name of each section as it begins."""
        self._title = title
        self._on_section = on_section
        self._found: dict[str, None] = {}
        self._notices: list[str] = []
        self._errors: dict[str, tuple[str, str]] = {}
        """Recognisable part of an error -> the section where it first occurred, and its text there."""
        self._section = ""
        self.sections: list[Section] = []

    def expect(self, holds: bool, where: str, expected: object, got: object, remedy: str) -> bool:
        """Record a finding unless `holds`. Return `holds`."""
        if not holds:
            self._found[f"{where}: expected {expected}, got {got}; {remedy}"] = None
        return holds

    def notice(self, text: str) -> None:
        """Record something that could not be checked, or was left out."""
        if text not in self._notices:
            self._notices.append(text)

    def record_error(self, expected: str, error: str, remedy: str) -> None:
        """Record an error. One that came before is only named by where it did, so a traceback is read once."""
        first = self._errors.setdefault(error_body(error), (self._section, error))
        if first != (self._section, error):
            error = "the same error as " + ("above" if first[0] == self._section else f"in {first[0]!r}")
        self._found[f"{expected}, got {error}; {remedy}"] = None

    @contextmanager
    def section(self, what: str) -> Generator[None]:
        """Turn an exception inside the section into a finding; the check continues after it."""
        num_before, before, skipped = len(self._found), perf_counter(), ""
        self._section = what
        self._notices = []
        self._on_section(what)
        try:
            yield
        except LeftOut as exc:
            skipped = str(exc)
        except Unfit:
            skipped = "" if len(self._found) > num_before else "not done: see the findings above"
        except Exception as exc:
            at = f"{type(exc).__name__}: {str(exc).strip()}{_source_location(exc)}"
            self.record_error(f"{what}: expected no exception", at, "fix what raises it")
        new_findings = tuple(self._found)[num_before:]
        self.sections.append(Section(what, new_findings, perf_counter() - before, skipped, tuple(self._notices)))

    def run_checks(self, checks: Iterable[Callable[[C], None]], case: C, prefix: str = "") -> None:
        """Run each check in a section of its name."""
        for check in checks:
            with self.section(prefix + check.__name__.strip("_").replace("_", " ")):
                check(case)

    def close(self) -> None:
        if self._found:
            raise CheckFailed(self._title, tuple(self._found))


def _source_location(exc: Exception) -> str:
    """The innermost line of the author's code, " (FILE:LINE)"; nothing for an error that is a sentence for users."""
    if isinstance(exc, UserError):
        return ""
    frames = traceback.extract_tb(exc.__traceback__)
    of_others = (str(Path(__file__).parents[2]), "site-packages", "<")
    written = [frame for frame in frames if not any(name in frame.filename for name in of_others)]
    frame = (written or frames)[-1]
    return f" ({frame.filename}:{frame.lineno})"


def error_body(error: str) -> str:
    """Return the part that identifies an error: its last traceback, or its text without row numbers."""
    traced = error.rfind("Traceback (most recent call last)")
    without_place = re.sub(r" \([^()\n]*\.py:\d+\)$", "", error[max(traced, 0) :])
    return re.sub(r"\brow \d+", "row", without_place).strip()


def check_array(
    f: Expects, array: Any, shape: Sequence[int], dtype: str, where: str, remedy: str = "convert or reshape it"
) -> bool:
    """Record a finding unless an array or tensor has this type and shape. Return whether it has."""
    array = array if hasattr(array, "dtype") else np.asarray(array)
    got, expected = f"{str(array.dtype).removeprefix('torch.')} {list(array.shape)}", f"{dtype} {list(shape)}"
    return f.expect(got == expected, where, expected, got, remedy)


def build_component(kind: str, component: Any, config: Any, context: Context | None) -> tuple[Any, str]:
    """The component, or what its declaration builds (with `config`, or the config's defaults), seated as core does it:
    so signatures are compared with the contract. -> (component, name of its class)."""
    base = KINDS[kind].contract_class
    if isinstance(component, KINDS[kind].declaration):
        declared: Any = component
        if config is None:
            required = [a.name for a in attrs.fields(declared.config) if a.init and a.default is attrs.NOTHING]
            if required:
                text = f"{declared.config.__name__} has required keys ({', '.join(required)}): give a config"
                raise TypeError(text)
            config = declared.config()
        component = declared.build(config) if context is None else declared.build(config, context)
    elif config is not None:
        raise TypeError("a config goes with a declaration; this component is built already")
    name = type(component).__name__
    if not isinstance(component, base):
        text = f"build: expected a {base.__name__}, got {name}; subclass {base.__name__}"
        raise CheckFailed(f"check_{kind} of {name}", (text,))
    try:
        return wrap(kind, component, name), name
    except PluginError as exc:
        raise CheckFailed(f"check_{kind} of {name}", (str(exc),)) from exc

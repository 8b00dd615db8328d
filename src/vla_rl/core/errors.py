"""Errors that the user can fix: shown as a message, without a traceback."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


class UserError(Exception):
    """Something in a spec, a plugin or a path is wrong; the message says what, where and what to do."""

    exit_code = 2
    """Of the command line."""


class PluginError(UserError):
    """A plugin is unknown, ambiguous, incomplete, or does not keep to the contract of its kind."""


class NotOffered(UserError):
    """An optional method was called that this component does not have, or not as it was built."""


class CheckpointError(UserError):
    """A checkpoint, of a model or a run, cannot be used or written; the message says which file and what to do."""


class SpecError(UserError):
    """A spec is wrong. `errors` holds every problem found, each as `file:line: path: message`."""

    def __init__(self, errors: Sequence[str]) -> None:
        super().__init__("\n".join(errors))
        self.errors = tuple(errors)

    def __reduce__(self) -> tuple[type[SpecError], tuple[tuple[str, ...]]]:
        return type(self), (self.errors,)


class WorkerDied(UserError):
    """A worker's process ended while it was needed."""


class HookFailed(UserError):
    """A listener of a run raised; the message says which, where and what."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the nearest known name, or nothing."""
    near = get_close_matches(name, list(known), n=1) if len(name) <= 100 else []  # its time grows with the length
    return f"; did you mean {near[0]!r}?" if near else ""

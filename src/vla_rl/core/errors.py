"""Errors that users can fix. The command line shows their message without a traceback."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


class UserError(Exception):
    """Something in a spec, a plugin or a path is wrong. The message says what, where and what to do."""

    exit_code = 2
    """Exit status of the command line."""


class PluginError(UserError):
    """A plugin is unknown, ambiguous or incomplete, or violates the contract of its kind."""


class CheckpointError(UserError):
    """A checkpoint of a model or a run cannot be read or written. The message names the file and says what to do."""


class RunFolderGone(CheckpointError):
    """The folder of a run was moved, or removed, while the run wrote to it."""


class SpecError(UserError):
    """A spec is invalid. `errors` lists every problem as `file:line: path: message`."""

    def __init__(self, errors: Sequence[str]) -> None:
        super().__init__("\n".join(errors))
        self.errors = tuple(errors)

    def __reduce__(self) -> tuple[type[SpecError], tuple[tuple[str, ...]]]:
        return type(self), (self.errors,)


class WorkerDied(UserError):
    """A worker's process ended while it was needed."""


class StopAndSave(UserError):
    """Episodes cannot continue. The run saves its last finished step, and ends."""


class SafetyStop(StopAndSave):
    """A person stopped the robot, no one is there to stop it, or it is not there itself."""


class NobodyAnswered(SafetyStop):
    """No one answered a question within its deadline. The message names the question and the deadline."""


class HookFailed(UserError):
    """A listener of a run raised an exception. The message says which listener, where and what."""


def did_you_mean(name: str, known_names: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the known name nearest to `name`, or an empty text."""
    near = get_close_matches(name, list(known_names), n=1) if len(name) <= 100 else []  # its time grows with the length
    return f"; did you mean {near[0]!r}?" if near else ""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def format_count(count: float, noun: str) -> str:
    """Return `1 GPU`, `2 GPUs`, `0 GPUs`: the count of a noun whose plural ends with s."""
    return f"{count:g} {noun}{'s' * (count != 1)}"


def there_are(count: float, noun: str = "") -> str:
    """Return `there is 1 GPU` or `there are 2 GPUs`; without a noun `there is 1`, `there are 2`."""
    return f"there {'is' if count == 1 else 'are'} {format_count(count, noun) if noun else f'{count:g}'}"

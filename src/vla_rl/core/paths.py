"""Checks of paths that users give: try them before there is work to lose, and explain errors in a sentence."""

from __future__ import annotations

import errno
import io
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from vla_rl.core.errors import UserError

MACHINE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP})
"""Errors of the machine that no code of ours can cause, for any path."""
NUL = "embedded null"
"""Text in Python's ValueError about a path with a NUL byte."""
LONGEST_TEXT = 4_000_000
"""Characters of a file that a person writes."""
LONGEST = 200
"""Most characters of a path in a message."""


def read_commit(checkout: Path, length: str = "--short") -> str:
    """Return the commit of a Git checkout, as `git rev-parse` shortens it; empty where it cannot be read."""
    command = ["git", "-C", str(checkout), "rev-parse", length, "HEAD"]
    with suppress(OSError, subprocess.SubprocessError):  # no git, or one that hangs
        done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=10, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""
    return ""


def error_reason(exc: Exception) -> str:
    """Return the reason that an error gives, without its number and path."""
    if not isinstance(exc, OSError):
        return "it has a NUL byte in it" if NUL in str(exc) else str(exc)
    words = {
        errno.ENOENT: "there is no such file or folder",
        errno.ENOTDIR: "a part of it is a file and not a folder",
        errno.EISDIR: "it is a folder and not a file",
        errno.EEXIST: "it is there already, and no folder",
        errno.EACCES: "you may not do that there",
        errno.EPERM: "you may not do that there",
        errno.EROFS: "its disk can only be read",
        errno.ENOSPC: "its disk is full",
        errno.EDQUOT: "your share of its disk is used up",
        errno.ENAMETOOLONG: "a name in it is too long",
        errno.ELOOP: "its links lead to each other",
    }
    return words.get(exc.errno or 0, "") or exc.strerror or str(exc)


def expand_tilde(path: str | Path) -> Path:
    """Return the path with `~` as the home folder; the home of an unknown user stays as it is, where `Path.expanduser`
    raises a RuntimeError."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - see above


def resolve_path(path: Path) -> Path:
    """Return where a path leads. Raises OSError for links that lead to each other: `Path.resolve` raises a RuntimeError
    before Python 3.13, and since then returns one of the links."""
    try:
        target = path.resolve()
        looped = target.is_symlink()
    except RuntimeError:
        looped = True
    if looped:
        raise OSError(errno.ELOOP, "", str(path))
    return target


def read_text(path: Path, longest: int = LONGEST_TEXT) -> str:
    """Return a file's text. Raises UnicodeDecodeError, and OSError also for longer files, devices and dead pipes."""
    with open_text(path, longest) as file:
        text = file.read(longest + 1)
    if len(text) > longest:
        raise OSError(errno.EFBIG, f"it has more than {longest:,} characters", str(path))
    return text


def open_text(path: Path, longest: int = LONGEST_TEXT) -> TextIO:
    """Open a file as text; of a pipe, about `longest` characters. Raises OSError for a pipe without a writer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, encoding="utf-8")
    with os.fdopen(descriptor, "rb", buffering=0) as pipe:
        begin = pipe.read(1)  # None: a writer is connected
        if begin == b"":
            raise OSError(errno.EPIPE, "it is a pipe, and no process writes to it", str(path))
        os.set_blocking(descriptor, True)
        # A character is at most 4 bytes: enough for one more than `longest`, which tells that the text is too long.
        content = (begin or b"") + io.BufferedReader(pipe).read(4 * longest + 4)
    return io.TextIOWrapper(io.BytesIO(content), encoding="utf-8")


def read_table(module_file: str, name: str) -> Any:
    """Return the content of a YAML file beside a module, whose `__file__` is given."""
    import yaml  # not needed for what else is here

    return yaml.safe_load(Path(module_file).with_name(name).read_text("utf-8"))


def format_path(path: object) -> str:
    """Format a file path for messages: on one line, the middle of a long one left out."""
    text = str(path)
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]}...{text[-LONGEST // 4 :]}"


def path_error(exc: BaseException, given: Mapping[str, Path]) -> UserError | None:
    """Return a UserError for an exception that one of these paths caused, or the machine, such as a full disk; None for
    any other, such as a bug.

    Args:
        given: name that the user knows ("--to", "PLAN") to path.
    """
    if isinstance(exc, ValueError):
        broken = next((name for name, path in given.items() if "\0" in str(path)), None) if NUL in str(exc) else None
        return (
            None
            if broken is None
            else UserError(f"{broken} {format_path(given[broken])}: {error_reason(exc)}; give another path")
        )
    if not isinstance(exc, OSError):
        return None
    files = [Path(os.fsdecode(file)) for file in (exc.filename, exc.filename2) if isinstance(file, str | bytes)]
    for name, path in given.items():
        if any(_caused_by(path, file, exc) for file in files):
            location = "" if files[0] == path else f" ({format_path(files[0])})"
            return UserError(
                f"{name} {format_path(path)} cannot be used: {error_reason(exc)}{location}; give another path"
            )
    if exc.errno in MACHINE:
        return UserError(
            f"{format_path(files[0]) if files else 'a file, or the output,'} cannot be used: {error_reason(exc)}"
        )
    return None


def _caused_by(path: Path, file: Path, exc: OSError) -> bool:
    """Return whether the error is about the user's `path` or a folder above it, not a file missing *within* it."""
    path, file = Path(os.path.abspath(path)), Path(os.path.abspath(file))  # noqa: PTH100 - links stay as they are
    if file in (path, *path.parents):
        return True
    return path in file.parents and not (isinstance(exc, FileNotFoundError) and os.path.isdir(path))  # noqa: PTH112


@contextmanager
def explain_path_errors(name: str, path: Path) -> Iterator[None]:
    """Turn errors of the system about `path` into a UserError. `name`: what the user calls the path, such as "--to"."""
    try:
        yield
    except (OSError, ValueError) as exc:
        if isinstance(exc, ValueError) and "\0" not in str(path):
            raise
        raise UserError(f"{name} {format_path(path)} cannot be used: {error_reason(exc)}; give another path") from exc


def check_file(name: str, path: Path) -> None:
    """Raise UserError unless a file can be written at `path`; tested by trying. Existing content is not changed."""
    with explain_path_errors(name, path):
        path = _link_target(path)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "", str(path))
        if path.is_file():
            path.open("ab").close()
        elif _path_exists(path):
            return  # a device or a pipe: a trial write could not be undone
        elif not _path_exists(path.parent):
            raise UserError(
                f"{name} {format_path(path)} cannot be written: there is no folder {format_path(path.parent)}; make "
                "it, or give another path"
            )
        _partial_path(path).touch()
        _partial_path(path).unlink()


def check_folder(name: str, path: Path) -> None:
    """Raise UserError unless a folder at `path` can be written to, by trying. Folders made for that are removed."""
    new: list[Path] = []
    with explain_path_errors(name, path):
        if _path_exists(path) and not path.is_dir():
            raise UserError(
                f"{name} {format_path(path)} cannot be used: it is a file and not a folder; give another path"
            )
        for folder in reversed((path, *path.parents)):
            if not _path_exists(folder):
                folder.mkdir()
                new.append(folder)
        try:
            with tempfile.NamedTemporaryFile(dir=path, prefix=".tried."):
                pass
        finally:
            for folder in reversed(new):
                with suppress(OSError):
                    folder.rmdir()


def own_copy(path: Path) -> None:
    """Replace a file with hard links (`cp -al`) by a copy, so that writing to it changes no other; not a device."""
    if path.is_file() and (path.is_symlink() or path.stat().st_nlink > 1):
        partial = _partial_path(path)
        shutil.copyfile(path, partial)
        os.replace(partial, path)


def link_or_copy(source: str, target: str) -> None:
    """Link a file, or copy it if the file system has no hard links (`copy_function` of `shutil.copytree`)."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically: afterwards it is either complete or as before. Devices and pipes are written to."""
    path = _link_target(path)
    if _path_exists(path) and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    partial = _partial_path(path)
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def _link_target(path: Path) -> Path:
    """Return the target of a symbolic link, so that the link itself is kept."""
    return resolve_path(path) if path.is_symlink() else path


def _path_exists(path: Path) -> bool:
    """Return whether anything exists at the path. Unlike `Path.exists`, an impossible path raises an error."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    return True


def _partial_path(path: Path) -> Path:
    return path.with_name(f".vla-rl-{os.getpid()}.partial")  # a name as long as the file's could be too long

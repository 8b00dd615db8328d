"""Lines of other projects' files that a page names, and whether they still hold what was read there.

A file of a package is looked for where its distribution is installed in the named version (`SITE` is site-packages); a
file of a repository in a folder of checkouts, each a work tree or a git directory.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import NamedTuple

SITE = "SITE/"
NOT_RUN = "not run"


class SourceLine(NamedTuple):
    """A line that says what a cell of the page says; the code around it was not run."""

    file: str
    """From the root of the repository, or from site-packages: `SITE/PACKAGE/...`."""
    number: int
    """From 1."""
    holds: str
    """Text on that line."""
    owner: str
    """`DISTRIBUTION VERSION` or `REPOSITORY COMMIT`."""

    def __str__(self) -> str:
        return f"{self.file}:{self.number} of {self.owner}, {NOT_RUN}"


class FileReader:
    """Reads files of installed packages and of checkouts."""

    def __init__(self, checkouts: Path | None = None, sites: Sequence[Path] = ()) -> None:
        """
        Args:
            checkouts: folder of checkouts, named as in `SourceLine.owner`.
            sites: further folders of installed packages, besides Python's own.
        """
        self._checkouts = checkouts
        found = [*distributions(), *distributions(path=[str(site) for site in sites])]
        self._places = {(_normalise(one.name), one.version): Path(str(one.locate_file(""))) for one in found}

    def read_lines(self, file: str, owner: str) -> list[str] | None:
        """Return the lines of a file of a distribution or repository; None: it is not on this machine.

        Raises:
            FileNotFoundError: the owner is here and has no such file.
        """
        name, version = owner.split()
        if file.startswith(SITE):
            place = self._places.get((_normalise(name), version))
            return None if place is None else (place / file.removeprefix(SITE)).read_text("utf-8").splitlines()
        checkout = self._checkouts and self._checkouts / name
        if not checkout or not checkout.is_dir():
            return None
        if (checkout / file).is_file():
            return (checkout / file).read_text("utf-8").splitlines()
        command = ["git", f"--git-dir={checkout}", "show", f"{version}:{file}"]
        shown = subprocess.run(command, capture_output=True, text=True, check=False)
        if shown.returncode:
            raise FileNotFoundError(f"{owner} has no {file}")
        return shown.stdout.splitlines()


def find_wrong_lines(lines: Iterable[SourceLine], reader: FileReader) -> tuple[list[str], list[SourceLine]]:
    """Return what is wrong with lines that hold another text, and the lines whose files are not on this machine."""
    wrong, unread = [], []
    for line in lines:
        try:
            texts = reader.read_lines(line.file, line.owner)
        except FileNotFoundError as error:
            wrong.append(f"{line}: {error}")
            continue
        if texts is None:
            unread.append(line)
        elif not line.holds or line.holds not in "".join(texts[line.number - 1 : line.number]):
            places = [str(number) for number, text in enumerate(texts, 1) if line.holds and line.holds in text]
            there = f"it is on {', '.join(places)}" if places else "the file does not hold it"
            wrong.append(f"{line}: no {line.holds!r} on this line; {there}")
    return wrong, unread


def _normalise(name: str) -> str:
    return name.lower().replace("_", "-")

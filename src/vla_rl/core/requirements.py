"""What distributions require, what of it is not installed, and the command that installs it. Everything is read from
package metadata; nothing is imported."""

from __future__ import annotations

import functools
import platform
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from typing import TYPE_CHECKING

from vla_rl.core.installation import OWN_DIST, pip_arguments, pip_command

if TYPE_CHECKING:
    from packaging.requirements import Requirement

VERSION = re.compile(r"^Version: *(\S+)", flags=re.MULTILINE)
"""A line of a distribution's METADATA."""


def missing_requirements(dist: str, extra: str | None) -> list[str]:
    """Return the requirements of a distribution, `extra` included, that are not installed (from metadata alone). For
    vla-rl itself, the requirements without any extra are left to `unmet_base`: no single plugin lacks them."""
    path = tuple(sys.path)
    base = (
        {_requirement_text(r) for r in _requirements_with_extra(OWN_DIST, "", path)}
        if normalise_name(dist) == OWN_DIST
        else ()
    )
    return [
        text
        for text, _ in _unmet_requirements(
            r for r in _requirements_with_extra(dist, extra or "", path) if _requirement_text(r) not in base
        )
    ]


def unmet_base() -> list[str]:
    """Return vla-rl's own base requirements that are not met, each as `torch>=2.9 (2.8.0 is installed)`. A package of
    another version may still work, so callers report this and do not refuse to run."""
    try:
        unmet = _unmet_requirements(_requirements_with_extra(OWN_DIST, "", tuple(sys.path)))
        return [f"{text} ({f'{version} is' if version else 'not'} installed)" for text, version in unmet]
    except metadata.PackageNotFoundError:  # `doctor` says so
        return []


def keep_build(unmet: Sequence[str]) -> str:
    """Advise how to install the `unmet_base` requirements without replacing a chosen build, such as torch for CUDA."""
    names = "|".join(re.split(r"[^\w.-]", text)[0] for text in unmet)
    return (
        f"installing {OWN_DIST} again would replace what is installed, and with it a build for CUDA; to keep it: "
        f"{pip_command('freeze')} | grep -iE '^({names}|nvidia)' > keep.txt, and -c keep.txt with every install; "
        f"to meet it: install a newer build from where this one came (torch: https://pytorch.org/get-started)"
    )


def install_command(dist: str, extra: str | None) -> str:
    """Return the command that installs what a plugin of this distribution needs, from where the distribution came. The
    command names the plugin's packages alone where pip would not find the distribution, and if vla-rl's own
    requirements are unmet: pip would otherwise also replace what is installed. If the packages have no build for this
    Python, return which one has them."""
    if extra and normalise_name(dist) == OWN_DIST and (others := other_pythons(extra)):
        return f"Python {' or '.join(others)} in place of {_python_version()}, for which these packages have no build"
    arguments = pip_arguments(dist, extra)
    if extra and normalise_name(dist) == OWN_DIST and unmet_base() and missing_requirements(dist, extra):
        arguments = None
    if arguments is None:
        needed = missing_requirements(dist, extra) or list(
            map(_requirement_text, _requirements_with_extra(dist, extra or "", tuple(sys.path)))
        )
        arguments = " ".join(map(shlex.quote, needed))
    return f"{pip_command('install')} {arguments}"


def other_pythons(extra: str) -> list[str]:
    """Return the versions of Python that an extra of vla-rl needs, such as 3.11, if this one is none of them, else an
    empty list. They are those for which the extra `all` has its packages."""
    path = tuple(sys.path)
    names = {requirement.name for requirement in _requirements_with_extra(OWN_DIST, extra, path)}
    for requirement in _all_requirements(OWN_DIST, path):
        marker = requirement.marker
        if requirement.name in names and marker is not None and {"python_version", "extra"} <= set(str(marker).split()):
            versions = [f"3.{minor}" for minor in range(11, 21)]
            fitting = [v for v in versions if marker.evaluate({"extra": "all", "python_version": v})]
            return [] if _python_version() in fitting else fitting
    return []


def normalise_name(name: str) -> str:
    """Return the name of a distribution in the form in which two spellings of it are equal."""
    return name.strip().lower().replace("_", "-").replace(".", "-")


# ------------------------------------------------------------------------------------------------ internal


def _python_version() -> str:
    return ".".join(platform.python_version_tuple()[:2])


def _unmet_requirements(requirements: Iterable[Requirement]) -> Iterator[tuple[str, str | None]]:
    """Yield (requirement, installed version or None) for every requirement that is not met."""
    for requirement in requirements:
        version = _installed_version(requirement.name, tuple(sys.path))
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            yield _requirement_text(requirement), version


def _requirement_text(requirement: Requirement) -> str:
    """Return a requirement as pip takes it, without its marker."""
    return str(requirement).partition(";")[0].strip()


@functools.lru_cache(maxsize=256)
def _requirements_with_extra(dist: str, extra: str, path: tuple[str, ...]) -> tuple[Requirement, ...]:
    """Return what a distribution requires with an extra. Cached per `sys.path`: markers are slow to evaluate."""
    return tuple(r for r in _all_requirements(dist, path) if r.marker is None or r.marker.evaluate({"extra": extra}))


@functools.lru_cache(maxsize=64)
def _all_requirements(dist: str, path: tuple[str, ...]) -> tuple[Requirement, ...]:
    """Return what a distribution requires with any extra. Cached per `sys.path`, since reading parses a file."""
    from packaging.requirements import Requirement

    return tuple(map(Requirement, metadata.requires(dist) or ()))


@functools.lru_cache(maxsize=256)
def _installed_version(dist: str, path: tuple[str, ...]) -> str | None:
    """Return a distribution's installed version. Cached per `sys.path`: reading opens a file, parsing takes 1 ms."""
    try:
        line = VERSION.search(metadata.distribution(dist).read_text("METADATA") or "")
        return line[1] if line else metadata.version(dist)
    except metadata.PackageNotFoundError:
        return None

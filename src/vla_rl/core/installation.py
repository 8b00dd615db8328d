"""How a distribution was installed (direct_url.json, PEP 610), how pip does so again, and vla-rl's shell command."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

PUBLISHED = False
"""The switch of a release: True once a package index has vla-rl. Until then no message and no page names
vla-rl to pip; `tests/core/test_installation.py` lists the pages to change with it."""
OWN_DIST = "vla-rl"


def pip_arguments(dist: str, extra: str | None = None) -> str | None:
    """Return what follows `pip install` to install a distribution, with an extra, from where it came: its folder (`-e`
    if it was editable), its wheel, its repository, or by name from an index. Return None where pip would not find it:
    the folder or wheel is gone, or vla-rl is not `PUBLISHED` and nothing says where it came from."""
    extras = f"[{extra}]" if extra else ""
    try:
        text = metadata.distribution(dist).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return _source_folder(extras) if dist == OWN_DIST else None
    if text is None:
        return shlex.quote(f"{dist}{extras}") if PUBLISHED or dist != OWN_DIST else None
    origin = json.loads(text)
    url, editable = origin["url"], origin.get("dir_info", {}).get("editable", False)
    if "vcs_info" in origin:
        vcs = origin["vcs_info"]
        part = f"#subdirectory={origin['subdirectory']}" if "subdirectory" in origin else ""
        return shlex.quote(f"{dist}{extras} @ {vcs['vcs']}+{url}@{vcs['commit_id']}{part}")
    if not url.startswith("file:"):
        return shlex.quote(f"{dist}{extras} @ {url}")
    path = Path(unquote(urlsplit(url).path))
    return "-e " * editable + shlex.quote(f"{path}{extras}") if path.exists() else None


def pip_command(action: str, python: Path | None = None) -> str:
    """Return how a shell runs `pip ACTION` for an interpreter (None: this one), also without a pip (uv, pipx)."""
    interpreter = python or Path(sys.executable)
    folder = interpreter.parent.parent
    settings = folder / "pyvenv.cfg"
    if (folder / "pipx_metadata.json").is_file():
        return f"pipx runpip {shlex.quote(folder.name)} {action}"
    by_uv = settings.is_file() and "\nuv = " in settings.read_text(encoding="utf-8")
    if by_uv and not any(folder.glob("lib/python3*/site-packages/pip")):
        return f"uv pip {action.removesuffix(' -y')} --python {shlex.quote(str(interpreter))}"
    on_path = shutil.which("pip")
    if on_path is not None and Path(on_path).parent.samefile(interpreter.parent):
        return f"pip {action}"
    return f"{shlex.quote(str(interpreter))} -m pip {action}"


def console_command() -> str:
    """Return what runs as `vla-rl` in this folder: this environment's script, by its path where it is not activated."""
    script = Path(sys.executable).with_name(OWN_DIST)
    if not script.is_file():
        return f"{shlex.quote(sys.executable)} -m vla_rl.cli.main"
    on_path = shutil.which(OWN_DIST)
    if on_path is not None and Path(on_path).samefile(script):
        return OWN_DIST
    here = Path.cwd()
    return shlex.quote(str(script.relative_to(here) if script.is_relative_to(here) else script))


def quote_path(path: Path | str) -> str:
    """Return a path as an argument of a command in a shell: one that begins with a dash is no option."""
    return shlex.quote(f"./{path}" if str(path).startswith("-") else str(path))


def _source_folder(extras: str) -> str | None:
    """Return the arguments for a clone that is on PYTHONPATH and not installed."""
    folder = Path(__file__).parents[3]
    return f"-e {shlex.quote(f'{folder}{extras}')}" if (folder / "pyproject.toml").is_file() else None

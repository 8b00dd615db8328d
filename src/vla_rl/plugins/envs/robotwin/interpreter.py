"""Finds RoboTwin in an interpreter, or in a checkout, without importing it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Literal

WHERE = (
    "`pip install rlinf-robotwin-runtime==0.1.3` in a separate interpreter, which `env.python` names; or "
    "`checkout: FOLDER`, a clone of github.com/RoboTwin-Platform/RoboTwin"
)


def available_apis(checkout: Path | None) -> dict[Literal["vector", "classic"], tuple[str, Path | None]]:
    """Return the available APIs, best first: API -> (package of the tasks, root of the checkout)."""
    package = checkout / "robotwin" if checkout is not None else package_folder("robotwin")
    tasks = checkout / "envs" if checkout is not None else package_folder("envs")
    apis: dict[Literal["vector", "classic"], tuple[str, Path | None]] = {}
    if package is not None and (package / "envs" / "vector_env.py").is_file():
        wheel = (package / "config.py").is_file()
        apis["vector"] = ("robotwin.envs", None) if wheel else ("envs", package.parent)
    if tasks is not None and (tasks / "_base_task.py").is_file():
        apis["classic"] = ("envs", tasks.parent)
    return apis


def package_folder(name: str) -> Path | None:
    """Return the folder of a package, which is not imported; None if it is not installed."""
    spec = find_spec(name)
    locations = list(spec.submodule_search_locations or []) if spec is not None else []
    return Path(locations[0]) if locations else None


def find_missing() -> str | None:
    """Return what is missing to use the plugin, or None: RoboTwin itself, which no extra installs, since its packages
    conflict with those of the models."""
    return None if available_apis(None) else f"needs RoboTwin: {WHERE}"

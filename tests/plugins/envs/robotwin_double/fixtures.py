"""Fixtures of the tests of RoboTwin: the double laid out and found, environments made and closed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from robotwin_double import layout
from robotwin_double.cases import CHUNK, make, settings


@pytest.fixture
def robotwin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., dict[str, Any]]]:
    """Lays a kind of RoboTwin out. -> settings that find it: the wheel on the path, checkouts by `checkout`."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("ROBOTWIN_ASSETS_ROOT", "ASSETS_PATH"):
        monkeypatch.setenv(name, "")

    def lay_out(kind: layout.Kind) -> dict[str, Any]:
        root = layout.lay_out(kind, tmp_path / kind)
        if kind != "wheel":
            return {"checkout": root}
        sys.path.insert(0, str(root))
        return {"assets": layout.make_assets(tmp_path / "data")}

    yield lay_out
    for name in [name for name in sys.modules if name.split(".")[0] in ("robotwin", "envs", "description", "open3d")]:
        del sys.modules[name]


@pytest.fixture
def build_robotwin(robotwin: Any) -> Iterator[Callable[..., Any]]:
    envs = []

    def one(api: str, num_envs: int = 1, chunk: int = CHUNK, **changes: Any) -> Any:
        envs.append(make(settings(api, robotwin, **changes), num_envs, chunk))
        return envs[-1]

    yield one
    for env in envs:
        env.close()

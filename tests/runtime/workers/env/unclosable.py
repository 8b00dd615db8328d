"""A plugin in one file: the scripted double, whose `close` goes wrong, once its episodes are played."""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from attrs import frozen

from vla_rl.core.contexts import EnvContext
from vla_rl.testing.scripted import vla_rl_plugins as doubles

SCRIPTED = doubles["env"]["scripted"]


@frozen(kw_only=True)
class UnclosableConfig:
    closing: Literal["raise", "exit", "sleep", "wait", "spin"] = "raise"
    told: str = ""
    """File that says that it was closed."""


def build(config: UnclosableConfig, context: EnvContext) -> Any:
    env = SCRIPTED.build(SCRIPTED.config(), context)

    class Unclosable(type(env)):  # type: ignore[misc]
        def close(self) -> None:
            Path(config.told).touch()
            match config.closing:
                case "raise":
                    raise RuntimeError("the window was gone")
                case "exit":
                    sys.exit(5)
                case "sleep":
                    time.sleep(3600)
                case "wait":
                    threading.Event().wait()
                case "spin":
                    while True:
                        with suppress(Exception):  # as retries do
                            time.sleep(0.01)

    env.__class__ = Unclosable
    return env


vla_rl_plugins = {"env": {"unclosable": dataclasses.replace(SCRIPTED, config=UnclosableConfig, build=build)}}

"""Closing of simulators. A run waits for it for a limited time only, and does not fail because of it."""

from __future__ import annotations

import traceback

from vla_rl.core.hookspecs import SimEnv
from vla_rl.runtime.comm.interfaces import CLOSE_S
from vla_rl.toolkit.processes import limit_time


def close_env(env: SimEnv, name: str) -> str:
    """Close a simulator. Return what went wrong, in words; empty when nothing did."""
    try:
        with limit_time(CLOSE_S):
            env.close()
    except TimeoutError:
        return f"env {name!r}: close has not returned within {CLOSE_S:g} s; its end was not waited for"
    except BaseException as exc:  # SystemExit too: a finished run must not fail because of it
        where = traceback.extract_tb(exc.__traceback__)[-1]
        description = f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__
        return f"env {name!r}: close failed ({where.filename}:{where.lineno}): {description}"
    return ""

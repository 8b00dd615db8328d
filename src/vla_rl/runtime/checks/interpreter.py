"""Check of another Python interpreter, for simulators with conflicting dependencies."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

from vla_rl.core.installation import OWN_DIST, pip_arguments, pip_command

ASK_SECONDS = 90.0
SAME = (OWN_DIST, "ray")
"""Distributions of which two interpreters that work together need the same version."""


ASK = """
import json, platform
from importlib import metadata
found = {}
for name in %r:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps({"python": platform.python_version(), "has": found}))
"""


def interpreter_problems(python: Path) -> list[str]:
    """Return why simulators cannot run in this interpreter together with ours; empty when they can."""
    if not python.is_file() or not os.access(python, os.X_OK):
        return [f"{python} is not an interpreter; give the bin/python of a virtual environment"]
    try:
        done = subprocess.run(
            [python.absolute(), "-c", ASK % (SAME,)],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=ASK_SECONDS,
            check=True,
            cwd="/",
        )
        answer = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as exc:
        return [f"{python} is not a Python interpreter that runs: {exc}"]
    ours = platform.python_version()
    problems = []
    if answer["python"].split(".")[:2] != ours.split(".")[:2]:
        problems.append(f"{python} is Python {answer['python']}, and Ray needs that of this one, {ours}")
    for name in SAME:
        version = metadata.version(name)
        if name not in answer["has"]:
            same = pip_arguments(name) if name == OWN_DIST else f"'{name}=={version}'"
            how = f"try: {pip_command('install', python)} {same}" if same else f"install {version} there"
            problems.append(f"{python} has no {name}; {how}")
        elif answer["has"][name] != version:
            problems.append(f"{python} has {name} {answer['has'][name]}, this interpreter {version}; install the same")
    return problems

"""Processor time of the commands that people type most: `python benchmarks/startup.py`. Aim: 0.3 s and 0.6 s."""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
from pathlib import Path

COMMANDS = {"--help": 0.3, "plugins": 0.6}


def seconds(command: str) -> float:
    """Return the CPU seconds of the command's process; what the machine does besides does not count."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([Path(sys.executable).with_name("vla-rl"), command], stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


for name, aim in COMMANDS.items():
    print(f"vla-rl {name}: {statistics.median(seconds(name) for _ in range(9)):.2f} s (aim {aim} s)")

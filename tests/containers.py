"""Commands as in a container that has little or no shared memory, without a program for containers."""

from __future__ import annotations

import os
import subprocess
from functools import cache

import pytest

# Docker gives 64 MiB by default, and no /dev/shm with --ipc=none. The command's end ends all that it has started.
SMALL = 'mount -t tmpfs -o "size=$SHARED" shm /dev/shm'
NONE = """
mount -t tmpfs dev /mnt
for name in null zero full random urandom tty; do
  touch "/mnt/$name"
  mount --bind "/dev/$name" "/mnt/$name"
done
ln -s /proc/self/fd /mnt/fd
mount --rbind /mnt /dev
"""
NAMESPACES = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


def container_command(shared: str | None, *command: str) -> list[str]:
    """Return the command that runs `command` with a /dev/shm of this size ("64m"), or without one (None). Skips the
    test where the system does not allow it.
    """
    if shared is None and os.geteuid() != 0:
        pytest.skip("only root can leave /dev/shm out: other users may not write to devices in a /dev of their own")
    if refusal := _find_refusal():
        pytest.skip(f"needs root, or namespaces of users, and `unshare` of util-linux: {refusal}")
    script = f'set -eu\n{NONE if shared is None else SMALL}\nexec "$@"'
    return ["env", f"SHARED={shared}", *_start_of_command(), "sh", "-c", script, "sh", *command]


def _start_of_command() -> list[str]:
    return [*NAMESPACES, *([] if os.geteuid() == 0 else ["--map-root-user"])]


@cache
def _find_refusal() -> str:
    try:
        tried = subprocess.run(
            [*_start_of_command(), "mount", "-t", "tmpfs", "none", "/mnt"], check=False, capture_output=True, text=True
        )
    except FileNotFoundError as exc:
        return str(exc)
    return tried.stderr.strip()

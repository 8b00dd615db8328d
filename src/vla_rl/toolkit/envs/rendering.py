"""Tests of what this machine and its interpreters can render. They run in another process: trying may crash or hang."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

from attrs import frozen

from vla_rl.core.errors import UserError
from vla_rl.toolkit.envs.mujoco_installation import require_whole_mujoco
from vla_rl.toolkit.envs.vulkan import use_unpacked_driver

PROBE_SECONDS = 90.0
GL_PACKAGES = "libegl1 libegl-mesa0 libgl1-mesa-dri libgl1 libgles2"
FIXES = {
    "egl": f"vla-rl install-gl   (or: apt-get install -y {GL_PACKAGES})",
    "osmesa": "apt-get install -y libosmesa6",
    "vulkan": "vla-rl install-gl vulkan   (or: apt-get install -y libvulkan1 mesa-vulkan-drivers, from Mesa 24.3 on)",
}
"""Rendering interface -> the command that installs it."""
INSTALLERS = {"egl": "install_gl.sh", "vulkan": "install_vulkan.sh"}
"""Rendering interface -> script of this folder that installs it."""


BUSY = "the machine may be busy: run `vla-rl doctor` again when it is idle"


@frozen
class ProbeResult:
    """What a probe found."""

    works: bool
    detail: str
    """The last line that the probe printed, or how it ended."""
    timed_out: bool = False
    """The probe gave no answer, which says nothing of what is installed."""

    def choose_remedy(self, fix: str) -> str:
        """Return what to do: `fix` where the probe failed, to try again where it timed out, nothing where it works."""
        return "" if self.works else BUSY if self.timed_out else fix


def install_interface(name: str) -> int:
    """Run the script that installs a rendering interface. Return its exit status. Raises UserError for another name."""
    if name not in INSTALLERS:
        raise UserError(f"{name!r} cannot be installed; there are: {', '.join(INSTALLERS)}")
    return subprocess.run(["sh", str(Path(__file__).with_name(INSTALLERS[name]))], check=False).returncode


def probe_rendering(name: str, seconds: float = PROBE_SECONDS) -> ProbeResult:
    """Run one of `cli.probes.PROBES` in a process."""
    if name == "vulkan":
        use_unpacked_driver()
    command = [sys.executable, "-m", "vla_rl.cli.probes", name]
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return ProbeResult(False, f"no answer within {seconds:g} s", timed_out=True)
    if done.returncode < 0:
        return ProbeResult(False, f"ended by signal {-done.returncode}")
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return ProbeResult(done.returncode == 0, lines[-1] if lines else "said nothing")


probe_once = lru_cache(probe_rendering)


def require_rendering(name: str, user: str) -> None:
    """Raise UserError, with the command that fixes it, if rendering through "egl", "osmesa" or "vulkan" fails here.

    Args:
        user: who needs it, for the message.
    """
    result = probe_once(name)
    if not result.works:
        raise UserError(
            f"{user} draws with {name}, which does not work on this machine: {result.detail}\n"
            f"  {result.choose_remedy(f'fix it with: {FIXES[name]}')}\n"
            f"  `vla-rl doctor` tries everything"
        )


def require_mujoco(user: str) -> None:
    """Raise UserError if MuJoCo is damaged or its interface (MUJOCO_GL or EGL) fails; a window system is not tried."""
    require_whole_mujoco(user)
    interface = os.environ.get("MUJOCO_GL", "egl")
    if interface in FIXES:
        require_rendering(interface, user)


def mujoco_error(error: Exception) -> UserError:
    """Return the UserError for what PyOpenGL and MuJoCo raise on import without a rendering library."""
    return UserError(
        f"MuJoCo cannot render with MUJOCO_GL={os.environ.get('MUJOCO_GL')}: {error}\n"
        f"  install the GL libraries with `{FIXES['egl']}`, or set MUJOCO_GL to egl or osmesa"
    )

"""Vulkan for SAPIEN on machines without a GPU: the software driver that `vla-rl install-gl vulkan` unpacked."""

from __future__ import annotations

import os
from pathlib import Path

CHOICES = ("VK_ICD_FILENAMES", "VK_DRIVER_FILES")
"""Environment variables that choose drivers."""
NVIDIA = tuple(Path(folder, "vulkan/icd.d/nvidia_icd.json") for folder in ("/etc", "/usr/share"))


def unpacked_driver() -> Path:
    """Return the path at which install_vulkan.sh puts the driver's description."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "vla-rl/mesa/lvp_icd.json")


def use_unpacked_driver() -> None:
    """Use the unpacked Vulkan driver, unless one is chosen or a GPU's exists. Call it before SAPIEN is imported."""
    driver = unpacked_driver()
    chosen = any(os.environ.get(name) for name in CHOICES)
    if not chosen and driver.is_file() and not any(file.is_file() for file in NVIDIA):
        os.environ[CHOICES[0]] = str(driver)

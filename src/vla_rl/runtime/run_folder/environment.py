"""Software and hardware of a run, so that its results can be understood later: versions, plugins, machine."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from typing import Any

from vla_rl.core.catalogue import KINDS, installed_plugins
from vla_rl.core.spec.spec import Spec
from vla_rl.version import __version__

LIBRARIES = (
    "torch",
    "numpy",
    "ray",
    "transformers",
    "peft",
    "gymnasium",
    "mujoco",
    "pluggy",
    "attrs",
    "cattrs",
)


def library_versions() -> dict[str, str]:
    """Return the versions of Python, of vla-rl and of the installed `LIBRARIES`."""
    installed = {"python": platform.python_version(), "vla-rl": __version__}
    for name in LIBRARIES:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return installed


def describe_environment(spec: Spec) -> dict[str, Any]:
    """Return versions, plugins, renderer, machine and argv, so that a run's results can be understood later."""
    import torch

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "versions": library_versions(),
        "plugins": {
            kind: {
                name: [item.origin for item in items] for name, items in installed_plugins(kind, spec.plugins).items()
            }
            for kind in KINDS
        },
        "renderer": os.environ.get("MUJOCO_GL", "default"),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "gpus": devices,
        "argv": sys.argv,
    }

"""robotwin/assets.py of the wheel 0.1.3."""

import os
from pathlib import Path

REQUIRED_ASSET_DIRECTORIES = ("assets/background_texture", "assets/embodiments/aloha-agilex", "assets/objects")


def validate_root(path):
    """-> {"root": str, ...}; ValueError for a folder that lacks one of the three. (The wheel also compares the
    revision in `.robotwin-assets.json`, if it exists.)"""
    root = Path(os.fspath(path)).expanduser().resolve()
    missing = [str(root / value) for value in REQUIRED_ASSET_DIRECTORIES if not (root / value).is_dir()]
    if missing:
        raise ValueError(f"RoboTwin asset snapshot is incomplete; missing directories: {missing}")
    return {
        "root": str(root),
        "repository": "TianxingChen/RoboTwin2.0",
        "revision": None,
        "managed": False,
        "manifest": None,
    }

"""Finds RoboTwin's assets, and says how to get them."""

from __future__ import annotations

import os
from pathlib import Path

from vla_rl.core.errors import UserError
from vla_rl.plugins.envs.robotwin.config import RobotwinConfig, to_absolute

ASSET_FOLDERS = ("assets/background_texture", "assets/embodiments/aloha-agilex", "assets/objects")
ASSET_VARIABLES = ("ROBOTWIN_ASSETS_ROOT", "ASSETS_PATH")
DOWNLOAD = (
    "download them (data set TianxingChen/RoboTwin2.0: background_texture.zip, embodiments.zip, objects.zip) with "
    "`robotwin-download-assets --output FOLDER` of the runtime wheel, or `_download_assets.sh` of a checkout, and "
    "name the folder: `assets: FOLDER`, or ROBOTWIN_ASSETS_ROOT; tasks of blocks run with a robot of boxes, which "
    "tools/robotwin_assets.py of a clone of vla-rl writes"
)


def asset_root(config: RobotwinConfig) -> Path:
    """Return the folder that contains `assets/`. Raise UserError, which says how to get them, when none is complete."""
    if config.assets is not None:
        folders = {"assets": config.assets}
    else:
        folders = {name: to_absolute(os.environ[name]) for name in ASSET_VARIABLES if os.environ.get(name)}
        folders |= {"checkout": config.checkout} if config.checkout else {}
    lacking = {}
    for name, root in folders.items():
        missing = [folder for folder in ASSET_FOLDERS if not (root / folder).is_dir()]
        if not missing:
            return root
        lacking[name] = f"{root} ({name}) lacks {', '.join(missing)}"
    looked = "\n  ".join(lacking.values()) or f"neither `assets` nor {' nor '.join(ASSET_VARIABLES)} is set"
    raise UserError(f"RoboTwin's assets are not there:\n  {looked}\n  {DOWNLOAD}")

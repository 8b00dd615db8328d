"""Cameras of a LIBERO scene."""

CAMERAS = {
    "agentview": "agentview",
    "wrist": "robot0_eye_in_hand",
    "frontview": "frontview",
    "sideview": "sideview",
    "birdview": "birdview",
    "galleryview": "galleryview",
    "robotview": "robot0_robotview",
}
"""Name in specs and observations -> name in the simulator."""

"""Selects the graphics card on which MuJoCo draws."""

from __future__ import annotations

import os

from vla_rl.core.errors import UserError

VARIABLE = "MUJOCO_EGL_DEVICE_ID"


def egl_device(device: str, visible: str | None) -> str | None:
    """Return the value of MUJOCO_EGL_DEVICE_ID that makes MuJoCo draw on a torch device; None for a CPU.

    Torch counts only the cards that CUDA_VISIBLE_DEVICES lets through, EGL counts all of the machine. Where cards
    differ, torch counts in EGL's order only with CUDA_DEVICE_ORDER=PCI_BUS_ID.

    Args:
        device: "cuda:1", "cuda", "cpu".
        visible: CUDA_VISIBLE_DEVICES, such as "4,5"; None when it is not set.
    """
    kind, _, index = device.partition(":")
    if kind != "cuda":
        return None
    number = int(index or 0)
    if visible is None:
        return str(number)
    cards = [card.strip() for card in visible.split(",")]
    if number >= len(cards) or not cards[number].isdigit():
        raise UserError(
            f"cannot tell the EGL number of {device} from CUDA_VISIBLE_DEVICES={visible!r}\n"
            f"  name cards by their numbers there, as in CUDA_VISIBLE_DEVICES=4,5"
        )
    return cards[number]


def draw_on(device: str) -> None:
    """Select the card for this process; call it before the first scene is built. A MUJOCO_EGL_DEVICE_ID that is already
    set stays."""
    if VARIABLE in os.environ:
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    number = egl_device(device, visible)
    if number is None and visible is not None and not visible.split(",")[0].isdigit():
        number = "0"  # robosuite fails on an empty CUDA_VISIBLE_DEVICES, which Ray sets, and on cards named by UUID
    if number is not None:
        os.environ[VARIABLE] = number

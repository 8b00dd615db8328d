"""What LIBERO-Plus changes at the start of an episode in a base task's scene."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class StartChanges:
    """Changes of an episode's start. The default changes nothing."""

    view: tuple[int, ...] | None = None
    """Turns and distance of the camera, as in a variant's name; None: LIBERO's own camera."""
    joints: tuple[float, ...] | None = None
    """Joint angles of the arm at reset [rad], to which the controller's rest posture belongs; None: LIBERO's own."""
    keep_joints: bool = False
    """The episode starts with `joints`, which otherwise the initial state overwrites."""


UNCHANGED = StartChanges()

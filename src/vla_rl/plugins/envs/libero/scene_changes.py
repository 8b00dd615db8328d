"""What LIBERO-Plus changes in the files of a task's scene, and at the start of an episode in it."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class SceneChanges:
    """Files of a scene in place of LIBERO's own. The default changes nothing."""

    arena: str | None = None
    """Model file of the room with its table and lights; None: LIBERO's own."""
    floor: str = ""
    """Name of the floor's texture, in the folder of the texture that `arena` gives the floor."""
    wall: str = ""
    """Name of the walls' texture, in the folder of the texture that `arena` gives the walls."""
    objects: tuple[tuple[str, str], ...] = ()
    """Kinds of objects that LIBERO does not have, and their model files."""


UNCHANGED_SCENE = SceneChanges()


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

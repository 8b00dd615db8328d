"""Rooms and objects of LIBERO-Plus's assets, given to LIBERO's own classes. Imports robosuite."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
from libero.libero.envs.arenas.style import STYLE_MAPPING
from libero.libero.envs.base_object import OBJECTS_DICT
from robosuite.models.objects import MujocoXMLObject

from vla_rl.plugins.envs.libero.scene_changes import SceneChanges

LYING = {"x": (-np.pi / 2, -np.pi / 2), "y": (-np.pi, -np.pi), "z": (np.pi, np.pi)}
"""Rotations about three axes [rad], lowest and highest, that the authors give these objects at a reset."""


class AssetObject(MujocoXMLObject):
    """Movable object from a model file of the assets.

    Args:
        model: file of the model.
        kind: kind of object, as task files name it.
        name: name of this object.
    """

    def __init__(self, model: str, kind: str, name: str) -> None:
        super().__init__(
            model,
            name=name,
            joints=[{"type": "free", "damping": "0.0005"}],
            obj_type="all",
            duplicate_collision_geoms=False,
        )
        self.category_name = kind
        self.object_properties: dict[str, Any] = {"vis_site_names": {}}
        self.rotation = LYING
        self.rotation_axis = None

    def _get_object_subtree(self) -> Any:
        """Return the object's body. robosuite looks for it inside another body, and the assets have it in the world."""
        body = self.worldbody.find("./body[@name='object']")
        if body is None or self.worldbody.find("./body/body[@name='object']") is not None:
            return super()._get_object_subtree()
        outer = ET.SubElement(self.worldbody, "body")
        outer.append(body)
        try:
            return super()._get_object_subtree()
        finally:
            self.worldbody.remove(outer)


@contextmanager
def register_changes(changes: SceneChanges) -> Iterator[dict[str, Any]]:
    """Let LIBERO know the objects and textures of a changed scene inside the context. Yield the arguments for its
    environment to build the scene."""
    objects, floors, walls = OBJECTS_DICT.copy(), STYLE_MAPPING["floor"].copy(), STYLE_MAPPING["wall"].copy()
    OBJECTS_DICT.update({kind: partial(AssetObject, model, kind) for kind, model in changes.objects})
    arguments: dict[str, Any] = {}
    if changes.arena is not None:
        STYLE_MAPPING["floor"][changes.floor] = changes.floor
        STYLE_MAPPING["wall"][changes.wall] = changes.wall
        styles = {"floor_style": changes.floor, "wall_style": changes.wall}
        arguments = {"scene_xml": changes.arena, "scene_properties": styles}
    try:
        yield arguments
    finally:
        for table, before in (
            (OBJECTS_DICT, objects),
            (STYLE_MAPPING["floor"], floors),
            (STYLE_MAPPING["wall"], walls),
        ):
            table.clear()
            table.update(before)

"""Simplified meshes for rendering: a Panda arm has 135,000 triangles, which take nine tenths of a CPU's rendering time
of a small image."""

from __future__ import annotations

from typing import Any

import numpy as np

from vla_rl.core.types import Array
from vla_rl.toolkit.envs.meshes import MANY, cluster_vertices, normals_of

_MADE: dict[tuple[str, tuple[float, ...], int, int], tuple[Array, Array, Array]] = {}
"""Cache of simplified meshes by file, scale, part and cells: scenes are built again at each reset."""
_MANY_FACES: dict[str, bool] = {}
"""Cache by file: whether its mesh has many triangles and no textures."""


def simplify_meshes(scene: Any, cells: int) -> None:
    """Simplify the meshes that a SAPIEN scene draws. Shapes with textures and collision shapes stay as they are.

    Args:
        cells: resolution, as `cluster_vertices` takes it.
    """
    from sapien import render

    for entity in scene.entities:
        body = entity.find_component_by_type(render.RenderBodyComponent)
        if body is None or not any(map(_has_many_faces, body.render_shapes)):
            continue
        lighter = render.RenderBodyComponent()
        for shape in body.render_shapes:
            for part in _simplify_shape(shape, cells) if _has_many_faces(shape) else [shape.clone()]:
                lighter.attach(part)
        lighter.visibility, lighter.shading_mode = body.visibility, body.shading_mode
        entity.remove_component(body)
        entity.add_component(lighter)


def _has_many_faces(shape: Any) -> bool:
    from sapien import render

    if not isinstance(shape, render.RenderShapeTriangleMesh) or not shape.filename:
        return False
    if shape.filename not in _MANY_FACES:
        many = sum(len(part.triangles) for part in shape.parts) > MANY
        plain = all(part.material.base_color_texture is None for part in shape.parts)
        _MANY_FACES[shape.filename] = many and plain
    return _MANY_FACES[shape.filename]


def _simplify_shape(shape: Any, cells: int) -> list[Any]:
    from sapien import render

    lighter_parts, scale = [], np.asarray(shape.scale)
    for i, part in enumerate(shape.parts):
        key = (shape.filename, tuple(scale.tolist()), i, cells)
        if key not in _MADE:
            vertices, triangles = np.asarray(part.vertices) * scale, np.asarray(part.triangles, np.int64)
            mesh = cluster_vertices(vertices, triangles, cells)
            _MADE[key] = mesh.vertices, mesh.triangles.astype(np.uint32), normals_of(vertices, triangles, mesh)
        points, corners, normals = _MADE[key]
        if len(corners):
            none = np.zeros((len(points), 2), np.float32)
            lighter = render.RenderShapeTriangleMesh(points, corners, normals, none, part.material)
            lighter.local_pose = shape.local_pose
            lighter_parts.append(lighter)
    return lighter_parts

"""Simpler meshes in the place of those that are drawn. A Panda arm has 135,000 triangles, and a processor spends nine
tenths of a small picture on them."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
CELL = 0.008
"""Metres: vertices within a cube of this edge become one."""
MANY = 1000
"""Triangles; shapes with fewer stay as they are."""

_MADE: dict[tuple[str, tuple[float, ...], int], tuple[Array, Array, Array]] = {}
"""By file, scale and part: scenes are built anew at each reset."""


def simplify(scene: Any) -> None:
    """What a SAPIEN scene draws. Shapes with textures stay as they are, and so does what collides."""
    from sapien import render

    for entity in scene.entities:
        body = entity.find_component_by_type(render.RenderBodyComponent)
        if body is None or not any(map(_is_heavy, body.render_shapes)):
            continue
        lighter = render.RenderBodyComponent()
        for shape in body.render_shapes:
            for part in _lighter(shape) if _is_heavy(shape) else [shape.clone()]:
                lighter.attach(part)
        lighter.visibility, lighter.shading_mode = body.visibility, body.shading_mode
        entity.remove_component(body)
        entity.add_component(lighter)


def clustered(vertices: Array, triangles: Array, cell: float) -> tuple[Array, Array, Array]:
    """Vertices [V, 3] in metres and triangles [T, 3] with one vertex for those within each cube of edge `cell`, their
    mean (Rossignac and Borrel 1993). -> float32 [V', 3], uint32 [T', 3] without those that vanish or come twice, and
    normals float32 [V', 3], means of the old triangles by their areas."""
    places = np.floor(vertices / cell).astype(np.int64)
    places -= places.min(0)
    sides = places.max(0) + 1
    _, into, counts = np.unique(
        np.ravel_multi_index(tuple(places.T), tuple(sides)), return_inverse=True, return_counts=True
    )
    corners = vertices[triangles]
    areas = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    merged = into[triangles]

    def sums(of: Array, numbers: Array) -> Array:
        return np.stack([np.bincount(of, column, len(counts)) for column in numbers.T], axis=1)

    normals = sums(merged.ravel(), areas.repeat(3, axis=0))
    normals /= np.linalg.norm(normals, axis=1, keepdims=True).clip(1e-12)
    kept = merged[(merged != np.roll(merged, 1, axis=1)).all(1)]
    turns = kept.argmin(1)[:, None] + np.arange(3)  # from the smallest on; the way round says which side is outside
    triangles = np.unique(np.take_along_axis(kept, turns % 3, axis=1), axis=0)
    middles = sums(into, vertices) / counts[:, None]
    return middles.astype(np.float32), triangles.astype(np.uint32), normals.astype(np.float32)


def _is_heavy(shape: Any) -> bool:
    from sapien import render

    return (
        isinstance(shape, render.RenderShapeTriangleMesh)
        and bool(shape.filename)
        and sum(len(part.triangles) for part in shape.parts) > MANY
        and all(part.material.base_color_texture is None for part in shape.parts)
    )


def _lighter(shape: Any) -> list[Any]:
    from sapien import render

    found, scale = [], np.asarray(shape.scale)
    for i, part in enumerate(shape.parts):
        key = (shape.filename, tuple(scale.tolist()), i)
        if key not in _MADE:
            _MADE[key] = clustered(np.asarray(part.vertices) * scale, np.asarray(part.triangles, np.int64), CELL)
        vertices, triangles, normals = _MADE[key]
        if len(triangles):
            none = np.zeros((len(vertices), 2), np.float32)
            lighter = render.RenderShapeTriangleMesh(vertices, triangles, normals, none, part.material)
            lighter.local_pose = shape.local_pose
            found.append(lighter)
    return found

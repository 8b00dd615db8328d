"""Meshes with fewer triangles, for pictures that a processor draws: a robot's arm has more than 100,000, whatever the
size of the picture."""

from __future__ import annotations

import numpy as np
from attrs import frozen

from vla_rl.core.types import Array

MANY = 1000
"""Triangles; meshes with fewer need not be made simpler."""
FEWEST, MOST = 16, 32
"""Cells, as `clustered` takes them: with these pictures of 64 pixels look alike, and pictures of 224."""


@frozen(kw_only=True, eq=False)
class Clustered:
    """A mesh with one vertex in the place of several."""

    vertices: Array
    """float32 [V', 3]."""
    triangles: Array
    """int64 [T', 3]: of these vertices; which way round says which side is outside, as before."""
    kept: Array
    """int64 [T']: which of the old triangles they were."""
    into: Array
    """int64 [V]: what each of the old vertices became."""


def cells_for(side: int) -> int:
    """For pictures whose larger side has so many pixels: a cell is about a pixel where a mesh fills a quarter of it."""
    return min(max(side // 4, FEWEST), MOST)


def clustered(vertices: Array, triangles: Array, cells: int) -> Clustered:
    """One vertex for those within each cube, their mean (Rossignac and Borrel 1993); triangles that vanish, or come
    twice the same way round, leave.

    Args:
        vertices: [V, 3].
        triangles: int [T, 3].
        cells: cubes along the longest side of the mesh.
    """
    low, high = vertices.min(0), vertices.max(0)
    places = ((vertices - low) / max((high - low).max(), 1e-12) * cells).astype(np.int64).clip(max=cells - 1)
    numbers = np.ravel_multi_index(tuple(places.T), tuple(places.max(0) + 1))
    _, into, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    middles = np.stack([np.bincount(into, column, len(counts)) for column in vertices.T], axis=1) / counts[:, None]
    merged = into[triangles]
    whole = np.flatnonzero((merged != np.roll(merged, 1, axis=1)).all(1))
    turned = merged[whole].argmin(1)[:, None] + np.arange(3)  # from the smallest on, so that equal ones look equal
    _, first = np.unique(np.take_along_axis(merged[whole], turned % 3, axis=1), axis=0, return_index=True)
    kept = whole[np.sort(first)]
    return Clustered(vertices=middles.astype(np.float32), triangles=merged[kept], kept=kept, into=into)


def normals_of(vertices: Array, triangles: Array, mesh: Clustered) -> Array:
    """float32 [V', 3]: the mean of the old triangles' at each new vertex, by their areas."""
    corners = vertices[triangles]
    areas = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]).repeat(3, axis=0)
    at = mesh.into[triangles].ravel()
    normals = np.stack([np.bincount(at, column, len(mesh.vertices)) for column in areas.T], axis=1)
    lengths: Array = np.linalg.norm(normals, axis=1, keepdims=True)
    unit: Array = (normals / lengths.clip(1e-12)).astype(np.float32)
    return unit

"""Scenes that are cheaper in software: no effects, simplified meshes (an arm can have more than 100,000 triangles)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

from vla_rl.core.types import Array

if TYPE_CHECKING:
    import mujoco

MANY = 1000
"""Triangles up to which a mesh is not simplified."""
FEWEST, MOST = 16, 32
"""Bounds of `cells` for `cluster_vertices`. Within them images of 64 and of 224 pixels look unchanged."""
CHANGED = ("mesh_vert", "mesh_face", "mesh_facenormal", "mesh_facetexcoord", "mesh_facenum")
"""Arrays of a MuJoCo model that `simplify_meshes` replaces."""


@frozen(kw_only=True, eq=False)
class Clustered:
    """A simplified mesh, in which one vertex replaces each cluster of vertices."""

    vertices: Array
    """Vertices, float32 [V', 3]."""
    triangles: Array
    """Vertex indices of each triangle, int64 [T', 3]. Their order says which side is outside, as before."""
    kept: Array
    """Index of each triangle in the original mesh, int64 [T']."""
    into: Array
    """New vertex of each original vertex, int64 [V]."""


def cells_for(side: int) -> int:
    """Return the cells for images of this many pixels a side: about a pixel each if a mesh fills a quarter of them."""
    return min(max(side // 4, FEWEST), MOST)


def cluster_vertices(vertices: Array, triangles: Array, cells: int) -> Clustered:
    """Replace vertices in each cube by their mean (Rossignac and Borrel 1993), without degenerate and equal triangles.

    Args:
        vertices: [V, 3].
        triangles: int [T, 3].
        cells: cubes along the longest side of the mesh.
    """
    low, high = vertices.min(0), vertices.max(0)
    cells_of = ((vertices - low) / max((high - low).max(), 1e-12) * cells).astype(np.int64).clip(max=cells - 1)
    numbers = np.ravel_multi_index(tuple(cells_of.T), tuple(cells_of.max(0) + 1))
    _, into, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    middles = np.stack([np.bincount(into, column, len(counts)) for column in vertices.T], axis=1) / counts[:, None]
    merged = into[triangles]
    distinct = np.flatnonzero((merged != np.roll(merged, 1, axis=1)).all(1))
    turned = merged[distinct].argmin(1)[:, None] + np.arange(3)  # smallest index first: equal triangles compare equal
    _, first = np.unique(np.take_along_axis(merged[distinct], turned % 3, axis=1), axis=0, return_index=True)
    kept_triangles = distinct[np.sort(first)]
    return Clustered(
        vertices=middles.astype(np.float32), triangles=merged[kept_triangles], kept=kept_triangles, into=into
    )


def normals_of(vertices: Array, triangles: Array, mesh: Clustered) -> Array:
    """Return the normal of each new vertex, float32 [V', 3]: the area-weighted mean of the triangles' normals."""
    corners = vertices[triangles]
    areas = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]).repeat(3, axis=0)
    at = mesh.into[triangles].ravel()
    normals = np.stack([np.bincount(at, column, len(mesh.vertices)) for column in areas.T], axis=1)
    lengths: Array = np.linalg.norm(normals, axis=1, keepdims=True)
    unit: Array = (normals / lengths.clip(1e-12)).astype(np.float32)
    return unit


@contextmanager
def simplify_meshes(model: mujoco.MjModel, cells: int) -> Iterator[None]:
    """Replace the model's meshes by simpler ones inside the context, for code that copies them to a graphics card. The
    physics afterwards is as before. Corners keep their normals and texture coordinates. Two 64-pixel images of a LIBERO
    scene have 600,000 triangles, which take nine tenths of a CPU's rendering time.

    Args:
        cells: resolution, as `cluster_vertices` takes it.
    """
    originals = {name: getattr(model, name).copy() for name in CHANGED}
    try:
        for mesh in range(model.nmesh):
            faces, vertices = int(model.mesh_faceadr[mesh]), int(model.mesh_vertadr[mesh])
            all_faces = slice(faces, faces + int(model.mesh_facenum[mesh]))
            all_vertices = slice(vertices, vertices + int(model.mesh_vertnum[mesh]))
            if model.mesh_facenum[mesh] <= MANY:
                continue
            simple = cluster_vertices(model.mesh_vert[all_vertices], model.mesh_face[all_faces], cells)
            if not len(simple.kept):
                continue
            left = slice(faces, faces + len(simple.kept))
            model.mesh_vert[vertices : vertices + len(simple.vertices)] = simple.vertices
            model.mesh_face[left] = simple.triangles
            for corners in (model.mesh_facenormal, model.mesh_facetexcoord):
                corners[left] = corners[all_faces][simple.kept]
            model.mesh_facenum[mesh] = len(simple.kept)
        yield
    finally:
        for name, array in originals.items():
            getattr(model, name)[:] = array


def turn_effects_off(model: mujoco.MjModel) -> None:
    """Turn shadows, reflections and multisampling off, before the model has a renderer. Its physics is as before."""
    model.light_castshadow[:] = 0
    model.mat_reflectance[:] = 0
    model.vis.quality.offsamples = 0
    model.vis.quality.shadowsize = 0  # its shadow map takes 64 MiB

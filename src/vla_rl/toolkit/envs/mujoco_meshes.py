"""Simplified meshes of a MuJoCo model for rendering: two 64-pixel images of a LIBERO scene have 600,000 triangles,
which take nine tenths of a CPU's rendering time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vla_rl.toolkit.envs.meshes import MANY, clustered

if TYPE_CHECKING:
    import mujoco

CHANGED = ("mesh_vert", "mesh_face", "mesh_facenormal", "mesh_facetexcoord", "mesh_facenum")


@contextmanager
def simplified(model: mujoco.MjModel, cells: int) -> Iterator[None]:
    """Replace the model's meshes by simpler ones inside the context, for code that copies them to a graphics card. The
    physics afterwards is as before. Corners keep their normals and texture coordinates.

    Args:
        cells: resolution, as `clustered` takes it.
    """
    originals = {name: getattr(model, name).copy() for name in CHANGED}
    try:
        for mesh in range(model.nmesh):
            faces, vertices = int(model.mesh_faceadr[mesh]), int(model.mesh_vertadr[mesh])
            all_faces = slice(faces, faces + int(model.mesh_facenum[mesh]))
            all_vertices = slice(vertices, vertices + int(model.mesh_vertnum[mesh]))
            if model.mesh_facenum[mesh] <= MANY:
                continue
            simple = clustered(model.mesh_vert[all_vertices], model.mesh_face[all_faces], cells)
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

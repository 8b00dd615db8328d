"""Simplified meshes, by numbers alone."""

from __future__ import annotations

import numpy as np
import pytest

from vla_rl.core.types import Array
from vla_rl.toolkit.envs.meshes import cells_for, cluster_vertices, normals_of


def sphere(rings: int) -> tuple[Array, Array]:
    """Return a sphere of radius 1, its triangles counter-clockwise from outside."""
    across, around = np.linspace(0, np.pi, rings + 1), np.linspace(0, 2 * np.pi, 2 * rings, endpoint=False)
    theta, phi = np.meshgrid(across, around, indexing="ij")
    vertices = np.stack([np.sin(theta) * np.cos(phi), np.sin(theta) * np.sin(phi), np.cos(theta)], -1).reshape(-1, 3)
    i, j = np.meshgrid(np.arange(rings), np.arange(2 * rings), indexing="ij")
    at = lambda i, j: (i * 2 * rings + j % (2 * rings)).ravel()  # noqa: E731
    one = np.stack([at(i, j), at(i + 1, j), at(i + 1, j + 1)], 1)
    other = np.stack([at(i, j), at(i + 1, j + 1), at(i, j + 1)], 1)
    return vertices, np.concatenate([one, other])


def test_a_shape_keeps_its_place_and_its_outside() -> None:
    vertices, triangles = sphere(60)
    mesh = cluster_vertices(vertices, triangles, 10)
    points, faces, normals = mesh.vertices, mesh.triangles, normals_of(vertices, triangles, mesh)
    assert 100 < len(points) < 700 and len(faces) < len(triangles) / 8
    assert points.dtype == normals.dtype == np.float32
    assert np.array_equal(mesh.into[triangles[mesh.kept]], faces)
    assert np.abs(points[mesh.into] - vertices).max() < 0.2
    assert np.abs(np.linalg.norm(points, axis=1) - 1).max() < 0.05
    assert (normals * points).sum(1).min() > 0.95
    corners = points[faces]
    outward = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    assert ((outward * corners.mean(1)).sum(1) > 0).mean() > 0.99


def test_small_cells_change_nothing_and_large_ones_leave_nothing() -> None:
    vertices, triangles = sphere(8)
    mesh = cluster_vertices(vertices, triangles, 2000)
    points, faces = mesh.vertices, mesh.triangles
    area = np.linalg.norm(np.cross(*(points[faces[:, i]] - points[faces[:, 0]] for i in (1, 2))), axis=1).sum() / 2
    whole = np.linalg.norm(np.cross(*(vertices[triangles[:, i]] - vertices[triangles[:, 0]] for i in (1, 2))), axis=1)
    assert np.isclose(area, whole.sum() / 2, rtol=1e-5)
    assert not len(cluster_vertices(vertices, triangles, 1).triangles)


def test_two_sides_of_a_sheet_both_stay() -> None:
    square = np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0]], float)
    above, below = [[0, 1, 2], [0, 2, 3]], [[2, 1, 0], [3, 2, 0]]
    sheet = np.concatenate([square + [0, 0, 1e-3], square])
    faces = cluster_vertices(sheet, np.array(above + [[a + 4 for a in t] for t in below]), 8).triangles
    assert len(faces) == 4


@pytest.mark.parametrize(("side", "cells"), [(16, 16), (64, 16), (100, 25), (128, 32), (480, 32)])
def test_larger_images_show_finer_meshes(side: int, cells: int) -> None:
    assert cells_for(side) == cells

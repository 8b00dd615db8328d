"""Starts of Ray's workers that the working directory or another cause spoils."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.own_ray]
RAY = {"backend": "ray"}


def test_the_working_directory_hides_no_module_from_workers(train, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("types", "math", "torch"):
        (tmp_path / f"{name}.py").touch()
    _, metrics = train(runtime=RAY)
    assert metrics == train("local")[1]

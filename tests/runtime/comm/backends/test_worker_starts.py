"""Starts of Ray's workers that the working directory or another cause spoils."""

from __future__ import annotations

import pytest

from vla_rl.core.errors import WorkerDied

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.own_ray]
RAY = {"backend": "ray"}


def test_the_working_directory_hides_no_module_from_workers(train, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("types", "math", "torch"):
        (tmp_path / f"{name}.py").touch()
    _, metrics = train(runtime=RAY)
    assert metrics == train("local")[1]


@pytest.mark.parametrize("said", ["no licence for this machine", ""])
def test_a_process_that_ends_while_it_starts_ends_the_wait(train, tmp_path, monkeypatch, said):
    """Python runs a `sitecustomize.py` before anything else."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if any('default_worker' in part for part in sys.orig_argv):\n"
        f"    sys.stderr.write({said!r})\n    sys.stderr.flush()\n"
        "    os._exit(3)\n"
    )
    monkeypatch.chdir(tmp_path)
    wrote = f":\n  {said}" if said else r" nothing; was it killed\?"
    with pytest.raises(WorkerDied, match=f"a worker's process ended while it started, and wrote{wrote}"):
        train(runtime=RAY)

"""A suite that cannot end well does not start."""

from __future__ import annotations

from pathlib import Path

import pytest

import suite_start


def test_a_full_disk_is_named() -> None:
    suite_start.check_disk(Path("/tmp"), suite_start.DISK)
    with pytest.raises(pytest.exit.Exception, match=r"up to 1 GiB to /tmp, which has 0.5 free: .* TMPDIR="):
        suite_start.check_disk(Path("/tmp"), 2**29)


def test_two_suites_in_one_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite_start, "_locks", [])
    suite_start.claim_checkout(tmp_path)
    with pytest.raises(pytest.exit.Exception, match="another suite runs in .*: wait for its end, or use another clone"):
        suite_start.claim_checkout(tmp_path)
    suite_start._locks.pop().close()
    suite_start.claim_checkout(tmp_path)

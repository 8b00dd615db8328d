"""`vla-rl report`: one page about a run, to look at and to send."""

from __future__ import annotations

from pathlib import Path

from vla_rl.cli.report.gather import gather
from vla_rl.cli.report.page import page
from vla_rl.core.paths import about, check_file, write_whole


def write(folder: Path, output: Path | None, video_mb: float) -> Path:
    """Write the page. Return its file. Raises UserError if the folder holds no run."""
    run, target = gather(folder), output or folder / "report.html"
    named = "--output" if output else "RUN"
    check_file(named, target)
    text = page(run, int(video_mb * 1e6))
    with about(named, target):
        write_whole(target, text.encode("utf-8", "replace").decode())  # names of files and in JSON may be no Unicode
    return target

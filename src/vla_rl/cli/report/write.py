"""`vla-rl report`: one page about a run, to look at and to send."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vla_rl.cli.report.gather import read_report_data
from vla_rl.cli.report.page import render_report
from vla_rl.core.paths import check_file, explain_path_errors, write_whole


def write_report(folder: Path, output: Path | None, video_mb: float) -> Path:
    """Write the page. Return its file. Raises UserError if the folder holds no run."""
    run, target = read_report_data(folder), output or folder / "report.html"
    named = "--output" if output else "RUN"
    check_file(named, target)
    text = render_report(run, int(video_mb * 1e6))
    with explain_path_errors(named, target):
        write_whole(target, text.encode("utf-8", "replace").decode())  # names of files and in JSON may be no Unicode
    return target


def print_file(page: Path, given: Any) -> None:
    """Print where the page is."""
    print(f"wrote {page}")

"""The file spec.yaml of a run folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vla_rl.core.spec.spec import Spec, load_spec

SPEC = "spec.yaml"
"""Name of the file."""


def load_run_spec(folder: Path, overrides: Sequence[str] = ()) -> Spec:
    """Read the spec of a run. Raise SpecError with every problem.

    Args:
        overrides: `dotted.path=value`.
    """
    return load_spec(folder / SPEC, overrides, recorded=True)

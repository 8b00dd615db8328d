"""The file spec.yaml of a run folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vla_rl.core.spec.spec import Spec, load_spec
from vla_rl.runtime.run_folder.old_names import current_spec

SPEC = "spec.yaml"
"""Name of the file."""


def load_run_spec(folder: Path, overrides: Sequence[str] = ()) -> Spec:
    """Read the spec of a run, also of one that an earlier version made. Raise SpecError with every problem.

    Args:
        overrides: `dotted.path=value`, with the keys of this version.
    """
    return load_spec(folder / SPEC, overrides, current_spec)

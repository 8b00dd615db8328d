"""`vla-rl examples`: the specs that come with the package, for those who have no clone of the repository."""

from __future__ import annotations

from pathlib import Path

from vla_rl.core.errors import UserError
from vla_rl.core.paths import about, check_folder

FOLDER = Path(__file__).with_name("examples")
"""Links to the files of the repository; a wheel has the files."""
CALLED = "examples"


def examples() -> list[Path]:
    """Return the files, by name."""
    return sorted(FOLDER.glob("*.yaml"))


def shipped(path: Path) -> Path | None:
    """Return the file that `examples/NAME.yaml` means where there is no such file; None for any other path."""
    example = FOLDER / path.name
    return example if path.parts[:-1] == (CALLED,) and example in examples() else None


def first_line(file: Path) -> str:
    """Return an example's description: its first sentence."""
    lines = file.read_text(encoding="utf-8").splitlines()
    comment: list[str] = []
    for line in lines:
        if not line.startswith("# "):
            break
        comment.append(line[2:].strip())
    return " ".join(comment).partition(". ")[0].partition(" vla-rl run ")[0].strip().removesuffix(".")


def copy(folder: Path) -> list[Path]:
    """Copy all examples to a folder. Return the new files. Raises UserError if a different file has the same name."""
    check_folder("--to", folder)
    new = {folder / file.name: file.read_text(encoding="utf-8") for file in examples()}
    for target, text in new.items():
        if target.exists() and (not target.is_file() or target.read_text(encoding="utf-8") != text):
            raise UserError(f"{target} is there and is not as it comes; choose another folder with --to")
    with about("--to", folder):
        folder.mkdir(parents=True, exist_ok=True)
        for target, text in new.items():
            target.write_text(text, encoding="utf-8")
    return list(new)

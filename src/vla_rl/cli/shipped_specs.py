"""Specs in the package, for those who have no clone of the repository: `vla-rl examples` and `vla-rl recipes`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from attrs import frozen

from vla_rl.core.errors import UserError, did_you_mean
from vla_rl.core.paths import check_folder, explain_path_errors

SUFFIX = ".yaml"
ACTIONS = ("list", "show", "copy")


@frozen(kw_only=True)
class SpecCollection:
    """Folder of specs in the package. Its files are links to those of the repository; a wheel has the files."""

    name: str
    """Command that lists it, and the folder of its files in names such as `examples/NAME.yaml`."""

    @property
    def folder(self) -> Path:
        return Path(__file__).with_name(self.name)

    @property
    def files(self) -> list[Path]:
        """Return the files, by name."""
        return sorted(self.folder.glob(f"*{SUFFIX}"))


EXAMPLES = SpecCollection(name="examples")
RECIPES = SpecCollection(name="recipes")
COLLECTIONS = (EXAMPLES, RECIPES)


def find_shipped(path: Path) -> Path | None:
    """Return the file of the package that `NAME`, `NAME.yaml` or `examples/NAME.yaml` means if no such file exists;
    None for any other path."""
    for collection in COLLECTIONS:
        file = collection.folder / f"{path.name.removesuffix(SUFFIX)}{SUFFIX}"
        if path.parts[:-1] in ((), (collection.name,)) and file in collection.files:
            return file
    return None


def suggest_specs(path: Path) -> str:
    """Return where the specs of the package are listed, after the one that `path` may mean."""
    names = [file.stem for collection in COLLECTIONS for file in collection.files]
    listed = " and ".join(f"`vla-rl {collection.name}`" for collection in COLLECTIONS)
    return f"{did_you_mean(path.stem, names)}; {listed} list the specs that come with vla-rl"


def first_line(file: Path) -> str:
    """Return a spec's description: the first sentence of its head."""
    lines = file.read_text(encoding="utf-8").splitlines()
    comment = [line[2:].strip() for line in takewhile(lambda line: line.startswith("# "), lines)]
    return " ".join(comment).partition(". ")[0].partition(" vla-rl run ")[0].strip().removesuffix(".")


def choose_specs(collection: SpecCollection, action: str, names: Sequence[str], to: Path | None) -> list[Path]:
    """Return the files of specs, or with the action "copy" their copies in a folder; arguments as of
    `vla_rl.examples`. Raises UserError, also for an unknown name."""
    if action not in ACTIONS:
        raise UserError(
            f"vla-rl {collection.name}: there is no {action!r}{did_you_mean(action, ACTIONS)}; there are: "
            f"{', '.join(ACTIONS)}"
        )
    if to is not None and action != "copy":
        raise UserError(f"--to is where specs are copied to: vla-rl {collection.name} copy [NAME]... --to {to}")
    if action == "show" and not names:
        raise UserError(f"name what to show: vla-rl {collection.name} show NAME")
    files = {file.stem: file for file in collection.files}
    stems = [Path(name).name.removesuffix(SUFFIX) for name in names]
    for stem in stems:
        if stem not in files:
            raise UserError(f"there is no {stem!r} among the {collection.name}{did_you_mean(stem, files)}")
    chosen = [files[stem] for stem in stems] or collection.files
    return _copy_specs(chosen, to or Path()) if action == "copy" else chosen


def print_specs(files: Sequence[Path], given: Any) -> None:
    """Print a line a spec, with its description; or what is in it; or where its copy is."""
    width = max(len(file.stem) for file in files)
    for file in files:
        if given.action == "show":
            print(file.read_text(encoding="utf-8"), end="")
        else:
            print(file if given.action == "copy" else f"{file.stem:<{width}}  {first_line(file)}")


def _copy_specs(files: Sequence[Path], folder: Path) -> list[Path]:
    """Copy specs to a folder. Return the new files. Raises UserError if a different file has the same name."""
    check_folder("--to", folder)
    texts = {folder / file.name: file.read_text(encoding="utf-8") for file in files}
    for target, text in texts.items():
        if target.exists() and (not target.is_file() or target.read_text(encoding="utf-8") != text):
            raise UserError(f"{target} is there and is not as it comes; choose another folder with --to")
    with explain_path_errors("--to", folder):
        folder.mkdir(parents=True, exist_ok=True)
        for target, text in texts.items():
            target.write_text(text, encoding="utf-8")
    return list(texts)

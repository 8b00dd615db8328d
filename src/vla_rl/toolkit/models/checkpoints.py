"""Checkpoints of models: where they lie (a folder, beside a plugin, in the Hugging Face hub's cache), which files of
weights they have, and what is wrong with them. Light to import."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from attrs import frozen

from vla_rl.core.errors import CheckpointError
from vla_rl.toolkit.waiting import waiting

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*(@[\w./-]+)?")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"
UNFINISHED = (".incomplete", ".part", ".partial", ".crdownload", ".aria2")
MB = 10**6
Shapes = Mapping[str, tuple[int, ...]]


def resolve(name: str, wanted: Sequence[str], builtin: Path | None = None, download: bool = True) -> Path:
    """`builtin:NAME`, a folder, or `OWNER/NAME[@REVISION]` of the hub -> the folder. A hub name is taken from the local
    cache, or fetched into it (unless `download` is False). Raises CheckpointError when there is none.

    Args:
        wanted: patterns of the files of a hub repository that are read; nothing else is fetched.
        builtin: folder of the checkpoints that ship with the plugin.
    """
    if builtin is not None and name.startswith("builtin:"):
        folder = builtin / name.removeprefix("builtin:")
        if not folder.is_dir():
            there = ", ".join(f"builtin:{p.name}" for p in sorted(builtin.glob("*")) if p.is_dir()) or "none"
            raise CheckpointError(f"no built-in checkpoint {name!r}; there are: {there}")
        return folder
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if HUB_NAME.fullmatch(name):
        return _from_hub(name, wanted, download)
    raise CheckpointError(f"checkpoint {name!r} is not a folder (looked at {folder.absolute()})")


def save_tensors(tensors: Mapping[str, Tensor], file: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors of the host as safetensors, with the mode of any new file: the library's is for the owner alone."""
    from safetensors.torch import save_file

    save_file(dict(tensors), file, metadata=None if metadata is None else dict(metadata))
    open_to_readers(file.parent, [file])


def open_to_readers(folder: Path, files: Iterable[Path] | None = None) -> None:
    """Give files in a folder (None: all) at least the mode that a new file gets there, as the umask says."""
    probe = folder / ".mode"
    probe.touch()
    mode = probe.stat().st_mode
    probe.unlink()
    for file in folder.rglob("*") if files is None else files:
        if file.is_file() and not file.is_symlink():
            file.chmod(stat.S_IMODE(file.stat().st_mode | mode))


def folder_of(name: str, builtin: Path | None = None) -> Path | None:
    """As `resolve`, without asking the hub or its cache: None for a name of the hub."""
    folder = Path(name).expanduser()
    return None if HUB_NAME.fullmatch(name) and not folder.is_dir() else resolve(name, (), builtin)


def _from_hub(name: str, wanted: Sequence[str], download: bool) -> Path:
    try:
        from huggingface_hub import constants, snapshot_download
    except ImportError as error:
        raise CheckpointError(
            f"checkpoint {name!r} is not a folder here; a hub name needs huggingface_hub installed ({error})"
        ) from error
    repository, _, revision = name.partition("@")
    try:
        return Path(
            snapshot_download(
                repository, revision=revision or None, allow_patterns=list(wanted), local_files_only=not download
            )
        )
    except Exception as error:  # many kinds: no network, offline mode, no such repository, a gate, a full disk
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        which = f"{repository}{f' --revision {revision}' if revision else ''}"
        raise CheckpointError(
            f"checkpoint {name!r} is neither a folder ({Path(name).absolute()}) nor in the hub's cache "
            f"({constants.HF_HUB_CACHE}), and could not be fetched: {reason}\n"
            f"  where there is network: hf download {which} --local-dir FOLDER, then set model.checkpoint: FOLDER;\n"
            f"  or copy the folder models--{repository.replace('/', '--')} of another machine's cache into this one"
        ) from error


# ------------------------------------------------------------------------------------------------------- single files


def read_file(path: Path, reader: Callable[[Path], T]) -> T:
    """Whatever is wrong with a file of a checkpoint becomes an error that names the file."""
    if not path.is_file():
        clause = unfinished(path.parent)
        raise CheckpointError(f"{path.parent} is not a complete checkpoint: it has no {path.name}{clause}")
    try:
        return reader(path)
    except CheckpointError:
        raise
    except Exception as error:
        raise unreadable(path, error) from error


def read_json(path: Path) -> dict[str, Any]:
    """Raises CheckpointError for a file that is missing or holds no JSON object."""
    content = read_file(path, lambda file: json.loads(file.read_text()))
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not a {type(content).__name__}")
    return content


def find_tokenizer(folder: Path, named: str | None) -> Path:
    """tokenizer.json, in the checkpoint's folder or where the spec says. Raises CheckpointError."""
    given = folder if named is None else Path(named).expanduser()
    file = given / TOKENIZER if given.is_dir() else given
    if not file.is_file():
        raise CheckpointError(
            f"no tokenizer at {file}; checkpoints often come without their language model's: put tokenizer.json into "
            "the folder, or name it in model.tokenizer"
        )
    return file


def unreadable(path: Path, error: Exception) -> CheckpointError:
    """The error for a file of a checkpoint that cannot be read, with the usual causes."""
    with path.open("rb") as file:
        pointer = file.read(40).startswith(b"version https://git-lfs")
    if pointer:
        return CheckpointError(f"{path} is a Git LFS pointer and not the file itself; run `git lfs pull` there")
    cut_off = "incomplete" in str(error).lower()
    short = "; it ends too early, as after a download that was cut off: fetch it again" if cut_off else ""
    return CheckpointError(f"cannot read {path}: {error}{short}")


def unfinished(folder: Path) -> str:
    """A clause that names the files of a download that did not finish, or nothing."""
    found = [p for p in folder.rglob("*") if p.suffix in UNFINISHED]
    names = ", ".join(str(p.relative_to(folder)) for p in sorted(found)[:4])
    return f"; unfinished downloads lie there: {names}" if found else ""


# --------------------------------------------------------------------------------------------------- files of weights


@frozen(kw_only=True)
class WeightFiles:
    """The tensors of a folder and the files that hold them."""

    folder: Path
    files: Mapping[Path, Mapping[str, str]]
    """File -> name of a tensor in it -> name that it goes by."""
    shapes: Shapes
    """By the names that tensors go by."""

    def each(self, visit: Callable[[str, Tensor], None]) -> None:
        """Call with every tensor on the CPU, one at a time."""
        from safetensors import safe_open

        read = 0
        with waiting("loading the model", sum(path.stat().st_size for path in self.files) // MB) as note:
            for path, names in self.files.items():
                try:
                    with safe_open(path, "pt") as file:
                        for inside, name in names.items():
                            tensor = file.get_tensor(inside)
                            visit(name, tensor)
                            read += tensor.numel() * tensor.element_size()
                            note(read // MB)
                except CheckpointError:
                    raise
                except Exception as error:
                    raise unreadable(path, error) from error


def as_they_are(names: Collection[str]) -> Mapping[str, str]:
    return {name: name for name in names}


def find_weights(folder: Path, open_names: Callable[[Collection[str]], Mapping[str, str]] = as_they_are) -> WeightFiles:
    """The files' headers, not their tensors. Raises CheckpointError for files that are missing, half there or
    unreadable.

    Args:
        open_names: names of all tensors -> those they go by; what it leaves out is not read.
    """
    from safetensors import safe_open

    found: dict[Path, dict[str, tuple[int, ...]]] = {}
    for path in _weight_paths(folder):
        try:
            with safe_open(path, "pt") as file:
                names = tuple(file.keys())
                found[path] = {name: tuple(file.get_slice(name).get_shape()) for name in names}
        except Exception as error:
            raise unreadable(path, error) from error
    opened = open_names([name for shapes in found.values() for name in shapes])
    return WeightFiles(
        folder=folder,
        files={path: {name: opened[name] for name in shapes if name in opened} for path, shapes in found.items()},
        shapes={opened[name]: shape for shapes in found.values() for name, shape in shapes.items() if name in opened},
    )


def _weight_paths(folder: Path) -> list[Path]:
    single, index = folder / WEIGHTS, folder / INDEX
    if not single.is_file() and index.is_file():
        shards = read_file(index, lambda path: set(json.loads(path.read_text())["weight_map"].values()))
        paths = [folder / name for name in sorted(shards)]
    else:
        paths = [single]
    missing = [path.name for path in paths if not path.is_file()]
    if missing and len(paths) == 1:
        raise CheckpointError(
            f"{folder} is not a complete checkpoint: it has no {missing[0]}{_other_format(folder)}{unfinished(folder)}"
        )
    if missing:
        raise CheckpointError(
            f"{folder} is half-downloaded: {len(missing)} of {len(paths)} weight files are missing "
            f"({', '.join(missing)}){unfinished(folder)}; fetch them again"
        )
    return paths


def _other_format(folder: Path) -> str:
    found = sorted(p.name for pattern in ("pytorch_model*.bin", "*.pth") for p in folder.glob(pattern))
    return f" ({found[0]} is not read; save it anew as safetensors)" if found else ""


# -------------------------------------------------------------------------------------------------- names and shapes


def check_names(own: Shapes, given: Shapes, source: Path, remedy: str = "") -> None:
    """Raises CheckpointError that lists what is missing, unexpected or of another shape."""
    wrong = [f"{n}: {given[n]} instead of {own[n]}" for n in own.keys() & given.keys() if own[n] != given[n]]
    problems = {
        "missing": sorted(own.keys() - given.keys()),
        "unexpected": sorted(given.keys() - own.keys()),
        "of another shape": sorted(wrong),
    }
    lines = [f"  {what} ({len(names)}): {_some(names)}" for what, names in problems.items() if names]
    if lines:
        raise CheckpointError("\n".join([f"{source} does not fit the model that is asked for{remedy}:", *lines]))


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")

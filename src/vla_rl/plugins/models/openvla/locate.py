"""Where a checkpoint lies: beside the package, in a folder, or in the Hugging Face hub's cache. Light to import."""

from __future__ import annotations

import re
from pathlib import Path

from vla_rl.core.errors import UserError

BUILTIN = Path(__file__).parent / "checkpoints"
HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*(@[\w./-]+)?")
SENTENCEPIECE = "tokenizer.model"
WANTED = ("*.json", "*.safetensors", "*--*_checkpoint.pt", SENTENCEPIECE)
"""Files of a hub repository that are read; its Python code is not fetched, and never run."""
UNFINISHED = (".incomplete", ".part", ".partial", ".crdownload", ".aria2")


class CheckpointError(UserError, ValueError):
    """A checkpoint cannot be used; the message says which file and what to do."""


def resolve(name: str, download: bool = True) -> Path:
    """`builtin:NAME`, a folder, or `OWNER/NAME[@REVISION]` of the hub -> the folder. A hub name is taken from the local
    cache, or fetched into it (unless `download` is False). Raises CheckpointError when there is none."""
    if name.startswith("builtin:"):
        folder = BUILTIN / name.removeprefix("builtin:")
        if not folder.is_dir():
            there = ", ".join(f"builtin:{p.name}" for p in sorted(BUILTIN.glob("*")) if p.is_dir()) or "none"
            raise CheckpointError(f"no built-in checkpoint {name!r}; there are: {there}")
        return folder
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if HUB_NAME.fullmatch(name):
        return _from_hub(name, download)
    raise CheckpointError(f"checkpoint {name!r} is not a folder (looked at {folder.absolute()})")


def _from_hub(name: str, download: bool) -> Path:
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
                repository, revision=revision or None, allow_patterns=list(WANTED), local_files_only=not download
            )
        )
    except Exception as error:  # many kinds: no network, offline mode, no such repository, a gate, a full disk
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        wanted = f"{repository}{f' --revision {revision}' if revision else ''}"
        raise CheckpointError(
            f"checkpoint {name!r} is neither a folder ({Path(name).absolute()}) nor in the hub's cache "
            f"({constants.HF_HUB_CACHE}), and could not be fetched: {reason}\n"
            f"  where there is network: hf download {wanted} --local-dir FOLDER, then set model.checkpoint: FOLDER;\n"
            f"  or copy the folder models--{repository.replace('/', '--')} of another machine's cache into this one"
        ) from error


def unreadable(path: Path, error: Exception) -> CheckpointError:
    """The error for a file of a checkpoint that cannot be read, with the usual causes."""
    with path.open("rb") as file:
        pointer = file.read(40).startswith(b"version https://git-lfs")
    if pointer:
        return CheckpointError(f"{path} is a Git LFS pointer and not the file itself; run `git lfs pull` there")
    short = "; it ends too early, as after a download that was cut off: fetch it again" if cut_off(error) else ""
    return CheckpointError(f"cannot read {path}: {error}{short}")


def cut_off(error: Exception) -> bool:
    return "incomplete" in str(error).lower()


def unfinished(folder: Path) -> str:
    """A clause that names the files of a download that did not finish, or nothing."""
    found = [p for p in folder.rglob("*") if p.suffix in UNFINISHED]
    names = ", ".join(str(p.relative_to(folder)) for p in sorted(found)[:4])
    return f"; unfinished downloads lie there: {names}" if found else ""

"""Model checkpoints: find them (a folder, a plugin's folder, the Hugging Face hub's cache), list their weight files,
and explain what is wrong with them. Cheap to import."""

from __future__ import annotations

import re
import shlex
import stat
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, TypeVar

from attrs import frozen

from vla_rl.core.errors import CheckpointError, first_line
from vla_rl.core.paths import expand_tilde
from vla_rl.core.spec.structure import Problems, Structurer, at, keys_of
from vla_rl.toolkit.json_files import Record, path_inside, read_record
from vla_rl.toolkit.waiting import register_work

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor

T = TypeVar("T")
HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*(@[\w./-]+)?")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER, ADAPTER_CONFIG = "tokenizer.json", "adapter_config.json"
UNFINISHED = (".incomplete", ".part", ".partial", ".crdownload", ".aria2")
MB = 10**6
NAMED = re.compile(r"(?:GLOBAL|[Uu]nsupported (?:global|class)):? ?(?:GLOBAL )?([\w.]+)")
"""What torch says that a pickle asks for."""
MAX_LAYERS, MAX_SIZE, MAX_PIXELS = 1000, 1 << 20, 4096
MAX_DIM = 4096
"""Numbers of an action or a state that a network takes."""
MAX_CHUNK, MAX_TOKENS = 4096, 1 << 16
"""Actions of a chunk and tokens of a prompt: no weight has their number, and memory grows with it."""
Shapes = Mapping[str, tuple[int, ...]]
WANTED = ("*.json", "*.safetensors")
"""Files of a hub repository that most models read."""


def resolve_checkpoint(
    name: str, wanted: Sequence[str] = WANTED, builtin: Path | None = None, download: bool = True
) -> Path:
    """Return the folder of a checkpoint given as `builtin:NAME`, a folder, or `OWNER/NAME[@REVISION]` of the hub. A hub
    name is taken from the local cache, or downloaded into it (unless `download` is False). Raise CheckpointError.

    Args:
        wanted: patterns of the files of a hub repository that are read; nothing else is downloaded.
        builtin: folder of the checkpoints that ship with the plugin.
    """
    if builtin is not None and name.startswith("builtin:"):
        folder = builtin / name.removeprefix("builtin:")
        if not folder.is_dir():
            available = ", ".join(f"builtin:{p.name}" for p in sorted(builtin.glob("*")) if p.is_dir()) or "none"
            raise CheckpointError(f"no built-in checkpoint {name!r}; there are: {available}")
        return folder
    folder = expand_tilde(name)
    if folder.is_dir():
        return folder
    if HUB_NAME.fullmatch(name):
        return _from_hub(name, wanted, download)
    raise CheckpointError(f"checkpoint {name!r} is not a folder (looked at {folder.absolute()})")


def save_tensors(tensors: Mapping[str, Tensor], file: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write host tensors as safetensors, with a new file's usual mode: the library's is for the owner only."""
    from safetensors.torch import save_file

    save_file(dict(tensors), file, metadata=None if metadata is None else dict(metadata))
    open_to_readers(file.parent, [file])


def open_to_readers(folder: Path, files: Iterable[Path] | None = None) -> None:
    """Give files in a folder (None: all) at least the mode that a new file gets there by the umask."""
    probe = folder / ".mode"
    probe.touch()
    mode = probe.stat().st_mode
    probe.unlink()
    for file in folder.rglob("*") if files is None else files:
        if file.is_file() and not file.is_symlink():
            with suppress(PermissionError):  # a file system without modes
                file.chmod(stat.S_IMODE(file.stat().st_mode | mode))


def folder_of(name: str, builtin: Path | None = None) -> Path | None:
    """Return the folder as `resolve_checkpoint` does, without using the hub or its cache: None for a hub name."""
    folder = expand_tilde(name)
    return None if HUB_NAME.fullmatch(name) and not folder.is_dir() else resolve_checkpoint(name, (), builtin)


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
        which = f"{repository}{f' --revision {revision}' if revision else ''}"
        raise CheckpointError(
            f"checkpoint {name!r} is neither a folder ({Path(name).absolute()}) nor in the hub's cache "
            f"({constants.HF_HUB_CACHE}), and could not be fetched: {first_line(error)}\n"
            f"  with network access: hf download {which} --local-dir FOLDER, then set model.checkpoint: FOLDER;\n"
            f"  or copy the folder models--{repository.replace('/', '--')} of another machine's cache into this one"
        ) from error


# ------------------------------------------------------------------------------------------------------- single files


def read_file(path: Path, reader: Callable[[Path], T]) -> T:
    """Read a file of a checkpoint with `reader`. Raise CheckpointError naming it, whatever is wrong."""
    if not path.is_file():
        clause = describe_unfinished(path.parent) or _suggest_subfolders(path)
        raise CheckpointError(f"{path.parent} is not a complete checkpoint: it has no {path.name}{clause}")
    try:
        return reader(path)
    except CheckpointError:
        raise
    except Exception as error:
        raise unreadable_error(path, error) from error


def read_keys(path: Path) -> Record:
    """A JSON object, checked as its values are asked for. Raises CheckpointError for a file that lacks one."""
    return read_file(path, lambda file: read_record(file, CheckpointError))


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object as a dict, whose values are not checked. Raise CheckpointError as `read_keys` does."""
    return dict(read_keys(path).data)


def read_class(path: Path, content: Mapping[str, Any], cls: type[T]) -> T:
    """What a file holds as an attrs class. Raises CheckpointError."""
    try:
        result: T = Structurer().read_class(content, cls)
    except Problems as exc:
        raise CheckpointError(f"{path}: {exc}") from exc
    return result


def read_sizes(path: Path, cls: type[T]) -> T:
    """An attrs class of a network's sizes. They are bounded here, since the network is begun before its weights are
    compared, and one of 10^9 layers never is. Raises CheckpointError."""
    sizes = read_class(path, read_json(path), cls)
    check_sizes(path, sizes)
    return sizes


def check_sizes(source: Path | str, sizes: Any) -> None:
    """Raises CheckpointError where an attrs class has a size that no network has."""
    for key, attribute in keys_of(type(sizes)).items():
        value = getattr(sizes, key)
        if type(value) is int:
            check_size(source, key, value, 0 if attribute.default == 0 else 1)
        for i, item in enumerate(value if isinstance(value, tuple) else ()):
            if type(item) is int:
                check_size(source, f"{key}[{i}]", item, 0)


def check_size(source: Path | str, key: str, value: int, least: int = 1) -> None:
    """Raises CheckpointError for a size that no network has. The key's name tells layers from widths."""
    layers = any(word in key for word in ("depth", "layers", "blocks"))
    limit = MAX_LAYERS if layers else MAX_PIXELS if key.startswith("image") else MAX_SIZE
    if not least <= value <= limit:
        raise CheckpointError(f"{source}: {key!r} is {value}, a whole number from {least} to {limit:,} is expected")


def check_multiples(sizes: Any, **parts: str) -> None:
    """Raise ValueError where a size of this attrs object is not a multiple of its part (size=name of its part)."""
    for size_name, unit_name in parts.items():
        size, unit = getattr(sizes, size_name), getattr(sizes, unit_name)
        if unit < 1 or size % unit:
            raise ValueError(f"{size_name!r} is {size}, a multiple of {unit_name!r} ({unit}) is expected")


def check_even(sizes: Any, *names: str) -> None:
    """Raise ValueError where one of these sizes is odd: halves are rotated, or become sines and cosines."""
    for name in names:
        if getattr(sizes, name) % 2:
            raise ValueError(f"{name!r} is {getattr(sizes, name)}, an even number is expected")


def read_pickled(path: Path, keys: Sequence[str] = (), mmap: bool = False) -> dict[str, Any]:
    """Read what `torch.save` wrote of a dict of tensors, numbers, texts, lists and dicts, to the CPU. A file with
    anything else in it could run code, and is refused. Raise CheckpointError.

    Args:
        keys: keys that the dict must have.
        mmap: read tensors only when they are used.
    """
    import torch

    content = read_file(path, lambda file: torch.load(file, map_location="cpu", weights_only=True, mmap=mmap))
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, a dict is expected")
    absent = [key for key in keys if key not in content]
    if absent:
        raise CheckpointError(f"{path} is not a file of its kind: it has no {', '.join(absent)}")
    return content


def find_tokenizer(folder: Path, named: str | None) -> Path:
    """Return the path of tokenizer.json, in the checkpoint's folder or where the spec says. Raise CheckpointError."""
    location = folder if named is None else expand_tilde(named)
    file = location / TOKENIZER if location.is_dir() else location
    if not file.is_file():
        raise CheckpointError(
            f"no tokenizer at {file}; checkpoints often come without their language model's: put tokenizer.json into "
            "the folder, or name it in model.tokenizer"
        )
    return file


def check_tokenizer(folder: Path | None, named: str | None) -> None:
    """Raise Problems without a tokenizer.json where `find_tokenizer` looks. `folder`: None for a hub name."""
    with at("checkpoint" if named is None else "tokenizer"):
        if folder is not None or named is not None:
            find_tokenizer(folder or Path(), named)


def read_tokenizer(path: Path) -> Tokenizer:
    """Read tokenizer.json, without truncation and padding, which transformers writes into it when a tokenizer is saved
    that was called with either. Raises CheckpointError for a file that is missing or holds none."""
    from tokenizers import Tokenizer

    tokenizer: Tokenizer = read_file(path, lambda file: Tokenizer.from_file(str(file)))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def unreadable_error(path: Path, error: Exception) -> CheckpointError:
    """Return the error for a checkpoint file that cannot be read, with the usual causes."""
    with path.open("rb") as file:
        pointer = file.read(40).startswith(b"version https://git-lfs")
    if pointer:
        return CheckpointError(f"{path} is a Git LFS pointer and not the file itself; run `git lfs pull` there")
    if isinstance(error, UnpicklingError) or "weights_only" in str(error):
        return CheckpointError(_not_tensors_alone(path, str(error)))
    if isinstance(error, KeyError) and isinstance(error.args[0], str):
        return CheckpointError(f"cannot read {path}: it has no {error}")
    if isinstance(error, LookupError | EOFError | AttributeError | TypeError):  # the reader found unexpected content
        kind = f"{type(error).__name__}: {error}"
        return CheckpointError(f"cannot read {path}: it is damaged, or of another form than expected ({kind})")
    cut_off = "incomplete" in str(error).lower()
    short = "; it ends too early, as after a download that was cut off: fetch it again" if cut_off else ""
    return CheckpointError(f"cannot read {path}: {error}{short}")


def _not_tensors_alone(path: Path, error: str) -> str:
    """Return our message for an unsafe pickle; torch's own recommends to let the file run code."""
    named = NAMED.search(error)
    inside = f", but names {named[1]}" if named else ""
    return (
        f"cannot read {path}: it is a pickle that does not hold tensors alone{inside}. Such a file can run any code "
        "when it is opened, so it is not opened here\n"
        "  if you trust where it comes from: open it in a place where it can do no harm, such as a container without "
        "network,\n  save only its tensors from there, with safetensors or with torch.save, and use that file"
    )


def describe_unfinished(folder: Path) -> str:
    """Return a clause that names the files of an unfinished download, or an empty text."""
    partial_files = [p for p in folder.rglob("*") if p.suffix in UNFINISHED]
    names = ", ".join(str(p.relative_to(folder)) for p in sorted(partial_files)[:4])
    return f"; unfinished downloads are there: {names}" if partial_files else ""


def _suggest_subfolders(path: Path) -> str:
    """Return a clause that names subfolders which hold the file, as in a trainer's own folder, or an empty text."""
    copies = sorted({*path.parent.glob(f"*/{path.name}"), *path.parent.glob(f"checkpoints/*/*/{path.name}")})
    return f"; there is one in {', '.join(str(file.parent) for file in copies[-3:])}" if copies else ""


# --------------------------------------------------------------------------------------------------- files of weights


@frozen(kw_only=True)
class WeightFiles:
    """The weight files of a folder and the tensors in them."""

    folder: Path
    files: Mapping[Path, Mapping[str, str]]
    """File -> name of a tensor in it -> public name."""
    shapes: Shapes
    """Shapes of the tensors by public name."""

    def visit_tensors(self, visit: Callable[[str, Tensor], None]) -> None:
        """Call `visit` with every tensor on the CPU, one at a time."""
        from safetensors import safe_open

        read = 0
        with register_work("loading the model", sum(path.stat().st_size for path in self.files) // MB) as note:
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
                    raise unreadable_error(path, error) from error


def as_they_are(names: Collection[str]) -> Mapping[str, str]:
    return {name: name for name in names}


def find_weights(folder: Path, open_names: Callable[[Collection[str]], Mapping[str, str]] = as_they_are) -> WeightFiles:
    """Read weight files' headers. Raise CheckpointError for files that are missing, truncated or unreadable.

    Args:
        open_names: names of all tensors in the files -> their public names; tensors that it leaves out are not read.
    """
    from safetensors import safe_open

    tensors: dict[Path, dict[str, tuple[int, ...]]] = {}
    for path in _weight_paths(folder):
        try:
            with safe_open(path, "pt") as file:
                names = tuple(file.keys())
                tensors[path] = {name: tuple(file.get_slice(name).get_shape()) for name in names}
        except Exception as error:
            raise unreadable_error(path, error) from error
    _refuse_quantised(folder, {name for shapes in tensors.values() for name in shapes})
    opened = open_names([name for shapes in tensors.values() for name in shapes])
    return WeightFiles(
        folder=folder,
        files={path: {name: opened[name] for name in shapes if name in opened} for path, shapes in tensors.items()},
        shapes={opened[name]: shape for shapes in tensors.values() for name, shape in shapes.items() if name in opened},
    )


QUANTISED = {
    "bitsandbytes": (".absmax", ".quant_map", ".SCB"),
    "GPTQ or AWQ": (".qweight", ".qzeros"),
    "compressed-tensors": (".weight_packed", ".weight_scale"),
    "an FP8 tool": (".weight_scale_inv",),
}
"""Library -> ends of the names of tensors that it saves with a weight in fewer bits."""


def _refuse_quantised(folder: Path, names: Collection[str]) -> None:
    """Raise CheckpointError where the names are those of weights that were quantised before they were saved."""
    for name in sorted(names):
        library = next((library for library, ends in QUANTISED.items() if name.endswith(ends)), None)
        if library is not None:
            raise CheckpointError(
                f"{folder} holds weights that {library} has quantised ({name}); they are read in full precision only: "
                "use the checkpoint that they were made from, and model.frozen_weights: nf4 (or int8) stores it in "
                "fewer bits while it is loaded"
            )


def _weight_paths(folder: Path) -> list[Path]:
    single, index = folder / WEIGHTS, folder / INDEX
    if not single.is_file() and index.is_file():
        named = read_record(index, CheckpointError).get_record("weight_map")
        shards = sorted({named.get_text(name) for name in named.data})
        paths = [path_inside(folder, name, f"{named.source}", CheckpointError) for name in shards]
    else:
        paths = [single]
    missing = [path.name for path in paths if not path.is_file()]
    if missing and (folder / ADAPTER_CONFIG).is_file():
        raise CheckpointError(_adapter_alone(folder))
    if missing and (sharded := [path.parent for path in sorted(folder.glob("*/*.distcp"))]):
        raise CheckpointError(_distributed_alone(folder, sharded[0]))
    if missing and len(paths) == 1:
        raise CheckpointError(
            f"{folder} is not a complete checkpoint: it has no "
            f"{missing[0]}{_other_format(folder)}{describe_unfinished(folder)}"
        )
    if missing:
        raise CheckpointError(
            f"{folder} is half-downloaded: {len(missing)} of {len(paths)} weight files are missing "
            f"({', '.join(missing)}){describe_unfinished(folder)}; fetch them again"
        )
    return paths


def _adapter_alone(folder: Path) -> str:
    """What to do with a peft adapter without its base."""
    base = read_keys(folder / ADAPTER_CONFIG).get_text("base_model_name_or_path", "")
    fact = f"{folder} holds a peft adapter of {base!r} and not the weights, which are read; merge it into them"
    if (folder / "config.json").is_file() and "type" not in read_json(folder / "config.json"):
        return f"{fact} with peft's merge_and_unload()"
    merged = f"{folder}-merged"
    return (
        f"{fact}, where lerobot and peft are installed:\n"
        f'  python -c "from lerobot.configs.policies import PreTrainedConfig as C; '
        f"from lerobot.policies.factory import get_policy_class as g; from peft import PeftModel as P; "
        f"c = C.from_pretrained('{folder}'); p = g(c.type).from_pretrained('{base}', config=c); "
        f"P.from_pretrained(p, '{folder}').merge_and_unload().save_pretrained('{merged}')\"\n"
        f"  cp {folder}/policy_* {merged}/\n"
        f"then set model.checkpoint: {merged}"
    )


def _distributed_alone(folder: Path, sharded: Path) -> str:
    """Return what to do with weights that FSDP saved as one file for each process (SHARDED_STATE_DICT)."""
    command = shlex.join(["accelerate", "merge-weights", str(sharded), str(folder)])
    return (
        f"{folder} has its weights in {sharded.name} alone, as FSDP's processes saved them (*.distcp), which is not "
        f"read; merge them into {WEIGHTS}, where accelerate is installed:\n"
        f"  {command}"
    )


def _other_format(folder: Path) -> str:
    others_found = sorted(p.name for pattern in ("pytorch_model*.bin", "*.pth") for p in folder.glob(pattern))
    return f" ({others_found[0]} is not read; save it again as safetensors)" if others_found else ""


# -------------------------------------------------------------------------------------------------- names and shapes


def check_names(expected: Shapes, stored: Shapes, source: Path, remedy: str = "") -> None:
    """Raise CheckpointError that lists what is missing, unexpected or of another shape, if anything is."""
    wrong = [
        f"{n}: {stored[n]} instead of {expected[n]}"
        for n in expected.keys() & stored.keys()
        if expected[n] != stored[n]
    ]
    problems = {
        "missing": sorted(expected.keys() - stored.keys()),
        "unexpected": sorted(stored.keys() - expected.keys()),
        "of another shape": sorted(wrong),
    }
    lines = [f"  {what} ({len(names)}): {_format_names(names)}" for what, names in problems.items() if names]
    if lines:
        raise CheckpointError("\n".join([f"{source} does not fit the model that is asked for{remedy}:", *lines]))


def _format_names(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def check_same_weights(saved: Mapping[str, Tensor], current: Mapping[str, Tensor], file: Path) -> None:
    """Raise CheckpointError where names or shapes in a file are not those of the model."""
    missing, unexpected = sorted(current.keys() - saved.keys())[:5], sorted(saved.keys() - current.keys())[:5]
    if missing or unexpected:
        text = f"missing {missing}, unexpected {unexpected}"
        raise CheckpointError(f"{file} holds the weights of another model: {text}")
    for name, weight in current.items():
        if weight.shape != saved[name].shape:
            text = f"{name} has shape {tuple(saved[name].shape)}, the model has {tuple(weight.shape)}"
            raise CheckpointError(f"{file} holds the weights of another model: {text}")

"""`vla-rl export`: a checkpoint as a folder to give away, in its model's public layout, with a card."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from vla_rl.cli.model_card import render_card, success_curve
from vla_rl.cli.report.gather import read_report_data
from vla_rl.core.errors import UserError, did_you_mean
from vla_rl.core.paths import check_folder, explain_path_errors
from vla_rl.runtime.run_folder.folder import checkpoint_in, read_state
from vla_rl.toolkit.models.checkpoints.files import open_to_readers
from vla_rl.toolkit.models.checkpoints.lerobot_layout import build_config
from vla_rl.toolkit.models.checkpoints.openpi_layout import write_openpi
from vla_rl.toolkit.models.instructions import saved_suffix

FORMATS = ("own", "lerobot", "openpi")


def export_checkpoint(
    what: Path,
    target: Path,
    push: str | None,
    public: bool,
    format: str,  # noqa: A002 - as `--format`
    asset_id: str | None,
    say: Callable[[str], object],
) -> Path:
    """Write the folder, and upload it to a model repository OWNER/NAME where one is named. -> the folder.

    Args:
        format: "own", as the model saves itself; "lerobot", of pi0, pi0.5 and SmolVLA, for lerobot to act alike; or
            "openpi", of pi0 and pi0.5.
        asset_id: openpi's name of the statistics; None: "vla_rl".

    Raises UserError: CheckpointError for a damaged checkpoint; a target that is not empty; a hub that refuses."""
    if format not in FORMATS:
        near = did_you_mean(format, FORMATS)
        raise UserError(f"--format: there is no {format!r}{near}; there are: {', '.join(FORMATS)}")
    if asset_id is not None and format != "openpi":
        raise UserError("--asset-id names openpi's statistics; add --format openpi")
    checkpoint = checkpoint_in(what)
    with explain_path_errors("--to", target):
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise UserError(f"{target} is there and not empty; choose another folder with --to")
    check_folder("--to", target)
    step = read_state(checkpoint).step
    run = read_report_data(checkpoint.parents[1])
    library = "lerobot" if format == "lerobot" else "vla-rl"
    title = (push or target.name).rpartition("/")[2]
    written = {
        "README.md": render_card(run, step, title, saved_suffix(checkpoint / "model"), library),
        "success.svg": success_curve(run),
        "vla_rl_spec.yaml": run.spec_text,
    }
    if format == "lerobot":
        written["config.json"] = build_config(checkpoint / "model", run.spec_section("model"))
    with explain_path_errors("--to", target), _removing_partial_copies(target):
        if format == "openpi":
            write_openpi(checkpoint / "model", target, asset_id or "vla_rl")
        else:
            _copy_folder(checkpoint / "model", target)
        for name, text in written.items():
            (target / name).write_text(text, encoding="utf-8")
    open_to_readers(target)  # checkpoints of earlier versions are for their owner alone
    size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    say(f"wrote step {step} of {run.folder} to {target}: {size / 1e6:,.1f} MB")
    if push is not None:
        say(f"uploaded to {upload_to_hub(target, push, public)}")
    return target


@contextmanager
def _removing_partial_copies(folder: Path) -> Iterator[None]:
    """Remove what the block wrote to a new or empty folder, if it fails."""
    existed = folder.exists()
    try:
        yield
    except BaseException:
        for item in folder.iterdir() if folder.is_dir() else ():
            if item.is_dir():
                shutil.rmtree(item, ignore_errors=True)
            else:
                item.unlink()
        if not existed and folder.is_dir():
            folder.rmdir()
        raise


def _copy_folder(source: Path, target: Path) -> None:
    """Copy a folder. Stop at the first file that fails and raise its OSError, where `shutil.copytree` goes on and
    raises an error without errno."""
    failed: list[OSError] = []

    def copy_file(file: str, to: str) -> None:
        try:
            if not failed:
                shutil.copy2(file, to)
        except OSError as exc:
            failed.append(exc)

    try:
        shutil.copytree(source, target, dirs_exist_ok=True, copy_function=copy_file)
    finally:  # copytree raises an error of its own for a folder that failed after the file
        if failed:
            raise failed[0]


def upload_to_hub(folder: Path, repository: str, public: bool) -> str:
    """Upload to huggingface.co, or `HF_ENDPOINT`, by the user's login or HF_TOKEN. Return the address. Raise UserError
    where that fails, and, unless `public`, for a public repository."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        address = api.create_repo(repository, private=not public, exist_ok=True)
        exposed = not public and api.repo_info(repository).private is False  # `private` is of new repositories alone
        if not exposed:
            api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Exported by vla-rl")
    except Exception as exc:  # those of a connection are of the HTTP library that this version of the hub's client uses
        raise UserError(
            f"{repository} could not be uploaded to {api.endpoint}: {str(exc).strip()}\n  see that it can be reached, "
            f"and log in with `hf auth login`, or set HF_TOKEN to a token that may write there; {folder} is whole, and "
            f"may be uploaded by hand"
        ) from exc
    if exposed:
        raise UserError(f"{repository} exists and is public; give --public, or another name; {folder} is whole")
    return str(address)

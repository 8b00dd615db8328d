"""Commands that install a distribution again: with pip itself, and with metadata as pip writes it. And the commands of pages."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from vla_rl.core import installation, requirements
from vla_rl.core.installation import OWN_DIST, console_command, pip_arguments, pip_command, quote_path
from vla_rl.core.requirements import install_command

ROOT = Path(__file__).parents[2]
PROJECT = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"
[project]
name = "acme-fast"
version = "0.3"
[project.optional-dependencies]
more = ["attrs"]
"""
OFFLINE = ("--no-index", "--no-build-isolation")


def pip(*arguments: str, path: str = "") -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def describe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Put the metadata of a distribution, with that direct_url.json, before what is installed."""

    def install(dist: str, url: object = None) -> None:
        info = tmp_path / "site" / f"{dist.replace('-', '_')}-0.3.dist-info"
        info.mkdir(parents=True)
        extra = 'Provides-Extra: more\nRequires-Dist: zoom>=2; extra == "more"\nRequires-Dist: attrs; extra == "more"\n'
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 0.3\n{extra}")
        if url is not None:
            (info / "direct_url.json").write_text(json.dumps(url))
        monkeypatch.syspath_prepend(str(tmp_path / "site"))

    return install


@pytest.mark.slow
@pytest.mark.parametrize("origin", ["editable", "wheel"])
def test_pip_takes_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: str) -> None:
    pytest.importorskip("setuptools", reason="setuptools is not installed: pip install setuptools")
    project = tmp_path / "a folder"
    (project / "src" / "acme_fast").mkdir(parents=True)
    (project / "src" / "acme_fast" / "__init__.py").touch()
    (project / "pyproject.toml").write_text(PROJECT)
    if origin == "wheel":
        pip("wheel", "-q", *OFFLINE, "-w", str(tmp_path), str(project))
    (source,) = tmp_path.glob("*.whl") if origin == "wheel" else (project,)
    editable = ["-e"] if origin == "editable" else []
    pip("install", "-q", *OFFLINE, "--prefix", str(tmp_path / "home"), *editable, str(source))
    (site,) = (tmp_path / "home").glob("lib/python3*/site-packages")
    monkeypatch.syspath_prepend(str(site))
    command = install_command("acme-fast", "more")
    assert shlex.split(command) == ["pip", "install", *editable, f"{source}[more]"]
    pip(*shlex.split(command)[1:], "--dry-run", *OFFLINE, path=str(site))


def test_an_index_and_a_repository_are_named(describe) -> None:
    describe("acme-index")
    assert install_command("acme-index", "more") == "pip install 'acme-index[more]'"
    vcs = {"vcs": "git", "commit_id": "0a1b", "requested_revision": "main"}
    describe("acme-git", {"url": "https://example.com/acme.git", "vcs_info": vcs, "subdirectory": "python"})
    assert pip_arguments("acme-git") == "'acme-git @ git+https://example.com/acme.git@0a1b#subdirectory=python'"
    describe("acme-url", {"url": "https://example.com/acme-0.3.zip", "archive_info": {}})
    assert pip_arguments("acme-url", "more") == "'acme-url[more] @ https://example.com/acme-0.3.zip'"


def test_a_clone_or_wheel_that_is_gone_is_not_named(describe, tmp_path: Path) -> None:
    describe("acme-gone", {"url": f"file://{tmp_path}/away/acme-0.3-py3-none-any.whl", "archive_info": {}})
    assert install_command("acme-gone", "more") == "pip install 'zoom>=2'"


@pytest.mark.parametrize(
    ("published", "command"), [(False, "pip install 'zoom>=2'"), (True, "pip install 'vla-rl[more]'")]
)
def test_vla_rl_is_asked_of_an_index_only_where_one_has_it(describe, monkeypatch, published, command) -> None:
    describe(OWN_DIST)
    monkeypatch.setattr(installation, "PUBLISHED", published)
    monkeypatch.setattr(requirements, "unmet_base", list)
    assert install_command(OWN_DIST, "more") == command


@pytest.mark.parametrize(
    ("made", "on_path", "command"),
    [
        ({"lib/python3.12/site-packages/pip/__init__.py": ""}, True, "pip install"),
        ({"lib/python3.12/site-packages/pip/__init__.py": ""}, False, "'{}/bin/python' -m pip install"),
        ({"pyvenv.cfg": "home = /usr\nuv = 0.9.1\n"}, True, "uv pip install --python '{}/bin/python'"),
        ({"pyvenv.cfg": "uv = 0\n", "lib/python3.12/site-packages/pip/__init__.py": ""}, True, "pip install"),
        ({"pyvenv.cfg": "home = /usr\nuv = 0.9.1\n", "pipx_metadata.json": "{}"}, True, "pipx runpip 'my env' install"),
    ],
)
def test_the_command_is_of_what_made_the_environment(tmp_path, monkeypatch, made, on_path, command) -> None:
    """`uv tool` makes what uv makes; an environment of uv has no pip unless it was asked for."""
    folder = tmp_path / "my env"
    for name, text in {"bin/python": "", "bin/pip": "", **made}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "bin" / "pip").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder / "bin") if on_path else "/nowhere")
    assert pip_command("install", folder / "bin" / "python") == command.format(folder)
    monkeypatch.setattr(sys, "executable", str(folder / "bin" / "python"))
    assert pip_command("install") == command.format(folder)


def test_a_clone_on_the_path_alone_names_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise installation.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(installation.metadata, "distribution", absent)
    assert pip_arguments(OWN_DIST, "serve") == f"-e {shlex.quote(f'{ROOT}[serve]')}"


def test_pages_name_the_command_of_the_release() -> None:
    """After `PUBLISHED` is switched on, this names every page with the clone's command."""
    wrong = r"pip install -e '\.\[" if installation.PUBLISHED else r"pip install( --?[\w-]+)* ['\"]?vla-rl\b"
    files = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*"), *ROOT.glob("src/**/*")]
    texts = {file: file.read_text() for file in files if file.suffix in (".md", ".yaml", ".ipynb", ".py", ".txt")}
    lines = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file, text in texts.items()
        for number, line in enumerate(text.splitlines(), 1)
        if re.search(wrong, line)
    ]
    assert len(texts) > 300 and not lines, "\n".join(lines)


def test_a_path_that_begins_with_a_dash_is_no_option() -> None:
    assert [quote_path(path) for path in (Path("-dash"), "my run", "/runs/-x")] == ["./-dash", "'my run'", "/runs/-x"]


def test_a_command_pastes_whether_the_environment_is_activated_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "my venv" / "bin" / "vla-rl"
    script.parent.mkdir(parents=True)
    script.touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(script.with_name("python")))
    monkeypatch.setenv("PATH", "/nowhere")
    assert console_command() == f"'{script}'"
    monkeypatch.chdir(tmp_path)
    assert console_command() == "'my venv/bin/vla-rl'"
    monkeypatch.setenv("PATH", str(script.parent))
    assert console_command() == "vla-rl"
    script.unlink()
    assert console_command() == f"'{script.with_name('python')}' -m vla_rl.cli.main"

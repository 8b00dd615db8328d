"""Unreleased changes in changes/: one file each, with one line, which towncrier takes into the changelog."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("towncrier", reason="towncrier is not installed: pip install 'towncrier>=24.8'")

ROOT = Path(__file__).parents[1]
FRAGMENTS = [file for file in sorted((ROOT / "changes").iterdir()) if file.name != "README.md"]


@pytest.fixture
def towncrier(bare_fork_server):
    """Run towncrier in a folder."""
    command = ("-m", "towncrier", "build", "--version", "99.0.0", "--date", "2030-01-31")
    return lambda folder, *arguments: bare_fork_server.run_python(*command, *arguments, cwd=folder)


def form_problems(text: str) -> list[str]:
    """Return what is wrong with the text of a fragment; towncrier itself checks names."""
    checks = {
        "must be one line that ends with a newline": text.count("\n") == 1 and text.endswith("\n"),
        "must begin with a capital letter or code, without a list's dash": text[:1].isupper() or text[:1] == "`",
        "must end with a full stop": text.rstrip().endswith("."),
    }
    return [problem for problem, holds in checks.items() if not holds]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """What towncrier reads, in a folder where it may write."""
    for name in ("pyproject.toml", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "changes", tmp_path / "changes")
    return tmp_path


def test_every_fragment_has_the_form(towncrier):
    problems = {file.name: problem for file in FRAGMENTS for problem in form_problems(file.read_text("utf-8"))}
    assert not problems, "changes/README.md has the form"
    result = towncrier(ROOT, "--draft")
    assert result.returncode == 0, result.stderr
    missing = [file.name for file in FRAGMENTS if f"- {file.read_text('utf-8')}" not in result.stdout]
    assert not missing, result.stdout


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("`serve` takes `--places`.\n", ""),
        ("Two lines.\nOf text.\n", "one line"),
        ("No newline.", "one line"),
        ("- A dash.\n", "dash"),
        ("No full stop\n", "full stop"),
    ],
)
def test_the_form_of_a_fragment(text, problem):
    problems = form_problems(text)
    assert len(problems) == bool(problem) and problem in "".join(problems)


@pytest.mark.parametrize("name", ["episode-lists.added.md", "+episode-lists.new.md", "+episode-lists.md", "notes.txt"])
def test_a_fragment_of_another_name_is_refused(repository, towncrier, name):
    (repository / "changes" / name).write_text("Lists of episodes.\n")
    result = towncrier(repository, "--draft")
    assert result.returncode != 0 and name.partition(".")[0] in result.stderr


def test_fragments_become_a_version_of_the_changelog(repository, towncrier):
    (repository / "changes" / "+episode-lists.added.md").write_text("Lists of episodes.\n")
    (repository / "changes" / "+frozen.fixed.md").write_text("Frozen adapters stay frozen.\n")
    result = towncrier(repository, "--yes")
    assert result.returncode == 0, result.stderr
    before = (ROOT / "CHANGELOG.md").read_text("utf-8")
    after = (repository / "CHANGELOG.md").read_text("utf-8")
    head, version, rest = after.partition("## [99.0.0] - 2030-01-31\n")
    assert version and head + rest[rest.index("\n## [") + 1 :] == before
    assert rest.index("### Added\n\n") < rest.index("- Lists of episodes.\n") < rest.index("### Fixed\n\n")
    assert "- Frozen adapters stay frozen.\n" in rest
    assert [file.name for file in (repository / "changes").iterdir()] == ["README.md"]

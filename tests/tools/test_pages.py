"""Pages of the site for what is linked to outside docs/."""

from __future__ import annotations

from pathlib import Path

import pytest

import pages


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository in a folder named `build`, which is not one."""
    root = tmp_path / "build"
    (root / "examples" / "build").mkdir(parents=True)
    (root / "examples" / "one.yaml").write_text("name: one\n")
    (root / "examples" / "build" / "left.py").write_text("left = 1\n")
    monkeypatch.setattr(pages, "ROOT", root)
    return root


def test_a_folder_shows_its_files(root: Path) -> None:
    page = pages.page_of(root / "examples")
    assert page == "# `examples`\n\n## `one.yaml`\n\n~~~~yaml\nname: one\n~~~~\n"


def test_a_readme_stands_before_the_files_of_its_folder(root: Path) -> None:
    (root / "examples" / "README.md").write_text("# Specs\n")
    assert pages.page_of(root / "examples").startswith("# Specs\n\n\n## `one.yaml`")


def test_every_link_to_a_folder_has_a_page() -> None:
    folders = {
        target
        for page in pages.DOCS.rglob("*.md")
        for target in pages.targets(page.read_text(), page)
        if target.is_dir() and not target.is_relative_to(pages.DOCS)
    }
    assert folders, "no page links to a folder"
    for folder in folders:
        assert pages.page_of(folder).startswith("# ")

"""What pages point to is there: other pages and their headings, files of the repository, names of the reference."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

import pages
import vla_rl
import vla_rl.testing

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "vla_rl"
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *SRC.glob("plugins/**/*.md"),
        *ROOT.glob("examples/**/*.md"),
        *ROOT.glob("changes/README.md"),
    ]
)
LINK = re.compile(r"\]\((?![a-z]+:)([^)\s#]*)#?([^)\s]*)\)")
DEFINITION = re.compile(r"^ {0,3}\[[^\]^][^\]]*\]: +(?![a-z]+:)([^\s#]*)#?(\S*)", flags=re.MULTILINE)
ATTRIBUTE = re.compile(r"""<[a-z][^>]*\b(?:src|href|srcset|poster)=["'](?![a-z]+:)([^"'#\s]*)#?([^"'\s]*)""")
FILE = re.compile(r"`((?:[\w-]+/)+[\w.-]+\.(?:py|md|yaml|toml|sh|css))`")
NAME = re.compile(r"^::: ([\w.]+)", flags=re.MULTILINE)
REFERENCE = sorted((ROOT / "docs" / "reference").glob("*.md"))
DESCRIBED = [name for page in REFERENCE for name in NAME.findall(page.read_text())]


def prose(file: Path) -> str:
    """The page without its blocks of code."""
    return re.sub(r"^ *(`{3,}|~{3,}).*?^ *\1", "", file.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(file: Path) -> set[str]:
    """Return the anchors of the headings, as forges and the site make them, and of the names that a reference page
    describes."""
    titles = re.findall(r"^#+ (.+)$", prose(file), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles} | set(
        NAME.findall(file.read_text())
    )


def found(name: str) -> object:
    """What a dotted name stands for. Raises ImportError or AttributeError for an unknown name."""
    try:
        return import_module(name)
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
        return getattr(import_module(module), attribute)


def broken_links(page: Path, text: str) -> list[str]:
    """Say of each relative link of a page with this text, in Markdown or HTML, why it leads nowhere; images are links too."""
    broken = []
    text = re.sub(r"`[^`]*`", "", text)
    for target, anchor in [link for pattern in (LINK, DEFINITION, ATTRIBUTE) for link in pattern.findall(text)]:
        file = (page.parent / target).resolve() if target else page
        if not file.exists() or not file.is_relative_to(ROOT):
            broken.append(f"there is no {target}")
        elif anchor and anchor not in anchors(file):
            broken.append(f"{file.name} has no heading {anchor!r}: {sorted(anchors(file))}")
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    assert not broken_links(page, prose(page))


@pytest.mark.parametrize(
    ("link", "broken"),
    [
        ("[page](docs/glossary.md#env)", ""),
        ("[page](docs/glossary.md#no-such-word)", "has no heading 'no-such-word'"),
        ("[page](docs/glosary.md)", "there is no docs/glosary.md"),  # codespell:ignore glosary
        ("[outside](../elsewhere.md)", "there is no ../elsewhere.md"),
        ("![image](docs/missing.png)", "there is no docs/missing.png"),
        ('<img src="docs/missing.png" alt="">', "there is no docs/missing.png"),
        ('<a href="docs/glossary.md#no-such-word">', "has no heading 'no-such-word'"),
        ("[page][word]\n\n[word]: docs/missing.md", "there is no docs/missing.md"),
        ("[elsewhere](https://example.org/a.md), <a href='https://example.org'>, `[code](missing.md)`", ""),
    ],
)
def test_a_broken_link_is_found(link, broken):
    result = broken_links(ROOT / "README.md", link)
    assert len(result) == bool(broken) and broken in "".join(result)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_are_there(page):
    """Paths in the repository, in the package, or next to the page."""
    for path in FILE.findall(prose(page)):
        places = [ROOT, SRC, page.parent]
        assert any((place / path).exists() for place in places), f"there is no {path}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lists_and_tables_begin_a_paragraph(page):
    """The site needs an empty line between text and a list or a table, and four spaces before what continues in a list
    after an empty line, where forges do not."""
    beginning = re.findall(r"^(?! |- |\d+\. |\||#).+\n(?:- |\d+\. |\| ).*", prose(page), flags=re.MULTILINE)
    assert not beginning
    assert not re.findall(r"\n\n {1,3}\S.*", page.read_text())


def test_the_tree_of_the_architecture_is_that_of_the_package():
    (tree,) = re.findall(
        r"```\nsrc/vla_rl/\n(.*?)```", (ROOT / "docs" / "explanation" / "architecture.md").read_text(), flags=re.DOTALL
    )
    room = SRC
    for line in tree.splitlines():
        *names, _ = re.split(r"\s{2,}", line.strip())
        if not line.startswith("    "):
            room = (SRC if line.startswith(" ") else ROOT) / names[0]
            assert room.exists(), f"there is no {room}"
        else:
            for name in names:
                file = room / (name if name.endswith("/") else f"{name}.py")
                assert file.exists(), f"there is no {file}"


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r"[\w/.-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert listed == {str(file.relative_to(ROOT / "docs")) for file in ROOT.glob("docs/**/*.md")} | {"index.md"}


@pytest.mark.parametrize("name", DESCRIBED)
def test_names_of_the_reference_are_there(name):
    assert found(name) is not None


def test_the_reference_describes_every_public_name():
    wanted = {f"vla_rl.{name}" for name in vla_rl.__all__} | {f"vla_rl.testing.{n}" for n in vla_rl.testing.__all__}
    assert not wanted - set(DESCRIBED), "add them to a page of docs/reference"
    modules = [file for file in (SRC / "toolkit").glob("*/*.py") if file.stem != "__init__"]
    names = {".".join(file.relative_to(SRC.parent).with_suffix("").parts) for file in modules}
    missing = {n for n in names if n not in DESCRIBED and n.rpartition(".")[0] not in DESCRIBED}
    assert missing <= {"vla_rl.toolkit.envs.env_process"}, "add them to a page of docs/reference"  # SubprocEnvs's own


def test_a_link_out_of_docs_becomes_a_page_of_the_site():
    page = ROOT / "docs" / "models" / "openvla.md"
    text = "[a](../algorithms.md#keys) `[b](../no.md)` [c](../../README.md) [`d`](../../src/vla_rl/core/run/loop.py) [e](#x)"
    assert pages.rewritten(text, page) == (
        "[a](../algorithms.md#keys) `[b](../no.md)` [c](../index.md) "
        "[`d`](../repository/src/vla_rl/core/run/loop.py.md) [e](#x)"
    )
    assert pages.page_of(SRC / "core" / "run" / "loop.py").startswith("# `src/vla_rl/core/run/loop.py`\n\n~~~~python\n")
    example = pages.page_of(ROOT / "examples" / "acme_env")
    assert example.startswith("# acme-env") and "## `src/acme_env/__init__.py`\n\n~~~~python" in example

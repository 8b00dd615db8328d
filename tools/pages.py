"""Settings of mkdocs beyond mkdocs.yml: README.md is the first page of the site, and what pages link to outside docs/
(a plugin's README, a source file, an example project) becomes a page too. So a link is written once, as a path in the
repository, and works on a forge and on the site."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
CODE = re.compile(r"(^ *(`{3,}|~{3,}).*?^ *\2|`[^`\n]+`)", flags=re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s#]+)")
LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".sh": "sh"}


def outside_code(markdown: str, change: Callable[[str], str]) -> str:
    """`markdown` with `change` applied to what is neither a block of code nor a span of it."""
    parts, at = [], 0
    for code in CODE.finditer(markdown):
        parts += [change(markdown[at : code.start()]), code[0]]
        at = code.end()
    return "".join([*parts, change(markdown[at:])])


def targets(markdown: str, source: Path) -> Iterator[Path]:
    """Files and folders that the relative links of a page point to."""
    found: list[str] = []
    outside_code(markdown, lambda text: (found.extend(LINK.findall(text)), text)[1])
    for link in found:
        yield (source.parent / link).resolve()


def address(file: Path) -> str:
    """Return the path on the site of a file of the repository, as the source of a page or as an asset."""
    if file == ROOT / "README.md":
        return "index.md"
    if file.is_relative_to(DOCS):
        return file.relative_to(DOCS).as_posix()
    path = f"repository/{file.relative_to(ROOT).as_posix()}"
    return path if file.suffix == ".md" else f"{path}.md"


def rewritten(markdown: str, source: Path) -> str:
    """The page with its relative links as they have to be on the site."""
    here = posixpath.dirname(address(source))

    def change(match: re.Match[str]) -> str:
        target = (source.parent / match[1]).resolve()
        known = target.exists() and target.is_relative_to(ROOT)  # else the strict build says what is wrong with it
        return f"]({posixpath.relpath(address(target), here)}" if known else match[0]

    return outside_code(markdown, lambda text: LINK.sub(change, text))


def page_of(source: Path) -> str:
    """Markdown that shows a file, or a folder: its README.md if it has one, then its other files."""
    title = f"# `{source.relative_to(ROOT)}`"
    if source.is_dir():
        readme = source / "README.md"
        files = [f for f in sorted(source.rglob("*")) if f.suffix in LANGUAGES]
        names = {f: f.relative_to(source) for f in files if "build" not in f.relative_to(source).parts}
        shown = [f"## `{name}`\n\n{_shown(f)}" for f, name in names.items()]
        return "\n\n".join([readme.read_text() if readme.is_file() else title, *shown]) + "\n"
    if source.suffix == ".md":
        return source.read_text()
    return f"{title}\n\n{_shown(source)}\n"


def _shown(file: Path) -> str:
    return f"~~~~{LANGUAGES.get(file.suffix, 'text')}\n{file.read_text()}~~~~"


# ----------------------------------------------------------------------------------------------- called by mkdocs

_sources: dict[str, Path] = {}
"""Page -> the file outside docs/ that it shows."""


def on_files(files: Files, config: Any) -> Files:
    """Add README.md, and page by page whatever is linked to outside docs/."""
    from mkdocs.structure.files import File

    waiting = [ROOT / "README.md"]
    waiting += [t for f in files.documentation_pages() for t in targets(f.content_string, Path(f.abs_src_path))]
    while waiting:
        source = waiting.pop()
        if source.is_relative_to(DOCS) or not source.exists() or address(source) in _sources:
            continue
        _sources[address(source)] = source
        files.append(File.generated(config, address(source), content=page_of(source)))
        if source.suffix == ".md":
            waiting += targets(source.read_text(), source)
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    uri = page.file.src_uri
    if uri == "index.md":
        page.meta["hide"] = ["navigation"]  # it stands alone under its tab
    if uri in _sources and _sources[uri].suffix in LANGUAGES:
        page.meta["search"] = {"exclude": True}  # the reference is what searches should find
    return rewritten(markdown, _sources.get(uri, DOCS / uri))

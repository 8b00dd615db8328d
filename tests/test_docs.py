"""docs/reference/hooks.md says what the contracts do, and docs/how-to/public-checkpoint.md shows a recipe. `python tests/test_docs.py` writes
both."""

from __future__ import annotations

import inspect
import re
from importlib.util import find_spec
from pathlib import Path

from chromium import needs_chromium
from vla_rl.core.catalogue import KINDS
from vla_rl.core.manager import hook_names, with_capabilities

DOCS = Path(__file__).parents[1] / "docs"
RECIPE = DOCS.parent / "recipes" / "rlinf_oft_libero_10_grpo.yaml"
RECIPE_PAGE = DOCS / "how-to" / "public-checkpoint.md"
FIRST_SECTION = "\n## model:"


def hook_sections() -> str:
    """Every hook of every contract: its signature, and its docstring, which says when it is called."""
    text = ""
    for kind in KINDS.values():
        text += f"\n## {kind.name}: `{kind.contract_class.__name__}`\n\n{inspect.getdoc(kind.contract_class)}\n"
        for name in hook_names(kind.contract_class):
            optional = "" if name in kind.contract_class.__dict__.get("__abstractmethods__", ()) else "  (optional)"
            text += hook_section(kind.contract_class, name, optional)
        for capability in kind.capability_classes:
            own = [name for name in vars(capability) if name in hook_names(capability)]
            text += "".join(hook_section(capability, name, f"  (`{capability.__name__}`)") for name in own)
    return text


def hook_section(contract: type, name: str, remark: str) -> str:
    """One hook of a contract or a capability."""
    method = getattr(contract, name)
    parameters = [p for p in inspect.signature(method).parameters.values() if p.name != "self"]
    arguments = ", ".join(f"{p.name}: {p.annotation}" for p in parameters)
    returns = inspect.signature(method).return_annotation
    return f"\n### {name}{remark}\n\n```python\n{name}({arguments}) -> {returns}\n```\n{inspect.getdoc(method)}\n"


def code_blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL)


def test_hooks_are_documented_with_their_signatures() -> None:
    page = (DOCS / "reference" / "hooks.md").read_text()
    assert page[page.index(FIRST_SECTION) :] == hook_sections(), "run: python tests/test_docs.py"


def with_recipe(page: str) -> str:
    """Return the page with the recipe, without its head, in the block that begins with the file's name."""
    lines = RECIPE.read_text().splitlines(keepends=True)
    body = "".join(line for line in lines if not line.startswith("#"))
    block = re.compile(rf"(?<=```yaml\n)# {RECIPE.name}\n.*?(?=```)", flags=re.DOTALL)
    assert len(block.findall(page)) == 1
    return block.sub(lambda _: f"# {RECIPE.name}\n{body}", page)


def test_a_configuration_of_rlinf_is_shown_as_the_recipe_has_it() -> None:
    page = RECIPE_PAGE.read_text()
    assert with_recipe(page) == page, "run: python tests/test_docs.py"


def test_the_lifecycle_names_every_hook() -> None:
    head = (DOCS / "reference" / "hooks.md").read_text().partition(FIRST_SECTION)[0]
    rare = {"encode_actions", "decode_actions", "snapshot", "restore"}
    for kind in KINDS.values():
        names = hook_names(with_capabilities(kind.name))
        missing = [n for n in names if n not in rare and not re.search(rf"\b{n}\b", head)]
        assert not missing, f"hooks of {kind.name} that the lifecycle lacks: {missing}"
    known = {name for kind in KINDS.values() for name in hook_names(with_capabilities(kind.name))}
    drawn = set(re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", code_blocks("reference/hooks.md", "text")[0]))
    assert drawn <= known, f"no such hooks: {drawn - known}"


def test_surprises_of_libraries_name_tests_that_are_there() -> None:
    rows = [line for line in (DOCS / "explanation" / "surprises.md").read_text().splitlines() if line.startswith("| ")]
    rows = [row for row in rows if not row.startswith(("| --- ", "| one expects "))]
    assert len(rows) > 20
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", row)
        assert named, f"no test holds: {row}"
        for file, test in named:
            path = DOCS.parent / file
            found = path.exists() and re.search(rf"^def {test}\(", path.read_text(), flags=re.MULTILINE)
            assert found, f"there is no {file}::{test}"


def test_nothing_is_documented_twice() -> None:
    """A name with two anchors is a warning of the strict build, unless one of the two says that it is a copy."""
    entry = re.compile(r"^::: (\S+)\n((?: {4}.*\n)*)", flags=re.MULTILINE)
    found = [e for page in sorted((DOCS / "reference").glob("*.md")) for e in entry.findall(page.read_text() + "\n")]
    names = [name for name, options in found if "skip_local_inventory: true" not in options]
    whole = [name for name, options in found if "show_submodules: true" in options]
    twice = [name for name in names if names.count(name) > 1 or any(name.startswith(f"{w}.") for w in whole)]
    assert len(names) > 100 and not twice, "add `skip_local_inventory: true` to the options of one"


def test_images_are_seen_whole_on_a_narrow_page() -> None:
    """Curves scale to the page's width; the drawn ones have a view box and no fixed width."""
    style = (DOCS / "stylesheets" / "site.css").read_text()
    assert ".md-typeset img { max-width: 100%; height: auto; }" in style
    assert not re.search(r"img[^{]*\{[^}]*min-width", style) and not re.search(r"has\(> img[^{]*\{[^}]*overflow", style)
    for file in DOCS.glob("curves/*.svg"):
        head = file.read_text().partition(">")[0]
        assert "viewBox=" in head and not re.search(r"\b(width|height)=", head), file.name


@needs_chromium
def test_tables_scroll_on_a_narrow_page(tab, tmp_path) -> None:
    """On a phone no word or number of a table is broken, prose is not one word wide, and the page stays as it is. The two
    blocks around the table are those of Material's script."""
    from markdown import markdown

    material = Path(find_spec("material").origin).parent / "templates" / "assets" / "stylesheets"
    sheets = [*material.glob("main.*.min.css"), DOCS / "stylesheets" / "site.css"]
    table = markdown(
        "| key | a number | default | meaning |\n| --- | --- | --- | --- |\n"
        f"| `max_skipped_rollouts` | 68.0 % | `null` | {'Where rewards are sparse, most groups teach nothing. ' * 4}|\n",
        extensions=["tables"],
    ).replace("<td>68.0 %</td>", "<td><b>68.0 %</b></td>")
    (tmp_path / "page.html").write_text(
        "".join(f'<link rel="stylesheet" href="{sheet.as_uri()}">' for sheet in sheets)
        + '<article class="md-content__inner md-typeset"><div class="md-typeset__scrollwrap"><div class="md-typeset__table">'
        + table
    )
    tab.set_width(390)
    tab.open((tmp_path / "page.html").as_uri())
    for word in ("td code", "td b"):
        assert tab.value(f"document.querySelector('{word}').getClientRects().length") == 1
    assert tab.value("document.querySelector('tr').offsetHeight") < 40, "every heading is one line"
    assert tab.value("document.querySelector('td:last-child').offsetHeight") < 150
    assert tab.value("document.documentElement.scrollWidth") == 390
    assert tab.value("(({scrollWidth, clientWidth}) => scrollWidth > clientWidth)(document.querySelector('div'))")


def test_code_is_seen_whole_between_both_tables_of_contents() -> None:
    """At 1280 pixels 105 characters fit in a line. Longer lines continue in the next one; those of a drawing must
    not."""
    style = (DOCS / "stylesheets" / "site.css").read_text()
    assert re.search(r"pre > code \{[^}]*white-space: pre-wrap; overflow-wrap: anywhere;", style)
    assert "line_spans: __span" in (DOCS.parent / "mkdocs.yml").read_text() and 'span[id^="__span"]' in style
    for file in (DOCS.parent / "README.md", *DOCS.glob("**/*.md")):
        for block in re.findall(r"^```[a-z]*\n(.*?)^```", file.read_text(), flags=re.DOTALL | re.MULTILINE):
            drawing = re.search("[─│▶]", block)
            assert not drawing or max(map(len, block.splitlines())) <= 105, (file, block)


if __name__ == "__main__":
    file = DOCS / "reference" / "hooks.md"
    hand_written = file.read_text().partition(FIRST_SECTION)[0]
    file.write_text(hand_written + hook_sections())
    RECIPE_PAGE.write_text(with_recipe(RECIPE_PAGE.read_text()))

"""The pages under docs/ say what the code does. `python tests/test_docs.py` writes the generated part of hooks.md."""

from __future__ import annotations

import inspect
import re
import types
from pathlib import Path

import pytest

from vla_rl.core import catalogue as plugins
from vla_rl.core.catalogue import KINDS
from vla_rl.core.manager import hook_names
from vla_rl.core.spec.spec import Spec, parse_spec
from vla_rl.testing import check_env

DOCS = Path(__file__).parents[1] / "docs"
FIRST_SECTION = "\n## model:"


def hook_sections() -> str:
    """Every hook of every contract: its signature, and its docstring, which says when it is called."""
    text = ""
    for kind in KINDS.values():
        text += f"\n## {kind.name}: `{kind.base.__name__}`\n\n{inspect.getdoc(kind.base)}\n"
        for name in hook_names(kind.base):
            method = getattr(kind.base, name)
            parameters = [p for p in inspect.signature(method).parameters.values() if p.name != "self"]
            arguments = ", ".join(f"{p.name}: {p.annotation}" for p in parameters)
            optional = "" if name in kind.base.__dict__.get("__abstractmethods__", ()) else "  (optional)"
            returns = inspect.signature(method).return_annotation
            text += f"\n### {name}{optional}\n\n```python\n{name}({arguments}) -> {returns}\n```\n{inspect.getdoc(method)}\n"
    return text


def code_blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL)


def test_hooks_are_documented_with_their_signatures() -> None:
    page = (DOCS / "hooks.md").read_text()
    assert page[page.index(FIRST_SECTION) :] == hook_sections(), "run: python tests/test_docs.py"


def test_the_lifecycle_names_every_hook() -> None:
    head = (DOCS / "hooks.md").read_text().partition(FIRST_SECTION)[0]
    rare = {"encode_actions", "decode_actions", "snapshot", "restore"}
    for kind in KINDS.values():
        missing = [n for n in hook_names(kind.base) if n not in rare and not re.search(rf"\b{n}\b", head)]
        assert not missing, f"hooks of {kind.name} that the lifecycle lacks: {missing}"
    known = {name for kind in KINDS.values() for name in hook_names(kind.base)}
    drawn = set(re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", code_blocks("hooks.md", "mermaid")[0]))
    assert drawn <= known, f"no such hooks: {drawn - known}"


@pytest.fixture
def line() -> types.ModuleType:
    module = types.ModuleType("line")
    exec(code_blocks("write-a-plugin.md", "python")[0], module.__dict__)
    return module


def test_the_simulator_of_the_page_keeps_to_the_contract(line: types.ModuleType) -> None:
    check_env(line.plugin)
    exec(code_blocks("write-a-plugin.md", "python")[1], dict(line.__dict__))


def test_the_row_of_the_page_keeps_to_the_contract(tmp_path: Path) -> None:
    (tmp_path / "dot.py").write_text(code_blocks("write-a-plugin.md", "python")[2])
    check_env(plugins.import_module(str(tmp_path / "dot.py")).plugin)


def test_it_has_the_promised_length() -> None:
    title = re.search(r"## A simulator in (\d+) lines", (DOCS / "write-a-plugin.md").read_text())
    code = code_blocks("write-a-plugin.md", "python")[0].splitlines()
    first = code.index("class Line(SimEnv):")
    last = max(i for i, line in enumerate(code) if line.startswith(" "))
    assert title is not None
    assert last - first + 1 == int(title[1])
    assert max(map(len, code)) <= 120


def test_the_spec_of_the_page_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("line.py").write_text(code_blocks("write-a-plugin.md", "python")[0])
    spec = parse_spec(code_blocks("write-a-plugin.md", "yaml")[0])
    assert isinstance(spec, Spec)
    assert spec.env.type == "line"


if __name__ == "__main__":
    file = DOCS / "hooks.md"
    hand_written = file.read_text().partition(FIRST_SECTION)[0]
    file.write_text(hand_written + hook_sections())

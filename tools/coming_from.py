"""Write the tables of keys of docs/coming-from.md from the mappings that `vla-rl convert` reads.

`python tools/coming_from.py` after a change of a mapping; tests/tools/test_coming_from.py fails while the page is old.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from vla_rl.cli.convert.convert import KeyMapping, Rule, load_mapping

PAGE = Path(__file__).parents[1] / "docs" / "coming-from.md"
BLOCK = re.compile(r"(<!-- keys of (\w+), by tools/coming_from.py -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> None:
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def with_tables(page: str) -> str:
    """Return the page with the tables of each marked block written again."""
    return BLOCK.sub(lambda found: f"{found[1]}\n{table_of(found[2])}\n{found[3]}", page)


def table_of(project: str) -> str:
    """Return the table of a project: what becomes which of our keys, a row for each of our sections, then what has no
    counterpart and what the project ignores itself."""
    mapping = load_mapping(project)
    sections: dict[str, dict[str, list[str]]] = {}
    for key, rule in _rules(mapping):
        if rule.to:
            section, _, ours = rule.to.partition(".")
            theirs = sections.setdefault(section, {}).setdefault(ours, [])
            theirs += [] if _short(key) in theirs else [_short(key)]
    rows = [f"| here | {mapping.title} |", "| --- | --- |"]
    for section, keys in sections.items():
        pairs = [
            ("" if ours == "" or theirs == [ours] else f"`{ours}`: ") + ", ".join(f"`{one}`" for one in theirs)
            for ours, theirs in keys.items()
        ]
        rows.append(f"| `{section}` | {'; '.join(pairs)} |")
    for kind, heading in (("no counterpart", "no counterpart"), ("dead", "ignored there")):
        found = dict.fromkeys(_short(key) for key, rule in _rules(mapping) if rule.kind == kind)
        if found:
            rows.append(f"| {heading} | {', '.join(f'`{one}`' for one in found)} |")
    return "\n".join(rows) + "\n"


def _rules(mapping: KeyMapping) -> Iterator[tuple[str, Rule]]:
    for key, rules in mapping.keys.items():
        for rule in rules:
            yield key, rule


def _short(key: str) -> str:
    """Return the end of a key that tells it apart: its last name, or two where that is a common one."""
    names = key.split(".")
    return ".".join(names[-2:] if names[-1] in ("type", "lr", "enable", "*", "n", "path", "id") else names[-1:])


if __name__ == "__main__":
    main()

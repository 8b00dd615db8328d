"""docs/coming-from.md shows the mappings that the command reads."""

from __future__ import annotations

import coming_from


def test_the_page_is_current() -> None:
    page = coming_from.PAGE.read_text(encoding="utf-8")
    assert coming_from.with_tables(page) == page, "run tools/coming_from.py"
    assert len(coming_from.BLOCK.findall(page)) == 3


def test_every_key_of_ours_is_in_its_table() -> None:
    table = coming_from.table_of("rlinf")
    assert "`clip_low`: `clip_ratio_low`" in table
    (ignored,) = [line for line in table.splitlines() if line.startswith("| ignored there")]
    assert "`clip_ratio_c`" in ignored and "`kl_beta`" in ignored and "`loss_agg_func`" in ignored

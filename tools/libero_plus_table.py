"""Write the plugin's table of LIBERO-Plus's variants from the authors' repository (MIT licence).

git clone https://github.com/sylvestf/LIBERO-plus && python tools/libero_plus_table.py LIBERO-plus

Reads libero/libero/benchmark/task_classification.json and writes suite, name, dimension and level of each variant,
compressed, in official order.
"""

from __future__ import annotations

import csv
import gzip
import json
import sys
from io import StringIO
from pathlib import Path
from typing import Any

from vla_rl.plugins.envs.libero.plus import DIMENSIONS, SUITES
from vla_rl.plugins.envs.libero.plus.variants import TABLE

SOURCE = "libero/libero/benchmark/task_classification.json"
TARGET = Path(__file__).parents[1] / "src/vla_rl/plugins/envs/libero/plus" / TABLE


def table(classification: dict[str, list[dict[str, Any]]]) -> bytes:
    """Return the compressed table. Raise ValueError for variants that are not numbered from 1."""
    dimension_of = {category: dimension for dimension, category in DIMENSIONS.items()}
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for suite in SUITES:
        for number, variant in enumerate(classification[suite], 1):
            if variant["id"] != number:
                raise ValueError(f"{suite}: variant {number} has the id {variant['id']}")
            writer.writerow(
                (suite, variant["name"], dimension_of[variant["category"]], variant["difficulty_level"] or "")
            )
    return gzip.compress(text.getvalue().encode(), mtime=0)


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    TARGET.write_bytes(table(json.loads((Path(sys.argv[1]) / SOURCE).read_text())))
    print(f"wrote {TARGET} ({TARGET.stat().st_size} bytes)")


if __name__ == "__main__":
    main()

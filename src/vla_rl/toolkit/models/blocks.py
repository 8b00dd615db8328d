"""The blocks of a network: its repeated layers, which are compiled one by one, and sharded one by one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def find_blocks(module: nn.Module, classes: Sequence[type[nn.Module]]) -> list[nn.Module]:
    """Return the parts of these classes; of none, members of module lists with parameters. Nested ones are left out."""
    if classes:
        candidates = [part for part in module.modules() if type(part) in classes]
    else:
        lists = [part for parts in module.modules() if isinstance(parts, nn.ModuleList) for part in parts]
        candidates = [part for part in lists if any(True for _ in part.parameters())]
    inner = {id(below) for part in candidates for below in part.modules() if below is not part}
    return list({id(part): part for part in candidates if id(part) not in inner}.values())

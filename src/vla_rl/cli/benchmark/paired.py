"""Two policies on the same evaluation states: which is better, and might it be chance?"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from math import comb
from pathlib import Path
from typing import Any

from attrs import frozen

from vla_rl.core.errors import UserError
from vla_rl.core.installation import quote_path
from vla_rl.core.paths import read_text

LONGEST_RESULT = 500_000_000
"""Characters."""

Episodes = dict[tuple[str, str, int, int], bool]
"""(suite, task, id of the reset state, repeat) -> success."""


@frozen(kw_only=True)
class Pair:
    """Paired outcomes of two policies on the states that both were evaluated on."""

    n: int
    first: int
    """States in which the first policy succeeded."""
    second: int
    first_only: int
    second_only: int

    @property
    def p(self) -> float:
        """Probability that a split at least this unequal, of the states in which the two differ, arises by chance:
        McNemar's test (1947), two-sided and exact (binomial)."""
        n = self.first_only + self.second_only
        tail = sum(comb(n, k) for k in range(min(self.first_only, self.second_only) + 1))
        return min(1.0, 2 * tail / (1 << n))


def compare_episodes(first: Episodes, second: Episodes) -> dict[str, Pair]:
    """Return the pairs for "all" and for each common task. Raises UserError if they share no state."""
    common = first.keys() & second.keys()
    if not common:
        raise UserError("the two have no evaluation state in common: compare evaluations of the same tasks")
    names = dict.fromkeys(_task_name(key) for key in first if key in common)
    return {
        "all": _count_pairs([(first[key], second[key]) for key in common]),
        **{
            name: _count_pairs([(first[key], second[key]) for key in common if _task_name(key) == name])
            for name in names
        },
    }


def pair_results(first: Mapping[str, Any], second: Mapping[str, Any]) -> Pair:
    """Return the outcomes of two results of evaluations. Raises UserError if they share no state."""
    return compare_episodes(_list_outcomes(first), _list_outcomes(second))["all"]


def check_evaluations(*paths: Path) -> None:
    """Raise UserError where one of these is a run, a checkpoint or a spec, with the commands that evaluate it."""
    commands, files = [], []
    for path in paths:
        spec = path.suffix in (".yaml", ".yml") and path.is_file()
        if spec or (path / "spec.yaml").is_file() or (path / "model").is_dir():
            name = "-".join(part for part in path.parts[-3:] if part not in ("checkpoints", "runs", "/", ".."))
            files.append(f"{name.removesuffix(path.suffix) if spec else name}.json")
            commands.append(f"  vla-rl eval {quote_path(path)} --output {shlex.quote(files[-1])}")
        else:
            files.append(str(path))
    if commands:
        both = dict.fromkeys(commands)
        raise UserError(
            f"{' and '.join(str(path) for path, file in zip(paths, files, strict=True) if str(path) != file)}: nothing "
            f"was evaluated yet, and evaluations are compared; on the same states:\n"
            + "\n".join([*both, f"  vla-rl compare {' '.join(map(shlex.quote, files))}"])
        )


def read_episodes(path: Path) -> Episodes:
    """Read the episodes of a `vla-rl eval --output` file or of a benchmark's folder. Raises UserError for others."""
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    successes = {key: success for file in files for key, success in _read_outcomes(file).items()}
    if not successes:
        raise UserError(f"{path} holds no evaluation: give what `vla-rl eval --output FILE` or --benchmark wrote")
    return successes


def print_comparison(pairs: Mapping[str, Pair], given: Any) -> None:
    """Print a line for all states, and for those of each task."""
    width = max(len(name) for name in (*pairs, "success"))
    print(f"{'success':<{width}}    first   second   change   first only   second only         p      n")
    for name, pair in pairs.items():
        first, second = (100 * count / pair.n for count in (pair.first, pair.second))
        p = f"{pair.p:.4f}" if pair.p >= 1e-4 else f"{pair.p:.0e}"
        print(
            f"{name:<{width}}  {first:5.1f} %  {second:5.1f} %   {second - first:+6.1f}   {pair.first_only:10}   "
            f"{pair.second_only:11}   {p:>7}   {pair.n:4}"
        )


def _count_pairs(outcomes: list[tuple[bool, bool]]) -> Pair:
    return Pair(
        n=len(outcomes),
        first=sum(a for a, _ in outcomes),
        second=sum(b for _, b in outcomes),
        first_only=sum(a and not b for a, b in outcomes),
        second_only=sum(b and not a for a, b in outcomes),
    )


def _task_name(key: tuple[str, str, int, int]) -> str:
    suite, task, *_ = key
    return f"{suite}: {task}" if suite else task


def _list_outcomes(result: Mapping[str, Any]) -> Episodes:
    suite = result.get("suite", "")
    return {(suite, one["task"], one["state"], one["episode"]): one["success_once"] for one in result["episodes"]}


def _read_outcomes(file: Path) -> Episodes:
    try:
        return _list_outcomes(json.loads(read_text(file, LONGEST_RESULT)))
    except FileNotFoundError:
        raise UserError(f"{file} does not exist; `vla-rl eval RUN --output {file}` writes it") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise UserError(
            f"{file} is not an evaluation ({type(exc).__name__}: {exc}): give what `vla-rl eval --output FILE` or "
            f"--benchmark wrote"
        ) from None

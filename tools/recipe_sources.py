"""Write recipes/sources/NAME.yaml: the keys of the configuration that a recipe repeats, with file and line, and those
in which the recipe departs from their conversion, and why; these end up in the recipe's head, too.

    python tools/recipe_sources.py --rlinf RLINF --simplevla SIMPLEVLA --siirl SIIRL [NAME ...]

Needs the extra convert and the checkouts. Reasons are written by hand into `differs` and kept; a difference without one
gets an empty reason, which tests/recipes/test_sources.py refuses. The values are facts of public files, which are not
committed.
"""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import evolve

from vla_rl.cli.convert.convert import convert_source
from vla_rl.cli.convert.sources import SourceKeys, SourceValue, read_source
from vla_rl.core.errors import UserError
from vla_rl.core.spec.spec import load_spec, parse_spec
from vla_rl.core.spec.yaml import dump_yaml, parse_yaml
from vla_rl.toolkit.hooks.tracking import flatten_spec

RECIPES = Path(__file__).parents[1] / "recipes"
RLINF = "examples/embodiment/config/{}.yaml"
SOURCES: Mapping[str, tuple[str, str]] = {
    "pirl_pi05_libero_10_ppo": ("rlinf", RLINF.format("libero_10_ppo_openpi_pi05")),
    "pirl_pi05_libero_spatial_grpo": ("rlinf", RLINF.format("libero_spatial_grpo_openpi_pi05")),
    "pirl_pi05_libero_spatial_ppo": ("rlinf", RLINF.format("libero_spatial_ppo_openpi_pi05")),
    "pirl_pi0_libero_spatial_flow_noise_ppo": ("rlinf", RLINF.format("libero_spatial_ppo_openpi")),
    "pirl_pi0_libero_spatial_grpo": ("rlinf", RLINF.format("libero_spatial_grpo_openpi")),
    "pirl_pi0_libero_spatial_ppo": ("rlinf", RLINF.format("libero_spatial_ppo_openpi")),
    "rlinf_oft_libero130_grpo": ("rlinf", RLINF.format("libero_130_grpo_openvlaoft")),
    "rlinf_oft_libero_10_grpo": ("rlinf", RLINF.format("libero_10_grpo_openvlaoft")),
    "rlinf_oft_libero_goal_grpo": ("rlinf", RLINF.format("libero_goal_grpo_openvlaoft")),
    "rlinf_oft_libero_object_grpo": ("rlinf", RLINF.format("libero_object_grpo_openvlaoft")),
    "rlinf_oft_libero_spatial_grpo": ("rlinf", RLINF.format("libero_spatial_grpo_openvlaoft")),
    "rlinf_oft_maniskill_grpo": ("rlinf", RLINF.format("maniskill_grpo_openvlaoft")),
    "rlinf_oft_maniskill_ppo": ("rlinf", RLINF.format("maniskill_ppo_openvlaoft")),
    "rlinf_oft_robotwin_grpo": ("rlinf", RLINF.format("robotwin_beat_block_hammer_grpo_openvlaoft")),
    "rlinf_oft_robotwin_ppo": ("rlinf", RLINF.format("robotwin_place_empty_cup_ppo_openvlaoft")),
    "rlinf_openvla_maniskill_grpo": ("rlinf", RLINF.format("maniskill_grpo_openvla")),
    "rlinf_openvla_maniskill_ppo": ("rlinf", RLINF.format("maniskill_ppo_openvla")),
    "rlvla3_gr00t_libero_10_async": ("rlinf", RLINF.format("libero_10_ppo_gr00t")),
    "rlvla3_oft_libero_10_async": ("rlinf", RLINF.format("libero_10_grpo_openvlaoft")),
    "rlvla3_pi05_libero_10_async": ("rlinf", RLINF.format("libero_10_grpo_openpi_pi05")),
    "simplevla_oft_libero_10_grpo": ("simplevla", "examples/run_openvla_oft_rl_libero.sh"),
    "srpo_oft_libero_10_srpo": ("siirl", "examples/embodied_srpo_trainer/run_openvla_oft_libero_long.sh"),
}
"""Recipe -> project, and the configuration in its repository."""
OURS = re.compile(r"name|seed|hooks|runtime\..*|env\.processes\..*|placement\.(batching|weight_transfer).*")
"""Keys that are not compared: what a source does not say."""


DEPARTS = "Keys that are not the file's: "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    for project in ("rlinf", "simplevla", "siirl"):
        parser.add_argument(f"--{project}", type=Path)
    arguments = parser.parse_args()
    for name, (project, file) in SOURCES.items():
        checkout = getattr(arguments, project)
        if checkout is None or (arguments.names and name not in arguments.names):
            continue
        source = keep_what_counts(without_checkout(read_source(checkout / file, checkout)))
        target = RECIPES / "sources" / f"{name}.yaml"
        target.parent.mkdir(exist_ok=True)
        written = parse_yaml(target.read_text(encoding="utf-8")).data["differs"] if target.exists() else {}
        found = differences(name, source)
        reasons = {owner: written.get(owner, "") for owner in (owner_of(key, written) for key in found)}
        target.write_text(format_sources(name, source, file, reasons), encoding="utf-8")
        recipe = RECIPES / f"{name}.yaml"
        recipe.write_text(with_departures(recipe.read_text(encoding="utf-8"), reasons), encoding="utf-8")
        for key, (theirs, ours) in found.items():
            if not reasons[owner_of(key, written)]:
                print(f"{name}: {key}: {theirs!r} in the source, {ours!r} in the recipe: no reason")


def owner_of(key: str, reasons: Mapping[str, str]) -> str:
    """Return the key, or the one of `reasons` that holds it: `placement` for placement.sim."""
    return next((owner for owner in reasons if key == owner or key.startswith(f"{owner}.")), key)


def with_departures(text: str, reasons: Mapping[str, str]) -> str:
    """Return a recipe whose head says, at the end of `Differs here`, in which keys it departs from the file."""
    head, _, rest = text.partition("# Differs here: ")
    lines, follow = rest.split("\n# Expected:", 1)
    said = " ".join(line.removeprefix("#").strip() for line in lines.splitlines()).partition(DEPARTS)[0].strip()
    listed = ", ".join(f"`{key}` ({reason})" for key, reason in reasons.items())
    sentences = f"{said} {DEPARTS}{listed}." if reasons else said
    wrapped = textwrap.wrap(f"# Differs here: {sentences}", 118, subsequent_indent="#   ", break_long_words=False,
                            break_on_hyphens=False)  # fmt: skip
    return head + "\n".join(wrapped) + "\n# Expected:" + follow


def differences(name: str, source: SourceKeys) -> dict[str, tuple[Any, Any]]:
    """Return our key -> its value in the conversion and in the recipe, where they differ; defaults are written out."""
    recipe = flatten_spec(load_spec(RECIPES / f"{name}.yaml").to_dict())
    converted = flatten_spec(parse_spec(convert_source(source).spec).to_dict())
    pairs = {key: (converted.get(key), recipe.get(key)) for key in [*converted, *recipe]}
    return {key: pair for key, pair in pairs.items() if not OURS.fullmatch(key) and not _is_same(*pair)}


def without_checkout(source: SourceKeys) -> SourceKeys:
    """Name files of the checkout relative to it."""
    prefix = f"{source.checkout}/"
    values = {
        key: evolve(value, value=value.value.removeprefix(prefix)) if isinstance(value.value, str) else value
        for key, value in source.values.items()
    }
    return evolve(source, values=values)


def keep_what_counts(source: SourceKeys) -> SourceKeys:
    """Leave out keys without which the conversion is the same."""
    whole = convert_source(source)
    kept = dict(source.values)
    for key in [one.key for one in whole.of_kind("no effect")]:
        fewer = {name: value for name, value in kept.items() if name != key}
        try:
            less = convert_source(evolve(source, values=fewer))
        except (UserError, KeyError, TypeError):
            continue
        if less.spec == whole.spec and less.differs == whole.differs:
            kept = fewer
    return evolve(source, values=kept)


def read_kept(name: str) -> tuple[SourceKeys, dict[str, str]]:
    """Return what recipes/sources has of a recipe's source, and the reasons for its differences."""
    data = parse_yaml((RECIPES / "sources" / f"{name}.yaml").read_text(encoding="utf-8")).data
    values = {key: SourceValue(value, place) for key, (value, place) in data["keys"].items()}
    return SourceKeys(project=data["project"], file=Path(data["file"]), values=values), data["differs"]


def format_sources(name: str, source: SourceKeys, file: str, reasons: Mapping[str, str]) -> str:
    """Return the text of the file beside a recipe."""
    commit = convert_source(source).mapping.commit
    data = {"project": source.project, "file": file, "commit": commit, "differs": dict(reasons)}
    text = f"# What {name} repeats. tools/recipe_sources.py writes this file, but for the reasons in `differs`.\n"
    text += f"{dump_yaml(data)}keys: # key: [value, file:line]\n"
    folder = f"{Path(file).parent}/"
    for key, value in source.values.items():
        shown = key if re.fullmatch(r"[\w.]+", key) else json.dumps(key)
        text += f"  {shown}: {json.dumps([value.value, value.place.removeprefix(folder)])}\n"
    return text


def _is_same(first: Any, second: Any) -> bool:
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(_is_same, first, second))
    if isinstance(first, float) and isinstance(second, int | float) and not isinstance(second, bool):
        return abs(first - second) <= 1e-12 * max(abs(first), abs(second))
    return bool(first == second)


if __name__ == "__main__":
    main()

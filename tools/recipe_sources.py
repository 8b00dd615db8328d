"""Make recipes from the configurations that they repeat.

    python tools/recipe_sources.py --rlinf RLINF --simplevla SIMPLEVLA --siirl SIIRL [NAME ...]

recipes/sources/NAME.yaml names a configuration (`project`, `file`), and has its keys with file and line, which this
program writes, and the keys in which the recipe departs from their conversion (`differs`): value and reason. With a
`head` there (title, what the authors report, changes for one GPU, ...) the whole recipe is written, too; a new one
begins with a file of `project`, `file`, `head` and `differs`. Without it the recipe is written by hand, and the
departures end up in its head; a difference without a reason gets an empty one, which tests/recipes/test_sources.py
refuses.

Needs the extra convert and the checkouts. The values are facts of public files, which are not committed.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from attrs import evolve, field, frozen

import vla_rl
from vla_rl.cli.convert.convert import Conversion, convert_source
from vla_rl.cli.convert.sources import SourceKeys, SourceValue, read_source
from vla_rl.core.errors import UserError
from vla_rl.core.spec.spec import load_spec, parse_spec
from vla_rl.core.spec.yaml import dump_yaml, parse_yaml, value_at
from vla_rl.toolkit.hooks.tracking import flatten_spec

RECIPES = Path(__file__).parents[1] / "recipes"
PACKAGED = RECIPES.parent / "src" / "vla_rl" / "cli" / "recipes"
PROJECTS = ("rlinf", "simplevla", "siirl")
OURS = re.compile(r"name|seed|hooks|runtime\..*|env\.processes\..*|placement\.(batching|weight_transfer).*")
"""Keys that are not compared: what a source does not say."""
DEPARTS = "Keys that are not the file's: "
HOOKS = [{"type": "console"}, {"type": "jsonl"}, {"type": "tensorboard"}, {"type": "video", "episodes": 4}]
GEMMA = (
    "PaliGemma's tokenizer.json (`model.tokenizer`), which the checkpoint's folder lacks. Google gives it under "
    "Gemma's licence; accept it at https://huggingface.co/google/paligemma-3b-pt-224, then:"
)
LACKS = "the tokenizer.json of {}, which the checkpoint's folder lacks, in the folder `{}` (`model.tokenizer`)."
NEEDS = {
    "paligemma": (GEMMA, "hf download google/paligemma-3b-pt-224 tokenizer.json --local-dir paligemma"),
    "eagle": (LACKS.format("GR00T N1.5's language model (Eagle)", "eagle"),),
}
"""Folder of a tokenizer -> what a head says of it, and a command that fetches it."""


@frozen(kw_only=True)
class RecipeSources:
    """What recipes/sources has of a recipe."""

    project: str
    file: str
    head: Mapping[str, Any] = field(factory=dict)
    """For recipes that are written whole: title; reports, what the authors report; one_gpu, the changes for one GPU;
    hardware; source, what the figures are from besides; variables, a script's variable -> [what it has, what it is set
    to]; differs, what else differs."""
    differs: Mapping[str, tuple[Any, str]] = field(factory=dict)
    """Our key -> the recipe's value, and why it is not the source's."""
    keys: SourceKeys
    kinds: Mapping[str, str] = field(factory=dict)
    """Key of the source -> what becomes of it (`mapping.KINDS`)."""

    @property
    def reasons(self) -> dict[str, str]:
        return {key: reason for key, (_, reason) in self.differs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    for project in PROJECTS:
        parser.add_argument(f"--{project}", type=Path)
    parser.add_argument(
        "--expected", action="store_true", help="only write the forecasts of `vla-rl plan` into the heads"
    )
    arguments = parser.parse_args()
    if arguments.expected:
        for file in sorted(RECIPES.glob("*.yaml")):
            if not arguments.names or file.stem in arguments.names:
                update_expected(file)
        return
    for name in arguments.names or all_names():
        kept = read_kept(name)
        checkout = getattr(arguments, kept.project)
        if checkout is None:
            continue
        checkout = checkout.resolve()
        keys = without_checkout(read_source(checkout / kept.file, checkout))
        kept = evolve(kept, keys=keep_what_counts(set_variables(keys, kept.head.get("variables", {}))))
        recipe = RECIPES / f"{name}.yaml"
        if kept.head:
            link = PACKAGED / recipe.name
            if not link.is_symlink():
                link.symlink_to(Path(*[".."] * 4, "recipes", recipe.name))
            recipe.write_text(format_recipe(name, kept, expected=""), encoding="utf-8")
            recipe.write_text(format_recipe(name, kept, expected=forecast(name)), encoding="utf-8")
        found = differences(name, kept.keys)
        if not kept.head:
            plain = load_spec(recipe).to_dict()
            owners = dict.fromkeys(owner_of(key, kept.differs) for key in found)
            values = {key: (value_at(plain, key.split(".")), kept.reasons.get(key, "")) for key in owners}
            kept = evolve(kept, differs=values)
            text = recipe.read_text(encoding="utf-8")
            recipe.write_text(with_departures(text, kept.reasons), encoding="utf-8")
        (RECIPES / "sources" / f"{name}.yaml").write_text(format_sources(name, kept), encoding="utf-8")
        for key, (theirs, ours) in found.items():
            if not kept.reasons.get(owner_of(key, kept.differs)):
                print(f"{name}: {key}: {theirs!r} in the source, {ours!r} in the recipe: no reason")


def all_names() -> list[str]:
    return sorted(file.stem for file in (RECIPES / "sources").glob("*.yaml"))


def owner_of(key: str, owners: Mapping[str, Any]) -> str:
    """Return the key, or the one of `owners` that holds it: `placement` for placement.sim."""
    return next((owner for owner in owners if key == owner or key.startswith(f"{owner}.")), key)


def format_recipe(name: str, kept: RecipeSources, expected: str) -> str:
    """Return the text of a recipe that is its source's conversion but for the departures."""
    converted = convert_source(kept.keys)
    spec: dict[str, Any] = json.loads(json.dumps(converted.spec))
    for key, (value, _) in kept.differs.items():
        *parents, last = key.split(".")
        section = spec
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
        if value is None:
            del section[last]
    for section, value in spec.items():
        if isinstance(value, dict) and "type" in value:
            spec[section] = {"type": value["type"]} | value
    spec |= {"name": name.replace("_", "-"), "hooks": HOOKS}
    lines = _head_lines(name, kept, converted, spec, expected)
    for section, value in spec.items():
        flow = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=100, allow_unicode=True)
        first, *rest = flow.removesuffix("...\n").splitlines()
        lines += [f"{section + ': ':<11}{first}" if isinstance(value, dict | list) else f"{section}: {first}"]
        lines += [f"{'':10}{line}" for line in rest]
    return "\n".join(lines) + "\n"


def _head_lines(
    name: str, kept: RecipeSources, converted: Conversion, spec: Mapping[str, Any], expected: str
) -> list[str]:
    head = kept.head
    sets = "".join(f", with {key}={value}" for key, (_, value) in head.get("variables", {}).items())
    also = f"; {head['source']}" if "source" in head else ""
    needs = NEEDS.get(spec["model"].get("tokenizer", ""), ())
    sentences = [*head.get("differs", ()), *converted.sentences()]
    departs = f" {_departures(kept.reasons)}" if kept.differs else ""
    changes = shlex.join(head["one_gpu"])
    return [
        *_wrap(f"{head['title']}."),
        *_wrap(
            f"Source: {converted.mapping.title}'s repository at {converted.mapping.commit}, {kept.file}{sets}{also}."
        ),
        *_wrap(f"Hardware: {head.get('hardware', 'unknown')}."),
        *(line for text in needs[:1] for line in _wrap(f"Needs: {text}")),
        *(f"#   {text}" for text in needs[1:]),
        *_wrap(f"The authors report: {head['reports']}."),
        *_wrap(f"Differs here: {' '.join(f'{text}.' for text in sentences)}{departs}"),
        *_wrap(f"Expected: {expected}"),
        "# On one GPU:",
        f"#   vla-rl run {name} {changes}",
        "# On eight GPUs:",
        f"#   vla-rl run {name}",
    ]


def forecast(name: str) -> str:
    """Return what a recipe's head says it is expected to take: what `vla-rl plan` forecasts of its placement."""
    (own, *_) = (row for row in vla_rl.plan(RECIPES / f"{name}.yaml", gpu="h100", devices=8) if row["spec"])
    seconds = own["estimate"]["simulation_s"]
    simulated = f"{_number(seconds)} s a chunk step of an env on a core" if seconds else "simulation not counted, as no"
    simulated += "" if seconds else " rate of it is known"
    steps, rollout, update = (_number(own[f"{part}_s"]) for part in ("iteration", "rollout", "update"))
    return (
        f"{'at least ' if own['bounds'] else ''}{steps} s a step (rollout {rollout}, update {update}) and "
        f"{own['device_bytes'] / 2**30:.1f} GiB on the fullest GPU, by `vla-rl plan {name} --gpu h100 --devices 8`: "
        f"rates of the data sheet, not calibrated; episodes to their limit, {simulated}; 16 cores a GPU."
    )


def _number(value: float) -> str:
    return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f}"


def _wrap(text: str) -> list[str]:
    indented = bool(re.match(r"[A-Z][a-z ]+: ", text))
    return textwrap.wrap(f"# {text}", 118, subsequent_indent="#   " if indented else "# ", break_long_words=False,
                         break_on_hyphens=False)  # fmt: skip


def _departures(reasons: Mapping[str, str]) -> str:
    return f"{DEPARTS}{', '.join(f'`{key}` ({reason})' for key, reason in reasons.items())}."


def with_departures(text: str, reasons: Mapping[str, str]) -> str:
    """Return a recipe whose head says, at the end of `Differs here`, in which keys it departs from the file."""
    head, _, rest = text.partition("# Differs here: ")
    lines, follow = rest.split("\n# Expected:", 1)
    said = " ".join(line.removeprefix("#").strip() for line in lines.splitlines()).partition(DEPARTS)[0].strip()
    sentences = f"{said} {_departures(reasons)}" if reasons else said
    return head + "\n".join(_wrap(f"Differs here: {sentences}")) + "\n# Expected:" + follow


def update_expected(recipe: Path) -> None:
    """Replace the sentence after `Expected:` in a recipe's head by the forecast of today's `vla-rl plan`."""
    text = recipe.read_text(encoding="utf-8")
    before, rest = text.split("# Expected: ", 1)
    after = rest.partition("# On one GPU:")[2]
    expected = "\n".join(_wrap(f"Expected: {forecast(recipe.stem)}"))
    recipe.write_text(f"{before}{expected}\n# On one GPU:{after}", encoding="utf-8")


def expected_of(text: str) -> str:
    """Return the sentence after `Expected:` in a recipe's head, without line breaks."""
    lines = re.search(r"^# Expected: (.+?)^# On one GPU:", text, flags=re.MULTILINE | re.DOTALL)
    assert lines is not None
    return " ".join(line.removeprefix("#").strip() for line in lines[1].splitlines())


def differences(name: str, source: SourceKeys) -> dict[str, tuple[Any, Any]]:
    """Return our key -> its value in the conversion and in the recipe, where they differ; defaults are written out."""
    recipe = flatten_spec(load_spec(RECIPES / f"{name}.yaml").to_dict())
    converted = flatten_spec(parse_spec(convert_source(source).spec).to_dict())
    pairs = {key: (converted.get(key), recipe.get(key)) for key in [*converted, *recipe]}
    return {key: pair for key, pair in pairs.items() if not OURS.fullmatch(key) and not is_same(*pair)}


def set_variables(source: SourceKeys, variables: Mapping[str, tuple[str, str]]) -> SourceKeys:
    """Set variables of a script, which its user chooses, in all values that have them."""
    values = dict(source.values)
    for old, new in variables.values():
        for key, value in values.items():
            if isinstance(value.value, str):
                values[key] = evolve(value, value=value.value.replace(old, new))
    return evolve(source, values=values)


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


def read_kept(name: str) -> RecipeSources:
    """Return what recipes/sources has of a recipe."""
    data = parse_yaml((RECIPES / "sources" / f"{name}.yaml").read_text(encoding="utf-8")).data
    rows = data.get("keys", {})
    values = {key: SourceValue(value, place) for key, (value, place, *_) in rows.items()}
    strays = tuple(data.get("strays", ()))
    keys = SourceKeys(project=data["project"], file=Path(data["file"]), values=values, strays=strays)
    return RecipeSources(
        project=data["project"],
        file=data["file"],
        head=data.get("head", {}),
        differs={key: tuple(pair) for key, pair in data.get("differs", {}).items()},
        keys=keys,
        kinds={key: row[-1] for key, row in rows.items()},
    )


def kinds_of(source: SourceKeys) -> dict[str, str]:
    """Return what becomes of each key of a source."""
    return {one.key: one.kind for one in convert_source(source).keys if one.key}


def format_sources(name: str, kept: RecipeSources) -> str:
    """Return the text of the file beside a recipe."""
    commit = convert_source(kept.keys).mapping.commit
    data: dict[str, Any] = {"project": kept.project, "file": kept.file, "commit": commit}
    data |= {"head": dict(kept.head)} if kept.head else {}
    data |= {"strays": list(kept.keys.strays)} if kept.keys.strays else {}
    text = (
        f"# What {name} repeats. tools/recipe_sources.py writes this file, but for `head` and reasons in `differs`.\n"
    )
    text += dump_yaml(data) + ("differs: # key: [value, reason]\n" if kept.differs else "differs: {}\n")
    text += "".join(f"  {key}: {json.dumps(list(pair))}\n" for key, pair in kept.differs.items())
    text += "keys: # key: [value, file:line, what becomes of it]\n"
    kinds = kinds_of(kept.keys)
    folder = f"{Path(kept.file).parent}/"
    for key, value in kept.keys.values.items():
        shown = key if re.fullmatch(r"[\w.]+", key) else json.dumps(key)
        text += f"  {shown}: {json.dumps([value.value, value.place.removeprefix(folder), kinds[key]])}\n"
    return text


def is_same(first: Any, second: Any) -> bool:
    """Compare values of specs; numbers up to rounding."""
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(is_same, first, second))
    if isinstance(first, float) and isinstance(second, int | float) and not isinstance(second, bool):
        return abs(first - second) <= 1e-12 * max(abs(first), abs(second))
    return bool(first == second)


if __name__ == "__main__":
    main()

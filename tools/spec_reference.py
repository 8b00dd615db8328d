"""Write docs/reference/spec.md and docs/reference/plugin-keys.md from the classes that read a spec.

`python tools/spec_reference.py` after a change of a key; `tests/test_spec_reference.py` fails while a page is stale.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import attrs

from vla_rl.core.catalogue import OWN_DIST, installed_plugins, load
from vla_rl.core.spec.sections import Component
from vla_rl.core.spec.spec import Spec
from vla_rl.core.spec.structure import keys_of, tags_of

DOCS = Path(__file__).parents[1] / "docs" / "reference"
EXAMPLES: Mapping[str, Any] = {
    "name": "my-run",
    "model": {"type": "openvla_oft", "preset": "fast"},
    "algorithm": {"type": "grpo"},
    "trainer.type": "policy_gradient",
    "placement.type": "collocated",
    "world_model": {"type": "edm", "preset": "tiny"},
    "rewards.type": "classifier",
    "rewards.folder": "classifiers/lift",
    "hooks": [{"type": "console"}, {"type": "jsonl"}, {"type": "tensorboard"}],
    "env.type": "tabletop",
    "env.num_envs": 16,
    "rollout.chunk": 8,
    "rollout.episodes": 64,
    "train.steps": 100,
    "train.lr": 1e-4,
    "train.micro_batch": 64,
    "bc_warmup.episodes": 200,
    "bc_warmup.epochs": 3,
    "bc_warmup.lr": 1e-3,
    "imitation.steps": 600,
    "imitation.lr": 1e-3,
    "imitation.expert": {"episodes": 512},
}
"""Values of the snippets for keys without a default, or whose default would say too little."""
KINDS = {
    "model": ("Models", "[What loads](../models.md)"),
    "engine": ("Engines", "The keys of `rollout.engine` ([engines](engines.md))."),
    "env": ("Simulators", "`num_envs` and `python` are keys of [`env`](spec.md#env) itself."),
    "algorithm": ("Algorithms", "[Equations and use](algorithms.md) of each key."),
    "trainer": ("Trainers", "The keys of `trainer` and `imitation.trainer` ([trainers](trainers.md))."),
    "placement": (
        "Placement",
        "[Strategies](placement.md). `weight_transfer` is a key of [`placement`](spec.md#placement) itself.",
    ),
    "data": ("Data", "The keys of `imitation.data` ([how to](../how-to/clone-demonstrations.md))."),
    "hook": ("Hooks", "The keys of an item of `hooks`."),
    "world_model": ("World models", "[World models](world-models.md)"),
    "reward_model": ("Reward models", "The keys of `rewards` ([how to](../how-to/reward-models.md))."),
}
"""Kind of plugin -> heading, and what stands below it."""


def fields_documentation(cls: type) -> dict[str, str]:
    """Return the text below each field of a class and its bases."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not attrs.has(base):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for line, following in zip(body.body, body.body[1:], strict=False):
            if not isinstance(line, ast.AnnAssign) or not isinstance(line.target, ast.Name):
                continue
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                texts[line.target.id] = inspect.cleandoc(str(following.value.value))
    return texts


def bounds(validator: Any) -> Iterator[tuple[str, Any]]:
    """Yield the comparisons of a validator as (operator, bound)."""
    if hasattr(validator, "_validators"):
        for inner in getattr(validator, "_validators"):  # noqa: B009 (attrs has no public name for it)
            yield from bounds(inner)
    elif hasattr(validator, "compare_op"):
        yield validator.compare_op, validator.bound
    elif hasattr(validator, "validator"):
        yield from bounds(validator.validator)


def number(value: float) -> str:
    """Return a number as a reader writes it: 100,000; 1e-12."""
    if isinstance(value, int) or (float(value).is_integer() and abs(value) < 1e15):
        return f"{int(value):,}"
    return re.sub(r"e([+-])0*", lambda match: "e-" if match[1] == "-" else "e", f"{value:g}")


def bounds_in_words(validator: Any) -> str:
    """Return the range that a validator allows: `, 1 to 100,000`, or nothing."""
    found = list(bounds(validator))
    lows = [(bound, operator) for operator, bound in found if operator in (">", ">=")]
    highs = [(bound, operator) for operator, bound in found if operator in ("<", "<=")]
    low, high = max(lows, default=None), min(highs, default=None)
    if low and high and low[1] == ">=" and high[1] == "<=":
        return f", {number(low[0])} to {number(high[0])}"
    words = {">": "above", ">=": "at least", "<": "below", "<=": "at most"}
    parts = [f"{words[end[1]]} {number(end[0])}" for end in (low, high) if end]
    return ", " + " and ".join(parts) if parts else ""


def type_in_words(kind: Any) -> str:
    """Return a type as a spec writes it: `integer`, `list of text`, `` `off` or `on` ``."""
    plain = {
        int: "integer",
        float: "number",
        str: "text",
        bool: "`true` or `false`",
        Path: "path",
        type(None): "`null`",
    }
    if kind in plain:
        return plain[kind]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return either([f"`{'null' if value is None else value}`" for value in arguments])
    if origin in (Union, types.UnionType):
        return either([type_in_words(argument) for argument in sorted(arguments, key=lambda a: a is type(None))])
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return f"list of {plural(type_in_words(arguments[0]))}"
    if origin is tuple:
        return f"list of {len(arguments)}: {', '.join(type_in_words(argument) for argument in arguments)}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"mapping: {type_in_words(arguments[0])} to {type_in_words(arguments[1])}"
    if isinstance(origin, type) and issubclass(origin, (Sequence, AbstractSet)):
        return f"list of {plural(type_in_words(arguments[0]))}"
    if isinstance(kind, type) and issubclass(kind, Component):
        return "a plugin: `type` and its keys"
    if tags := tags_of(kind):
        return either([f"`{{type: {tag}}}`" for tag in tags])
    return "mapping" if attrs.has(kind) else "any value"


def options(validator: Any) -> tuple[str, ...]:
    """Return the texts that a validator allows, or nothing."""
    found: tuple[str, ...] = ()
    for inner in getattr(validator, "_validators", ()):
        found = found or options(inner)
    allowed = getattr(validator, "options", None)
    if allowed is not None and not isinstance(allowed, Mapping) and all(isinstance(text, str) for text in allowed):
        return tuple(allowed)
    return options(validator.validator) if hasattr(validator, "validator") else found


def value_in_words(kind: Any, validator: Any) -> str:
    """Return the type and the range of a key: `integer, 1 to 100, or null`."""
    words, limits = type_in_words(kind), bounds_in_words(validator)
    if words in ("text", "text or `null`") and (choices := options(validator)):
        return either([f"`{choice}`" for choice in choices] + ["`null`"] * (words != "text"))
    head, null, _ = words.rpartition(" or `null`")
    return f"{head}{limits}, or `null`" if null and limits else words + limits


def plural(word: str) -> str:
    """Return `integers` for `integer`; other words stay."""
    return f"{word}s" if word in ("integer", "number", "path", "mapping") else word


def either(choices: Sequence[str]) -> str:
    """Return `a, b or c`."""
    unique = list(dict.fromkeys(word for choice in choices for word in re.split(r" or (?=`)|, (?=`)", choice)))
    return " or ".join([", ".join(unique[:-1]), unique[-1]]) if len(unique) > 1 else unique[0]


def parts_of(kind: Any) -> list[type]:
    """Return the attrs classes within a type, whose keys get separate lines."""
    if attrs.has(kind) and not (isinstance(kind, type) and issubclass(kind, Component)):
        return [kind]
    return [part for argument in get_args(kind) for part in parts_of(argument)]


def flow(value: Any) -> str:
    """Return a value in YAML's flow style."""
    if isinstance(value, Component):
        return "{" + f"type: {value.type}" + "}"
    if attrs.has(type(value)):
        value = {name: getattr(value, attribute.name) for name, attribute in keys_of(type(value)).items()}
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(flow(item) for item in value) + "]"
    if isinstance(value, (AbstractSet,)):
        return flow(sorted(value))
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, float):
        mantissa, e, exponent = f"{value:g}".partition("e")
        return f"{mantissa if '.' in mantissa else mantissa + '.0'}e{int(exponent)}" if e else f"{value!r}"
    text = str(value)
    return (
        text
        if re.fullmatch(r"[\w./][\w ./:-]*", text) and text not in ("null", "true", "off", "on", "no")
        else json.dumps(text)
    )


def default_of(attribute: attrs.Attribute[Any], cls: type) -> Any:
    """Return the default of a field, or NOTHING."""
    default = attribute.default
    if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
        return attrs.NOTHING if default.takes_self else default.factory()  # type: ignore[union-attr]
    return default


def lines_of(cls: type, prefix: str = "", leave_out: Sequence[str] = ()) -> Iterator[str]:
    """Yield the rows of the table of a section's keys; keys of mappings within it are written with a dot, and those of
    a mapping that has a `type` say which."""
    hints, texts, tags = typing.get_type_hints(cls), fields_documentation(cls), tags_of(cls)
    for key, attribute in keys_of(cls).items():
        if key in leave_out:
            continue
        if tags and key == "type":
            names, meaning = either([f"`{tag}`" for tag in tags]), " ".join((inspect.getdoc(cls) or "").split())
            yield f"| `{prefix}{key}` | {names} | **required** | {meaning} |"
            continue
        kind = hints[attribute.name]
        default = default_of(attribute, cls)
        parts = parts_of(kind)
        if attribute.default is attrs.NOTHING:
            shown = "**required**"
        elif default is attrs.NOTHING:
            shown = "follows from other keys"
        else:
            shown = "as below" if parts and attrs.has(type(default)) else f"`{flow(default)}`"
        text = re.sub(r"\b([Nn]one|[Nn]ull):", "`null`:", " ".join(texts.get(attribute.name, "").split()))
        words = value_in_words(kind, attribute.validator)
        text = f"With `type: {' | '.join(tags)}`. {text}" if tags else text
        yield f"| `{prefix}{key}` | {words} | {shown} | {text.replace('|', chr(92) + '|')} |"
        for part in parts:
            yield from lines_of(part, f"{prefix}{key}.")


def table(cls: type, leave_out: Sequence[str] = ()) -> str:
    """Return the table of the keys of a section."""
    rows = list(lines_of(cls, leave_out=leave_out))
    return (
        "\n".join(["| key | value | default | meaning |", "| --- | --- | --- | --- |", *rows]) if rows else "No keys."
    )


def snippet(name: str, cls: type, given: Mapping[str, Any], leave_out: Sequence[str] = ()) -> str:
    """Return a section in YAML with the defaults of its keys; `given` has the values of others, and keys of its
    plugin."""
    lines = []
    for key, attribute in keys_of(cls).items():
        if key in leave_out and key not in given:
            continue
        value = given.get(key, default_of(attribute, cls))
        if value is attrs.NOTHING:
            lines.append(f"  # {key}: required" if attribute.default is attrs.NOTHING else f"  # {key}")
        else:
            lines.append(f"  {key}: {flow(value)}")
    lines += [f"  {key}: {flow(value)}" for key, value in given.items() if key not in keys_of(cls)]
    return "\n".join([f"{name}:", *lines])


def sections() -> dict[str, tuple[type | None, str]]:
    """Return the keys of a spec: name -> class of a section (None: a plugin or a value), and its YAML."""
    hints = typing.get_type_hints(Spec)
    result: dict[str, tuple[type | None, str]] = {}
    for name, attribute in keys_of(Spec).items():
        classes = [
            a for a in (hints[attribute.name], *get_args(hints[attribute.name])) if attrs.has(a) and a is not Component
        ]
        if not classes:
            value = EXAMPLES[name] if name in EXAMPLES else default_of(attribute, Spec)
            result[name] = (None, f"{name}: {flow(value)}")
            continue
        given = {key.partition(".")[2]: value for key, value in EXAMPLES.items() if key.startswith(f"{name}.")}
        result[name] = (classes[0], snippet(name, classes[0], given, leave_out=("config",)))
    return result


def spec_page() -> str:
    """Return docs/reference/spec.md."""
    texts, hints = fields_documentation(Spec), typing.get_type_hints(Spec)
    page = """# Keys of a spec

A spec is one YAML file with these sections. `type:` names a plugin, whose keys are next to it
([keys of plugins](plugin-keys.md)). Unknown keys, wrong types and values out of range are reported together, with file
and line. Where a key takes one of several tables, the table's `type` says which, and it has the keys of that one alone.
`vla-rl check SPEC --show` prints a spec with all its defaults. Snippets show the defaults, and examples of
required keys.

`tools/spec_reference.py` writes this page.
"""
    described = {
        "rollout": "",
        "model": "The policy that is trained: a [model](plugin-keys.md#models).",
        "algorithm": "The loss and its settings: an [algorithm](plugin-keys.md#algorithms).",
        "placement": "Which worker runs where: a [placement](plugin-keys.md#placement).",
        "hooks": "Listeners to the events of a run: a list of [hooks](plugin-keys.md#hooks).",
    }
    for name, (cls, yaml) in sections().items():
        attribute = keys_of(Spec)[name]
        need = "Required." if attribute.default is attrs.NOTHING else ""
        text = " ".join((texts.get(name) or described.get(name) or inspect.getdoc(cls) or "").split())
        if cls is None and name in ("name", "seed", "plugins"):
            need = f"{value_in_words(hints[name], attribute.validator)}. {need}".strip()
            need = need[:1].upper() + need[1:]
        if name == "world_model":
            text += " See the [world models](plugin-keys.md#world-models)."
        page += f"\n## {name}\n\n{' '.join(part for part in (text, need) if part)}\n\n```yaml\n{yaml}\n```\n"
        if cls is not None:
            page += f"\n{table(cls, leave_out=('config',))}\n"
    return page


def plugins_page() -> str:
    """Return docs/reference/plugin-keys.md."""
    page = """# Keys of plugins

The keys next to `type:` in a section of a spec, for each plugin of this repository. The snippets show the
defaults.

`tools/spec_reference.py` writes this page.
"""
    for kind, (heading, below) in KINDS.items():
        page += f"\n## {heading}\n\n{below}\n"
        for name, items in sorted(installed_plugins(kind).items()):
            if all(item.dist != OWN_DIST for item in items):
                continue
            plugin = load(kind, name)
            section = {"hook": "hooks", "data": "imitation.data", "reward_model": "rewards"}.get(kind, kind)
            body = snippet("", plugin.config, {}).partition("\n")[2]
            indented = f"  type: {name}\n{body}".rstrip()
            if kind == "hook":
                yaml = "hooks:\n" + indented.replace("  type", "  - type", 1).replace("\n  ", "\n    ")
            elif kind == "data":
                yaml = "imitation:\n  data:\n" + textwrap.indent(indented, "  ")
            else:
                yaml = f"{section}:\n{indented}"
            summary = plugin.summary[:1].upper() + plugin.summary[1:].rstrip(".")
            page += f"\n### {kind}: {name}\n\n{summary}.\n\n```yaml\n{yaml}\n```\n\n{table(plugin.config)}\n"
    return page


PAGES = {DOCS / "spec.md": spec_page, DOCS / "plugin-keys.md": plugins_page}

if __name__ == "__main__":
    for file, made in PAGES.items():
        file.write_text(made())
        sys.stdout.write(f"{file}\n")

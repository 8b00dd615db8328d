"""Protocols of published evaluations: keys of a spec that repeat how a paper measured, each with its source.

A protocol is a YAML file; those of this package go by their names, and any other by its path:

    title: OpenVLA's script for LIBERO
    env: libero                                   # `env.type` of the spec
    sources: {openvla: openvla/openvla@c8f03f48}  # short name -> repository@commit
    cases:                                        # later ones win
      - keys: {env.settle_steps: {value: 10, source: "openvla:FILE:LINE"}}
      - when: {env.suite: libero_10}              # a value of the spec, or a list of them
        keys: {rollout.max_steps: {value: 520, source: "openvla:FILE:LINE"}}
    differs: [what no key can repeat]
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import evolve, field, frozen

from vla_rl.core.errors import SpecError, UserError
from vla_rl.core.spec.known_checkpoints import KnownValue, written_source
from vla_rl.core.spec.shipped_files import parse_file, read_named
from vla_rl.core.spec.source import format_problems
from vla_rl.core.spec.spec import Spec
from vla_rl.core.spec.yaml import value_at

PACKAGE = "vla_rl.cli.protocol"


@frozen(kw_only=True)
class ProtocolCase:
    """Keys of a protocol, and the values of the spec for which they hold."""

    keys: dict[str, KnownValue]
    when: dict[str, Any] = field(factory=dict)
    """Key of the spec -> value, or list of values; empty: always."""


@frozen(kw_only=True)
class Protocol:
    """The content of a protocol's file."""

    title: str
    env: str
    cases: tuple[ProtocolCase, ...]
    sources: dict[str, str] = field(factory=dict)
    differs: tuple[str, ...] = ()
    """What no key can repeat."""

    def keys_for(self, plain: Mapping[str, Any]) -> dict[str, KnownValue]:
        """Return the keys that hold with a spec, given as plain data."""
        keys: dict[str, KnownValue] = {}
        for case in self.cases:
            if all(
                value_at(plain, key.split(".")) in (v if isinstance(v, list) else [v]) for key, v in case.when.items()
            ):
                keys |= case.keys
        return keys


def load_protocol(name: str) -> Protocol:
    """Load a protocol by name or path. Raise UserError if it does not exist, or if the file does not hold one."""
    protocol, _ = parse_file(read_named("protocol", name, PACKAGE, "openvla.yaml"), name, Protocol)
    cases = []
    for number, case in enumerate(protocol.cases):
        try:
            keys = {k: evolve(v, source=written_source(v.source, protocol.sources)) for k, v in case.keys.items()}
        except ValueError as exc:
            raise UserError(f"{name}: cases.{number}: source: {exc}") from None
        cases.append(evolve(case, keys=keys))
    return evolve(protocol, cases=tuple(cases))


def with_protocol(
    name: str, load_spec: Callable[[Sequence[str]], Spec], overrides: Sequence[str], recorded: bool
) -> Spec:
    """Return the spec with the keys of a protocol. Raise SpecError where the spec's author set one of them otherwise,
    and UserError for a protocol of another simulator.

    Args:
        load_spec: further overrides -> the spec.
        overrides: those of the user, already part of `load_spec`.
        recorded: the spec is that of a run, whose keys are those of its training; only overrides count as the
            author's.
    """
    protocol, spec = load_protocol(name), load_spec(())
    if spec.env.type != protocol.env:
        raise UserError(f"--protocol {name}: is for env {protocol.env!r}, and the spec's is {spec.env.type!r}")
    plain = spec.to_dict()
    changes: dict[str, Any] = {}
    problems = []
    own = {override.partition("=")[0].strip() for override in overrides}
    for key, known in protocol.keys_for(plain).items():
        path = tuple(key.split("."))
        value = value_at(plain, path)
        lines = spec.source.lines if spec.source is not None and not recorded else {}
        is_own = path in lines or any(key == other or key.startswith(f"{other}.") for other in own)
        if value == known.value:
            continue
        if is_own:
            wanted = json.dumps(known.value)
            text = f"{json.dumps(value)} contradicts --protocol {name}: {wanted} ({known.source}); leave the key out"
            problems.append((path, text))
        else:
            changes[key] = known.value
    if problems:
        raise SpecError(format_problems(problems, spec.source))
    return load_spec([f"{key}={json.dumps(value)}" for key, value in changes.items()]) if changes else spec


def protocol_record(name: str, spec: Spec) -> dict[str, Any]:
    """Return what a result says about its protocol: name, title, keys with values and sources, and what differs."""
    protocol = load_protocol(name)
    keys = protocol.keys_for(spec.to_dict())
    return {
        "name": name,
        "title": protocol.title,
        "keys": {key: {"value": known.value, "source": known.source} for key, known in keys.items()},
        "differs": list(protocol.differs),
    }

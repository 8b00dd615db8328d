"""`vla-rl eval --refute`: a card of what would explain a success rate away, on a part of the same states."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from attrs import evolve, frozen

from vla_rl.cli.benchmark.paired import compare_episodes
from vla_rl.core.paths import write_whole
from vla_rl.core.spec.sections import AblationSpec, ConventionsSpec
from vla_rl.core.spec.spec import Spec, has_own_policy, make_component
from vla_rl.core.types import EnvInfo
from vla_rl.runtime.run_folder.env_info import read_env_info

SHARE = 4
"""Every so many states of the evaluation are evaluated again in each variant."""
KEPT = 0.75
"""Share of the success that a variant keeps at least, by its interval, if success does not depend on what it lacks."""
CLEAR = 0.05
"""Probability of McNemar's test below which a variant is clearly worse."""
PROBE_STEPS = 1000
"""Most optimiser steps of the probe."""
Evaluate = Callable[[Spec, Path | None], dict[str, Any]]


@frozen(kw_only=True)
class Ablated:
    """An evaluation without something."""

    name: str
    shortcut: str
    """What is said of the policy where it succeeds all the same; empty: nothing is wrong with that."""
    ablate: AblationSpec | None = None
    split: Literal["eval", "train"] = "eval"
    probe: bool = False
    """It is the rate of a small policy without language, cloned from the same demonstrations."""


def list_variants(spec: Spec, info: EnvInfo) -> Iterator[Ablated]:
    """Yield the variants that this policy and simulator have."""
    texts = list(dict.fromkeys(task.instruction for task in info.tasks))
    unread = "it does not read the instruction"
    if len(texts) > 1:
        others = dict(zip(texts, [*texts[1:], texts[0]], strict=True))
        yield Ablated(name="instruction of another task", shortcut=unread, ablate=AblationSpec(instructions=others))
        yield Ablated(name="no instruction", shortcut=unread, ablate=AblationSpec(instructions={"*": ""}))
    seen = getattr(spec.model.config, "cameras", None) or tuple(info.cameras)
    for camera in seen if len(seen) > 1 else ():
        text = f"it does not look at camera {camera}"
        yield Ablated(name=f"camera {camera} black", shortcut=text, ablate=AblationSpec(black=(camera,)))
    yield Ablated(name="all cameras black", shortcut="it does not look", ablate=AblationSpec(black=tuple(info.cameras)))
    if info.state_dim:
        yield Ablated(name="state zeroed", shortcut="", ablate=AblationSpec(zero_state=True))
    yield Ablated(
        name="first chunk repeated", shortcut="it does not close the loop", ablate=AblationSpec(open_loop=True)
    )
    yield Ablated(name="states of training", shortcut="it is overfitted to the evaluation's states", split="train")
    if spec.imitation is not None:
        yield Ablated(name="probe without language", shortcut="the benchmark does not need language", probe=True)


def refute(
    spec: Spec,
    checkpoint: Path | None,
    info: EnvInfo,
    main: Mapping[str, Any],
    evaluate: Evaluate,
    say: Callable[[str], object],
) -> dict[str, Any]:
    """Evaluate each variant, and return the card as plain data.

    Args:
        main: result of the evaluation.
    """
    variants = [] if has_own_policy(spec) else list(list_variants(spec, info))
    each = -(-max(rate["n"] for rate in main["tasks"].values()) // (SHARE * spec.eval.repeats))
    episodes = len(variants) * each * len(main["tasks"])
    say(f"--refute: {len(variants)} variants of {each * len(main['tasks'])} episodes, {episodes} in all")
    entries = []
    for variant in variants:
        section = evolve(spec.eval, episodes_per_task=each, repeats=1, ablate=variant.ablate, split=variant.split)
        changed = evolve(spec, eval=section)
        if variant.probe:
            with TemporaryDirectory() as folder:
                result = evaluate(*clone_probe(changed, Path(folder)))
        else:
            result = evaluate(changed, checkpoint)
        entry = make_entry(variant, main, result)
        say(describe_entry(entry))
        entries.append(entry)
    shortcuts = [entry["finding"] for entry in entries if entry["finding"]]
    return {"episodes": episodes, "entries": entries, "shortcuts": list(dict.fromkeys(shortcuts))}


def clone_probe(spec: Spec, folder: Path) -> tuple[Spec, Path]:
    """Clone the spec's demonstrations with a small network that gets no instruction. Return its spec and checkpoint."""
    from vla_rl.runtime.start import clone

    assert spec.imitation is not None
    steps = min(spec.imitation.steps or PROBE_STEPS, PROBE_STEPS)
    probe = evolve(
        spec,
        model=make_component("model", "film_resnet"),
        conventions=ConventionsSpec(instruction="none"),
        imitation=evolve(spec.imitation, steps=steps, lr=1e-3, batch=64, statistics="model", eval_every=0),
        eval=evolve(spec.eval, before=False, episodes_per_task=1),
        hooks=(),
    )
    clone(probe, folder)
    return evolve(probe, eval=spec.eval), (folder / "checkpoints" / "last").resolve()


def make_entry(variant: Ablated, main: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry of the card: both rates, on the same states where they are, and what follows."""
    rate, own = result["success"], main["success"]
    entry: dict[str, Any] = {"name": variant.name, "success": rate, "main": own, "p": None}
    if variant.split == "train":
        kept = own["low"] > rate["high"] and rate["high"] < KEPT * own["rate"]
    else:
        outcomes = [
            {("", one["task"], one["state"], one["episode"]): one["success_once"] for one in evaluation["episodes"]}
            for evaluation in (main, result)
        ]
        pair = compare_episodes(*outcomes)["all"]
        entry |= {"p": pair.p, "main": {"rate": pair.first / pair.n, "n": pair.n}}
        least = 0.9 if variant.probe else KEPT
        kept = pair.first > 0 and rate["low"] >= least * pair.first / pair.n
    clear = entry["p"] is not None and entry["p"] < CLEAR and rate["rate"] < entry["main"]["rate"]
    return {**entry, "finding": variant.shortcut if kept else "", "clearly_worse": clear}


def describe_entry(entry: Mapping[str, Any]) -> str:
    """Return an entry in one line."""
    rate = entry["success"]
    verdict = entry["finding"] or ("depends on it" if entry["clearly_worse"] else "")
    p = "" if entry["p"] is None else f", p = {entry['p']:.2g}"
    return (
        f"{entry['name']:<28} {rate['rate']:6.1%}  [{rate['low']:.1%}, {rate['high']:.1%}] n={rate['n']}; with it "
        f"{entry['main']['rate']:.1%}{p}" + (f": {verdict}" if verdict else "")
    )


def keep_card(run_folder: Path, checkpoint: Path | None, card: Mapping[str, Any]) -> None:
    """Put the card of a run's last checkpoint into its results.json, for the report and the model card."""
    file = run_folder / "results.json"
    if checkpoint is not None and file.is_file():
        results = json.loads(file.read_text("utf-8"))
        if results.get("steps") == int(checkpoint.resolve().name.rpartition("_")[2]):
            write_whole(file, json.dumps({**results, "refute": card}, indent=1) + "\n")


def describe_simulator(checkpoint: Path | None, spec: Spec) -> EnvInfo:
    """Return the description of the simulator, from the checkpoint where there is one."""
    from vla_rl.cli.identify.identify import describe_simulator as build_description

    return build_description(spec) if checkpoint is None else read_env_info(checkpoint)

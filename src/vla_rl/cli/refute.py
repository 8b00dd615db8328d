"""`vla-rl eval --refute`: a card of what would explain a success rate away, on a part of the same states."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from attrs import evolve, frozen

from vla_rl.cli.benchmark.paired import pair_results
from vla_rl.core.paths import write_whole
from vla_rl.core.spec.sections import AblationSpec, ConventionsSpec
from vla_rl.core.spec.spec import Spec, has_own_policy, make_component
from vla_rl.core.types import EnvInfo

SHARE = 4
"""Every so many states of the evaluation are evaluated again in each variant."""
KEPT = 0.75
"""Share of the success that a variant keeps at least, by its interval, if success does not depend on what it lacks."""
KEPT_BY_PROBE = 0.9
CLEAR = 0.05
"""Probability of McNemar's test below which a variant is clearly worse."""
PROBE_STEPS = 1000
"""Most optimiser steps of the probe."""
PROBE, TRAINING = "probe without language", "states of training"
Evaluate = Callable[[Spec, Path | None], dict[str, Any]]


@frozen
class Ablated:
    """An evaluation without something."""

    name: str
    shortcut: str
    """What is said of the policy where it succeeds all the same; empty: nothing is wrong with that."""
    ablate: AblationSpec | None = None


def list_variants(spec: Spec, info: EnvInfo) -> Iterator[Ablated]:
    """Yield the variants that this policy and simulator have."""
    texts = list(dict.fromkeys(task.instruction for task in info.tasks))
    unread = "it does not read the instruction"
    if len(texts) > 1:
        others = dict(zip(texts, [*texts[1:], texts[0]], strict=True))
        yield Ablated("instruction of another task", unread, AblationSpec(instructions=others))
        yield Ablated("no instruction", unread, AblationSpec(instructions={"*": ""}))
    seen = getattr(spec.model.config, "cameras", None) or tuple(info.cameras)
    for camera in seen if len(seen) > 1 else ():
        yield Ablated(f"camera {camera} black", f"it does not look at camera {camera}", AblationSpec(black=(camera,)))
    yield Ablated("all cameras black", "it does not look", AblationSpec(black=tuple(info.cameras)))
    if info.state_dim:
        yield Ablated("state zeroed", "", AblationSpec(zero_state=True))
    yield Ablated("first chunk repeated", "it does not close the loop", AblationSpec(open_loop=True))
    yield Ablated(TRAINING, "it is overfitted to the evaluation's states")
    if spec.imitation is not None:
        yield Ablated(PROBE, "the benchmark does not need language")


def refute(
    spec: Spec,
    checkpoint: Path | None,
    info: EnvInfo,
    main: Mapping[str, Any],
    evaluate: Evaluate,
    say: Callable[[str], object],
) -> dict[str, Any]:
    """Evaluate each variant, and return the card as plain data. `main`: result of the evaluation."""
    variants = [] if has_own_policy(spec) else list(list_variants(spec, info))
    each = -(-max(rate["n"] for rate in main["tasks"].values()) // (SHARE * spec.eval.repeats))
    episodes = len(variants) * each * len(main["tasks"])
    say(f"--refute: {len(variants)} variants of {each * len(main['tasks'])} episodes, {episodes} in all")
    section = evolve(spec.eval, episodes_per_task=each, repeats=1)
    entries = []
    for variant in variants:
        split = "train" if variant.name == TRAINING else section.split
        changed = evolve(spec, eval=evolve(section, ablate=variant.ablate, split=split))
        if variant.name == PROBE:
            with TemporaryDirectory() as folder:
                result = evaluate(*clone_probe(changed, Path(folder)))
        else:
            result = evaluate(changed, checkpoint)
        entries.append(make_entry(variant, main, result))
        say(describe_entry(entries[-1]))
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
    rate, own, p = result["success"], main["success"], None
    if variant.name == TRAINING:
        kept = own["low"] > rate["high"] and rate["high"] < KEPT * own["rate"]
    else:
        pair = pair_results(main, result)
        p, own = pair.p, {"rate": pair.first / pair.n, "n": pair.n}
        least = KEPT_BY_PROBE if variant.name == PROBE else KEPT
        kept = pair.first > 0 and rate["low"] >= least * own["rate"]
    clear = p is not None and p < CLEAR and rate["rate"] < own["rate"]
    entry = {"name": variant.name, "success": rate, "main": own, "p": p}
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

"""`vla-rl identify`: weights and demonstrations in, the conventions of the policy's training out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attrs import evolve

from vla_rl.cli.benchmark.paired import pair_results
from vla_rl.cli.identify.frames import collect_expert_frames, read_frames
from vla_rl.cli.identify.keys import (
    ConventionKey,
    Settings,
    as_key,
    list_conventions,
    nest_keys,
    read_settings,
    with_settings,
)
from vla_rl.cli.identify.scoring import SCREENED, Scorer
from vla_rl.cli.identify.search import CLOSE, Rival, Search, compute_confidence, find_smallest, list_changes
from vla_rl.core.catalogue import load
from vla_rl.core.errors import UserError
from vla_rl.core.spec.spec import Spec, checkpoint_record, has_own_policy, restored_spec
from vla_rl.core.spec.structure import keys_of
from vla_rl.core.spec.yaml import dump_yaml
from vla_rl.runtime.placement.components import describe_simulator
from vla_rl.runtime.placement.hardware import check_device

LEAST_FRAMES = 2 * SCREENED


def open_scorer(
    spec: Spec,
    checkpoint: Path | None,
    data: Path | None,
    env: bool,
    frames: int,
    passes: int,
    device: str | None,
) -> Scorer:
    """Read demonstrations of a policy. Raise UserError where there are none, or of another robot."""
    if has_own_policy(spec):
        raise UserError(f"engine {spec.rollout.engine.type!r} has its own policy, whose keys are not in the spec")
    if env and data is not None:
        raise UserError("--env lets the expert demonstrate, and --data reads demonstrations; give one of them")
    spec = with_weights(spec, checkpoint)
    own = spec.imitation
    if data is None and not env and own is not None and own.data is not None and hasattr(own.data.config, "folder"):
        data = Path(own.data.config.folder)
    if data is None and not (env or (own is not None and own.expert is not None)):
        raise UserError(
            "there is nothing to compare the policy with; give --data FOLDER, or --env for the scripted expert"
        )
    info = describe_simulator(spec)
    read = collect_expert_frames(spec, frames) if data is None else read_frames(spec, info, data, frames)
    if len(read) < LEAST_FRAMES:
        raise UserError(
            f"the demonstrations have {len(read)} frames, too few to tell anything; give {LEAST_FRAMES} or more"
        )
    keys = list_conventions(load("model", spec.model.type, spec.plugins).config)
    return Scorer(spec=spec, info=info, keys=keys, frames=read, device=check_device(device), most=passes)


def with_weights(spec: Spec, checkpoint: Path | None) -> Spec:
    """Return the spec with a run's checkpoint as the model's folder, which has its statistics."""
    if checkpoint is None:
        return spec
    plain = spec.to_dict()
    settings: dict[str, Any] = {"checkpoint": str((checkpoint / "model").resolve())}
    if "preset" in plain["model"]:
        settings["preset"] = None
    if settings.keys() - keys_of(type(spec.model.config)).keys():
        raise UserError(
            f"model {spec.model.type!r} has no key `checkpoint`, so its weights cannot be read with other keys"
        )
    return restored_spec({**plain, "model": {**plain["model"], **settings}})


def identify_conventions(scorer: Scorer, say: Callable[[str], object]) -> tuple[dict[str, Any], list[Settings]]:
    """Return what was found, as plain data, and the settings of the best hypothesis and of the next one."""
    if not scorer.moving.any():
        raise UserError("no number of the demonstrated actions moves; give demonstrations of the task")
    given = read_settings(scorer.spec, scorer.keys)
    changes = list(scorer.vary(given, of_actions=False))
    models = {as_key(nest_keys(one).get("model", {})) for one in [given, *changes]}
    say(
        f"{len(scorer.frames)} frames, {len(scorer.keys)} conventions: {len(changes)} other inputs on {SCREENED} "
        f"frames a sweep, at most {scorer.most:,} forward passes of a frame; the model is built {len(models)} times a "
        f"sweep"
    )
    search = Search(scorer, given)
    best = search.find_answer()
    if best is None:
        reasons = "\n  ".join(dict.fromkeys(scorer.refused.values()))
        raise UserError(f"no policy can be built with any of the values that were tried:\n  {reasons}")
    rivals = search.find_rivals(best)
    ratio, knows = search.compare_to_random(best)
    result: dict[str, Any] = {
        "frames": len(scorer.frames),
        "passes": scorer.passes,
        "builds": scorer.builds,
        "error": best.mean(),
        "error_to_random": ratio,
        "better_than_random": knows,
        "confidence": compute_confidence(rivals) if knows else 0.0,
        "keys": {key.path: _describe_key(key, given, best.settings, rivals) for key in scorer.keys} if knows else {},
        "changed": list_changes(best.settings, given) if knows else {},
        "open": find_smallest(rivals) if knows else [],
        "still": [int(number) for number, moves in enumerate(scorer.moving) if not moves],
        "one_task": len(set(scorer.frames.obs.instructions)) == 1,
        "refused": sorted(set(scorer.refused.values())),
        "table": _compare_to_table(with_settings(scorer.spec, best.settings), best.settings) if knows else [],
    }
    second = next((rival.settings for rival in rivals if not rival.same), None)
    return result, [best.settings, *([second] if second is not None else [])]


def confirm_in_simulator(
    spec: Spec, settings: list[Settings], episodes: int, evaluate: Callable[[Spec], dict[str, Any]]
) -> dict[str, Any]:
    """Return the success of the best two hypotheses on the same evaluation states, and which is better."""
    tasks = len(describe_simulator(spec).tasks)
    spec = evolve(spec, eval=evolve(spec.eval, episodes_per_task=-(-episodes // tasks), repeats=1))
    first, second = (evaluate(with_settings(spec, one)) for one in settings)
    pair = pair_results(first, second)
    return {
        "first": first["success"],
        "second": second["success"],
        "second_differs": list_changes(settings[1], settings[0]),
        "p": pair.p,
        "second_is_better": pair.second > pair.first and pair.p < CLOSE,
    }


def print_findings(result: Mapping[str, Any], given: Any) -> int:
    """Print what was found, or JSON. Return 1 where nothing could be said."""
    print(json.dumps(result, indent=1) if given.json else describe_findings(result))
    return int(not result["better_than_random"])


def describe_findings(result: Mapping[str, Any]) -> str:
    """Return what was found in words, with the keys to write as YAML."""
    cost = f"{result['passes']:,} forward passes of a frame, {result['builds']} models built"
    if not result["better_than_random"]:
        return (
            "nothing can be said: under every hypothesis the policy's actions are about as far from the demonstrations "
            f"as those that it chose on other frames ({result['error_to_random']:.0%} of it). It never learnt this "
            f"task or this robot, or was trained with a convention that no key names ({cost})"
        )
    lines = [f"{'convention':28}{'spec':22}{'found':22}"]
    for path, about in result["keys"].items():
        lines.append(f"{path:28}{json.dumps(about['given']):22}{json.dumps(about['found']):22}{about['status']}")
    sure = f" (confidence {result['confidence']:.0%}"
    sure += f", together with the {len(result['open'])} below)" if result["open"] else ")"
    if result["changed"]:
        lines += ["", f"write{sure}:", dump_yaml(nest_keys(result["changed"])).rstrip()]
    else:
        lines += ["", f"the spec's own values are confirmed{sure}"]
    if untried := [path for path, about in result["keys"].items() if about["status"].startswith("not tried")]:
        lines.append(f"not tried within {result['passes']:,} passes: {', '.join(untried)}")
    if result["open"]:
        lines += ["not told apart from it, and what would tell:"]
    for change in result["open"]:
        evidence = dict.fromkeys(result["keys"][path]["evidence"] for path in change)
        lines.append(f"  {_describe_change(change)}: {'; '.join(evidence)}")
    lines.append(f"error {result['error']:.2f} deviations, {result['error_to_random']:.0%} of chance; {cost}")
    if result["still"]:
        lines.append(f"numbers {result['still']} of the demonstrated actions do not move, and were not judged")
    if result["one_task"]:
        lines.append("one instruction alone: whether the policy reads it, and in which form, shows only with several")
    lines += [f"the table of known checkpoints differs: {text}" for text in result["table"]]
    lines += [f"could not be tried: {reason}" for reason in result["refused"]]
    if (episodes := result.get("episodes")) is not None:
        first, second = (episodes[name] for name in ("first", "second"))
        lines.append(
            f"in the simulator, on the same {first['n']} states: {first['rate']:.1%}; with "
            f"{_describe_change(episodes['second_differs'])} {second['rate']:.1%} (p = {episodes['p']:.3g})"
        )
    return "\n".join(lines)


def _describe_key(key: ConventionKey, given: Settings, answer: Settings, rivals: list[Rival]) -> dict[str, Any]:
    """Return what was found about one key."""
    alone = [one for one in rivals if one.changes.keys() == {key.path}]
    others = [change for change in find_smallest(rivals) if key.path in change]
    if not alone:
        status = "not tried: give more --passes"
    elif all(one.same for one in alone):
        status = "no effect on this policy"
    elif others:
        status = "not told apart"
    else:
        status = "confirmed" if answer[key.path] == given[key.path] else "changed"
    return {
        "given": given[key.path],
        "found": answer[key.path],
        "status": status,
        "others": others,
        "evidence": key.convention.evidence,
        "share": max((one.share for one in rivals if key.path in one.changes and not one.same), default=0.0),
    }


def _describe_change(change: Mapping[str, Any]) -> str:
    return " and ".join(f"{path}={json.dumps(value)}" for path, value in change.items())


def _compare_to_table(spec: Spec, settings: Settings) -> list[str]:
    """Return where the table of known checkpoints says something else than the spec as it was found."""
    record = checkpoint_record(spec) or {"keys": {}}
    return [
        f"{path} is {json.dumps(key['value'])}, and {json.dumps(key['known'])} in {record['table']} (says "
        f"{key['source']})"
        for path, key in record["keys"].items()
        if "known" in key and path in settings
    ]

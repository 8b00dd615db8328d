"""`vla-rl identify`: weights and demonstrations in, the conventions of the policy's training out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from vla_rl.cli.benchmark.paired import compare_episodes
from vla_rl.cli.identify.frames import Frames, collect_expert_frames, read_frames
from vla_rl.cli.identify.keys import ConventionKey, Settings, as_key, list_conventions, read_settings, with_settings
from vla_rl.cli.identify.scoring import SCREENED, Scorer
from vla_rl.cli.identify.search import CLOSE, Hypothesis, Rival, Search, find_smallest, list_changes
from vla_rl.core.catalogue import build, hook_modules, load
from vla_rl.core.contexts import EnvContext
from vla_rl.core.errors import UserError
from vla_rl.core.hookspecs import PolicyEngine, SimEnv
from vla_rl.core.spec.spec import Spec, has_own_policy, known_checkpoint, restored_spec
from vla_rl.core.spec.structure import keys_of
from vla_rl.core.spec.yaml import dump_yaml
from vla_rl.core.types import EnvInfo
from vla_rl.runtime.placement.components import build_algorithm
from vla_rl.runtime.placement.hardware import check_device
from vla_rl.runtime.workers.models import build_engine, build_model

LEAST_FRAMES = 2 * SCREENED


@frozen(kw_only=True)
class Task:
    """A policy and what it is asked."""

    spec: Spec
    info: EnvInfo
    keys: list[ConventionKey]
    frames: Frames
    device: str
    most_passes: int


def prepare_task(
    spec: Spec,
    checkpoint: Path | None,
    data: Path | None,
    kind: str | None,
    env: bool,
    frames: int,
    passes: int,
    device: str | None,
) -> Task:
    """Read demonstrations of a policy. Raise UserError where there are none, or of another robot."""
    if has_own_policy(spec):
        raise UserError(f"engine {spec.rollout.engine.type!r} has its own policy, whose keys are not in the spec")
    spec = with_weights(spec, checkpoint)
    keys = list_conventions(load("model", spec.model.type, spec.plugins).config)
    info = describe_simulator(spec)
    own = spec.imitation
    if data is None and not env and own is not None and own.data is not None and hasattr(own.data.config, "folder"):
        data, kind = Path(own.data.config.folder), own.data.type
    if data is None and not (env or (own is not None and own.expert is not None)):
        raise UserError(
            "there is nothing to compare the policy with; give --data FOLDER, or --env for the scripted expert"
        )
    read = collect_expert_frames(spec, frames) if data is None else read_frames(spec, info, data, kind, frames)
    if len(read) < LEAST_FRAMES:
        raise UserError(
            f"the demonstrations have {len(read)} frames, too few to tell anything; give {LEAST_FRAMES} or more"
        )
    return Task(spec=spec, info=info, keys=keys, frames=read, device=check_device(device), most_passes=passes)


def with_weights(spec: Spec, checkpoint: Path | None) -> Spec:
    """Return the spec with a run's checkpoint as the model's folder, which has its statistics."""
    if checkpoint is None:
        return spec
    plain = spec.to_dict()
    settings = {"checkpoint": str((checkpoint / "model").resolve())} | (
        {"preset": None} if "preset" in plain["model"] else {}
    )
    if settings.keys() - keys_of(type(spec.model.config)).keys():
        raise UserError(
            f"model {spec.model.type!r} has no key `checkpoint`, so its weights cannot be read with other keys"
        )
    return restored_spec({**plain, "model": {**plain["model"], **settings}})


def describe_simulator(spec: Spec) -> EnvInfo:
    """Return the description of the spec's simulator, which is built only where its plugin cannot say."""
    describe = load("env", spec.env.type, spec.plugins).env_info
    if describe is not None:
        return describe(spec.env.config)
    context = EnvContext(seed=spec.seed, chunk=spec.rollout.chunk, num_envs=1)
    env: SimEnv = build("env", spec.env.type, spec.env.config, context, spec.plugins)
    try:
        return env.info
    finally:
        env.close()


def identify_conventions(task: Task, say: Callable[[str], object]) -> tuple[dict[str, Any], list[Settings]]:
    """Return what was found, as plain data, and the settings of the best hypothesis and of the next one."""
    scorer = Scorer(
        spec=task.spec,
        info=task.info,
        keys=task.keys,
        frames=task.frames,
        make_engine=lambda spec: open_engine(spec, task.info, task.device),
        most=task.most_passes,
    )
    if not scorer.moving.any():
        raise UserError("no number of the demonstrated actions moves; give demonstrations of the task")
    given = read_settings(task.spec, task.keys)
    changes = list(scorer.vary(given, of_actions=False))
    models = len({as_key({k: v for k, v in one.items() if k.startswith("model.")}) for one in [given, *changes]})
    say(
        f"{len(task.frames)} frames, {len(task.keys)} conventions: {len(changes)} other inputs on {SCREENED} frames a "
        f"sweep, at most {task.most_passes:,} forward passes of a frame; the model is built {models} times a sweep"
    )
    search = Search(scorer)
    best = search.find_best(given)
    if best is None:
        reasons = "\n  ".join(dict.fromkeys(scorer.refused.values()))
        raise UserError(f"no policy can be built with any of the values that were tried:\n  {reasons}")
    best = search.simplify(best, given)
    rivals = search.find_rivals(best)
    simplest = search.simplify(min([best, *search.list_measured()], key=lambda one: one.mean), given)
    if simplest.settings != best.settings:
        best, rivals = simplest, search.find_rivals(simplest)
    open_changes = find_smallest(rivals, best)
    ratio, knows = search.compare_to_random(best)
    result: dict[str, Any] = {
        "frames": len(task.frames),
        "passes": scorer.passes,
        "builds": scorer.builds,
        "error": best.mean,
        "error_to_random": ratio,
        "better_than_random": knows,
        "confidence": search.compute_confidence(best, rivals) if knows else 0.0,
        "keys": {key.path: _describe_key(key, given, best, rivals, open_changes) for key in task.keys} if knows else {},
        "changed": list_changes(best.settings, given) if knows else {},
        "open": open_changes if knows else [],
        "still": [int(number) for number, moves in enumerate(scorer.moving) if not moves],
        "one_task": len(set(task.frames.obs.instructions)) == 1,
        "refused": sorted(set(scorer.refused.values())),
    }
    result["table"] = _compare_to_table(task.spec, best.settings) if knows else []
    second = next((rival.hypothesis.settings for rival in rivals if not rival.same), None)
    return result, [best.settings, *([second] if second is not None else [])]


def confirm_in_simulator(
    spec: Spec, settings: list[Settings], episodes: int, evaluate: Callable[[Spec], dict[str, Any]]
) -> dict[str, Any]:
    """Return the success of the best two hypotheses on the same evaluation states, and which is better."""
    tasks = len(describe_simulator(spec).tasks)
    spec = evolve(spec, eval=evolve(spec.eval, episodes_per_task=-(-episodes // tasks), repeats=1))
    results = [evaluate(with_settings(spec, one)) for one in settings]
    outcomes = [
        {("", one["task"], one["state"], one["episode"]): one["success_once"] for one in result["episodes"]}
        for result in results
    ]
    pair = compare_episodes(*outcomes)["all"]
    return {
        "first": results[0]["success"],
        "second": results[1]["success"],
        "second_differs": {path: value for path, value in settings[1].items() if value != settings[0][path]},
        "p": pair.p,
        "second_is_better": pair.second > pair.first and pair.p < CLOSE,
    }


def open_engine(spec: Spec, info: EnvInfo, device: str) -> PolicyEngine:
    """Return the policy of a spec with the weights of its `model.checkpoint`."""
    algorithm = build_algorithm(spec, device)
    wrappers = hook_modules(spec.plugins)
    return build_engine(
        spec, info, device, lambda: build_model(spec, info, device, None, algorithm, wrappers, "act"), wrappers, "act"
    )


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
        value = json.dumps(about["found"])
        note = about["status"]
        if about["others"]:
            note += f" {' or '.join(map(_describe_change, about['others'][:3]))}: {about['evidence']} would tell"
        lines.append(f"{path:28}{json.dumps(about['given']):22}{value:22}{note}")
    sure = f" (confidence {result['confidence']:.0%}"
    sure += f", together with {len(result['open'])} others that are not told apart)" if result["open"] else ")"
    lines.append("")
    if result["changed"]:
        nested: dict[str, dict[str, Any]] = {}
        for path, value in result["changed"].items():
            section, _, name = path.partition(".")
            nested.setdefault(section, {})[name] = value
        lines += [f"write{sure}:", dump_yaml(nested).rstrip()]
    else:
        lines.append(f"the spec's own values are confirmed{sure}")
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


def _describe_key(
    key: ConventionKey, given: Settings, best: Hypothesis, rivals: list[Rival], open_changes: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return what was found about one key."""
    value = best.settings[key.path]
    about = [one for one in rivals if one.hypothesis.settings[key.path] != value]
    alone = [one for one in about if list_changes(one.hypothesis.settings, best.settings).keys() == {key.path}]
    others = [change for change in open_changes if key.path in change]
    if not alone:
        status = "not tried: give more --passes"
    elif all(one.same for one in alone):
        status = "no effect on this policy"
    elif others:
        status = "not told apart from"
    else:
        status = "confirmed" if value == given[key.path] else "changed"
    return {
        "given": given[key.path],
        "found": value,
        "status": status,
        "others": others,
        "evidence": key.convention.evidence or "episodes (--episodes)",
        "share": max((one.share for one in about if not one.same), default=0.0),
    }


def _describe_change(change: Mapping[str, Any]) -> str:
    return " and ".join(f"{path}={json.dumps(value)}" for path, value in change.items())


def _compare_to_table(spec: Spec, settings: Settings) -> list[str]:
    """Return where the table of known checkpoints says something else."""
    row = known_checkpoint(spec)
    known = {} if row is None else row.keys_with(spec.env.type)
    return [
        f"{path} is {json.dumps(settings[path])}, and {json.dumps(value.value)} in {value.location} "
        f"(says {value.source})"
        for path, value in known.items()
        if path in settings and settings[path] != value.value and settings[path] not in value.also
    ]

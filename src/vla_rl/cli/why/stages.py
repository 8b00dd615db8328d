"""Stages 2 and 3: a training step, played again with one thing changed at a time, and with further data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.resources import files
from itertools import chain
from pathlib import Path

import torch
from attrs import frozen

from vla_rl.cli.benchmark.paired import compare_episodes
from vla_rl.cli.why.causes import Cause, Diagnosis, name_cause
from vla_rl.cli.why.checks import find_different_acting, find_signs, find_wrappers, find_wrong_terms
from vla_rl.cli.why.repeat import RepeatedStep, Update, cosine, plain_loss, repeat_spec, repeat_step, true_advantages
from vla_rl.cli.why.symptoms import RunFiles
from vla_rl.core.catalogue import hook_modules
from vla_rl.core.errors import SpecError, UserError
from vla_rl.core.spec.spec import Spec, has_own_policy, parse_spec, trains_on_transitions
from vla_rl.core.spec.yaml import parse_yaml
from vla_rl.core.types import Advantages, Batch, Loss, Rollout, Scores
from vla_rl.runtime.placement.components import build_algorithm
from vla_rl.runtime.run_folder.folder import saved_checkpoints

OWN = "as the run does"
RIGHT = 0.1
"""Cosine from which a run's update is right: it is 0.9 for scores of groups, and down to 0.25 for a young critic."""
GAIN = 0.15  # of the cosine, by a change that makes it a cause
DIFFERENT = 0.02  # of two gradients, as a share of one's norm: more than rounding explains
BATCHES = 4  # rollouts that measure the noise of a step's direction
START_S = 15.0  # that the start of a repeated step takes at least, for the forecast
METRICS = ("env/success_rate", "env/return", "env/episode_length", "rollout/env_steps")


@frozen(kw_only=True)
class Counterfactual:
    """The update of a step with one thing changed. A module of `plugins:` adds a sequence `vla_rl_counterfactuals`."""

    name: str
    cause: str = ""
    """Cause that is named where the change turns the update toward the reference; empty: none, as it is a choice."""
    key: str = ""
    """Key of the spec to change, or what else to look at; empty: the keys of `overrides`."""
    overrides: Sequence[str] = ()
    """Changes to the spec, `PATH=VALUE` each; a row with a key that the spec's plugin has not is left out."""
    advantages: Callable[[Advantages, Rollout], Advantages] | None = None
    """Advantages in place of the algorithm's own."""
    loss: Callable[[Scores, Batch, Loss], object] | None = None
    """Total (tensor) in place of the algorithm's own."""
    restarts: bool = False
    """The change is one of model, trainer or rollout, so the step is collected again."""
    invariant: bool = False
    """A change that must not change the gradient."""


REFERENCE = Counterfactual(name="the reference", advantages=true_advantages, loss=plain_loss)
"""The plain policy gradient of true returns."""
TRUE_ADVANTAGES = Counterfactual(
    name="advantages from true returns",
    cause="the advantages are wrong",
    key="rewards, and what the algorithm makes of them",
    advantages=true_advantages,
)


def list_rows(spec: Spec) -> list[Counterfactual]:
    """Return the rows of counterfactuals.yaml, and those of the modules that the run's `plugins:` names."""
    table = parse_yaml(files(__package__).joinpath("counterfactuals.yaml").read_text("utf-8")).data
    added = [getattr(module, "vla_rl_counterfactuals", ()) for _, module in hook_modules(spec.plugins)]
    return [TRUE_ADVANTAGES, *(Counterfactual(**row) for row in table), *chain(*added)]


def find_checkpoint(diagnosis: Diagnosis, record: RunFiles, step: int | None) -> tuple[int, Path | None]:
    """Return the step to repeat, and the checkpoint before it: of the newest step that the run has made, or of the one
    that was asked for. Raises UserError where none can be repeated."""
    spec = record.spec
    if spec.env.type == "lerobot_robot" or has_own_policy(spec):
        raise UserError("a robot is not moved for it, and a policy that is served elsewhere has no weights here")
    if trains_on_transitions(spec):
        raise UserError(f"trainer {spec.trainer.type!r} keeps transitions of earlier steps, so none is repeated alone")
    folders = saved_checkpoints(record.run.folder)
    newest = max([*folders, *(int(m["step"]) for m in record.run.steps)], default=1)
    last = newest if step is None else step
    if last > newest:
        raise UserError(f"--step {last}: the run has made {newest} steps")
    begin = max([number for number in folders if number < last], default=0)
    if begin not in folders and spec.bc_warmup is not None:
        raise UserError(f"there is no checkpoint before step {last}; lower train.checkpoint_every")
    if begin + 1 != last:
        diagnosis.not_looked_at.append(f"step {last}: the newest with a checkpoint right before it is {begin + 1}")
    return begin + 1, folders.get(begin)


def repeat_and_compare(
    diagnosis: Diagnosis, record: RunFiles, chosen: int | None, say: Callable[[str], object]
) -> None:
    """Repeat a step, and note what it shows. Raises UserError where that is not possible."""
    number, checkpoint = find_checkpoint(diagnosis, record, chosen)
    rollout_s, update_s = (record.middle(f"time/{part}", 0.0) for part in ("rollout", "update"))
    least, most = START_S + rollout_s + 3 * update_s, 3 * START_S + (BATCHES + 2) * rollout_s + 20 * update_s
    forecast = f"step {number} is repeated in this process: {least:.0f} to about {most:.0f} s"
    say(f"{forecast}; the budget is {diagnosis.budget_s:.0f} s")
    if least > diagnosis.budget_s:
        raise UserError(f"{forecast}, and the budget is {diagnosis.budget_s:.0f} s; give --budget {most:.0f}s")
    spec = repeat_spec(record.spec)
    with repeat_step(spec, checkpoint) as step:
        diagnosis.repeated = describe_repetition(record, step)
        diagnosis.causes += [*find_wrappers(), *find_signs(step)]
        if not len(step.columns):
            raise UserError(f"step {number} had nothing to train on")
        own = step.own_update()
        if own.difference > 1e-3 and checkpoint is not None:
            with repeat_step(spec, None) as begin:
                step.first_difference = begin.own_update().difference if len(begin.columns) else None
        diagnosis.causes += [*find_different_acting(step, own), *find_wrong_terms(step)]
        if diagnosis.is_certain:
            diagnosis.not_looked_at.append("counterfactuals: the step itself is certain")
            return
        reference = change_update(step, REFERENCE)
        if reference is None or not bool(reference.gradient.any()):
            raise UserError(f"in step {number} no episode turned out better than another of its kind")
        rows = list_rows(record.spec)
        seconds = step.seconds + own.seconds
        diagnosis.compared[OWN] = cosine(own.gradient, reference.gradient)
        for row in (row for row in rows if not row.restarts):
            if diagnosis.affords(2 * own.seconds, row.name) and (changed := change_update(step, row)):
                note_gradient_of(diagnosis, row, own.gradient, changed.gradient, reference.gradient)
        if not diagnosis.is_certain:
            evaluate_step(diagnosis, record, step, checkpoint)
            measure_noise(diagnosis, step, reference)
    for row in (row for row in rows if row.restarts and not diagnosis.is_certain):
        changed_spec = change_spec(spec, row)
        if changed_spec is not None and diagnosis.affords(START_S + seconds, row.name):
            with repeat_step(changed_spec, checkpoint) as other:
                gradient = other.own_update().gradient
            note_gradient_of(diagnosis, row, own.gradient, gradient, reference.gradient)
    value, more = diagnosis.compared[OWN], diagnosis.more_samples
    diagnosis.text = f"cannot tell: the cosine with the plain gradient is {value:.2f}, and no change explains it"
    if value >= RIGHT:
        diagnosis.answer = "slow"
        need = f"more than {BATCHES} times the samples" if more is None else f"{more} more samples"
        diagnosis.text = f"slow but right: a clear direction takes {need} a step"


def describe_repetition(record: RunFiles, step: RepeatedStep) -> str:
    """Return which step is repeated, and how exactly."""
    recorded = next((m for m in record.run.steps if int(m["step"]) == step.step), {})
    common = [name for name in METRICS if name in recorded and name in step.metrics]
    exact = all(abs(recorded[name] - step.metrics[name]) < 1e-9 for name in common)
    what = "not recorded" if not common else "the recorded ones" if exact else "not exactly the recorded ones"
    text = f"step {step.step}; its episodes are {what}"
    if record.spec.asynchrony.max_lag or record.spec.asynchrony.replay or record.spec.imagination:
        text += "; states, seeds and noise are repeated, but no older weights, replayed groups or imagined episodes"
    return text if step.runtime.info.deterministic else f"{text}; the simulator says that it is not deterministic"


def change_spec(spec: Spec, row: Counterfactual) -> Spec | None:
    """Return the spec with the changes of a row; None where it has no such key, or those values already."""
    try:
        changed = parse_spec(spec.to_dict(), overrides=row.overrides)
    except SpecError:
        return None
    return None if changed.to_dict() == spec.to_dict() else changed


def change_update(step: RepeatedStep, row: Counterfactual) -> Update | None:
    """Return the update with the change of a row; None where that changes nothing in this spec."""
    algorithm, loss = step.runtime.algorithm, row.loss
    if row.overrides:
        changed = change_spec(step.spec, row)
        if changed is None:
            return None
        algorithm = build_algorithm(changed)
        loss = lambda scores, batch, _: algorithm.loss(scores, batch).total  # noqa: E731
    prepared = step.prepare()
    advantages = algorithm.advantages(prepared)
    if row.advantages is not None:
        advantages = row.advantages(advantages, prepared)
    return step.update(prepared, advantages, loss)


def note_gradient_of(
    diagnosis: Diagnosis, row: Counterfactual, own: torch.Tensor, changed: torch.Tensor, reference: torch.Tensor
) -> None:
    """Note a row's gradient, and its cause: where it is nearer to the reference than the run's own, or where it differs
    from that although it must not."""
    value, before = cosine(changed, reference), diagnosis.compared[OWN]
    diagnosis.compared[row.name] = value
    gain = value - before
    evidence = f"{row.name}: the update's cosine with the plain gradient is {value:.2f}, else {before:.2f}"
    certainty = 0.5 + 0.45 * min(gain, 1.0)
    is_cause = gain > GAIN and (before < RIGHT or (gain > 2 * GAIN and row.advantages is None))
    if row.invariant:
        gain = float((changed - own).norm() / own.norm())
        evidence = f"{row.name}: this must not change the gradient, and changes it by {gain:.0%} of its norm"
        certainty, is_cause = 0.92, gain > DIFFERENT
    if row.cause and is_cause:
        key = row.key or ", ".join(change.partition("=")[0] for change in row.overrides)
        cause = Cause(name=row.cause, evidence=evidence, number=gain, key=key, certainty=certainty, stage=2)
        diagnosis.causes.append(cause)


def evaluate_step(diagnosis: Diagnosis, record: RunFiles, step: RepeatedStep, checkpoint: Path | None) -> None:
    """Compare evaluations before and after the step, on the same states."""
    after = saved_checkpoints(record.run.folder).get(step.step)
    what = "an evaluation before and after the step"
    if checkpoint is None or after is None:
        diagnosis.not_looked_at.append(f"{what}: one of the checkpoints is missing")
        return
    if not diagnosis.affords(2 * record.middle("time/eval", 60.0), what):
        return
    runtime = step.runtime
    before = runtime.workers.evaluate(step.step, 0)
    runtime.learners.load(after / "trainer")
    both = (before, runtime.workers.evaluate(step.step, 0))
    outcomes = [{("", e.task, e.number, e.episode): e.success_once for e in one.episodes} for one in both]
    pair = compare_episodes(*outcomes)["all"]
    runtime.learners.load(checkpoint / "trainer")
    if pair.first > pair.second and pair.p < 0.01:
        evidence = f"{pair.first} of {pair.n} evaluation states succeed before it, {pair.second} after (p {pair.p:.2g})"
        diagnosis.causes.append(name_cause("the step harms", pair.p, evidence))


def measure_noise(diagnosis: Diagnosis, step: RepeatedStep, reference: Update) -> None:
    """Note how many more samples a step a clear direction takes, by the spread of several rollouts' gradients."""
    gradients = [reference.gradient]
    while len(gradients) < BATCHES and diagnosis.affords(2 * (step.seconds + reference.seconds), "noise by more data"):
        step.collect()
        more = change_update(step, REFERENCE) if len(step.columns) else None
        gradients.append(reference.gradient * 0 if more is None else more.gradient)
    count, total = len(gradients), float(torch.stack(gradients).sum(0).square().sum())
    single = sum(float(gradient.square().sum()) for gradient in gradients) / count
    signal = (total - count * single) / max(count * (count - 1), 1)
    diagnosis.more_samples = int(reference.samples * (single - signal) / signal) if signal > 0 else None

"""The runtime as the loop sees it: roll out, update, evaluate, warm up, save. It starts the plan's workers and tells
them what to do; frames and weights of training never go through here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from vla_rl.core.errors import UserError
from vla_rl.core.events import Evaluation, Rate, wilson
from vla_rl.core.interrupts import Interrupts
from vla_rl.core.plan import Plan
from vla_rl.core.reset_states import TaskWindows, Weights
from vla_rl.core.spec.spec import Spec
from vla_rl.core.types import Advantages, Episode, Rollout, read_all
from vla_rl.runtime.algorithm import build_algorithm
from vla_rl.runtime.assignments import assign, plan_for, ranks_of
from vla_rl.runtime.backends.backend import Backend
from vla_rl.runtime.backends.local import LocalBackend
from vla_rl.runtime.backends.ray import RayBackend
from vla_rl.runtime.checks import check_needs
from vla_rl.runtime.hardware import describe
from vla_rl.runtime.learning.imitation import Imitation, of_data, of_expert
from vla_rl.runtime.learning.steps import Share, share_out
from vla_rl.runtime.learning.weights import send_weights
from vla_rl.runtime.measure import measure
from vla_rl.runtime.preflight import check_simulators
from vla_rl.runtime.restarts import Restarts
from vla_rl.runtime.roles.offload import Phases
from vla_rl.runtime.roles.sim import EvalItem, too_many_faults
from vla_rl.runtime.rollouts.assemble import Block, Samples, find_samples, light_arrays
from vla_rl.runtime.rollouts.rounds import roll_out
from vla_rl.runtime.trace import Trace, traced

Array = np.ndarray[Any, Any]
Progress = Callable[[str, int, int], None]
Statistics = Mapping[str, Mapping[str, Sequence[float]]] | None


class Runtime:
    def __init__(
        self,
        spec: Spec,
        *,
        imitation: bool = False,
        statistics: Statistics = None,
        plan: Plan | None = None,
        interrupts: Interrupts | None = None,
    ):
        """
        Args:
            imitation: for `vla-rl sft`: the learners open the data that the spec names.
            statistics: by which the model scales, of a run that took them from its data; None: the model's own.
            plan: of the workers; None: that of the spec's placement.
            interrupts: by whose order workers leave what they play.
        """
        self.spec, self.statistics = spec, statistics
        self.demonstrations = 0
        """Samples of the data that the learners opened."""
        self.windows: TaskWindows | None = None
        """Outcomes of each task, for `rollout.task_sampling: {type: weighted}`."""
        self.task_weights: Weights = None
        """Of the running rollout."""
        self.algorithm = build_algorithm(spec)
        check_needs(self.algorithm, spec)
        local = spec.runtime.backend == "local"
        check_simulators(spec)
        self.backend: Backend = LocalBackend() if local else RayBackend(spec.runtime.address, spec.runtime.deadline_s)
        self.backend.interrupts = interrupts or self.backend.interrupts
        try:
            self.plan = plan or plan_for(spec, self.backend.cluster(), measure)
            self.assignments = assign(self.plan, spec.env.num_envs, one_process=local)
            self.trace = Trace(self.assignments, self.call, self.backend.get_all)
            self.phases = Phases(self.plan.offload, self.assignments, self.call, self.backend.get_all)
            self._start(imitation)
        except BaseException:
            self.backend.close()
            raise
        self.version = 0
        self.progress: Progress = lambda phase, done, total: None
        self.rounds = 0
        """Of the rollout that is being played."""
        self.on_fault: Callable[[str], None] = lambda text: None
        self.faults = 0
        self.restarts = Restarts(self)

    # -------------------------------------------------------------------------------------------------- rollout

    @traced
    def rollout(self, step: int) -> tuple[Rollout, dict[str, float]]:
        """Play one rollout everywhere. -> (its light part, metrics)."""
        before = perf_counter()
        self.task_weights = self.windows.weights(step) if self.windows else None
        blocks, rollout, places, owner = self.restarts.surviving(lambda: roll_out(self, step))
        faults = self._report_faults([block.sim for block in blocks])
        self._shelf = (blocks, places, owner)
        metrics = self._rollout_metrics(rollout, blocks, perf_counter() - before) | {"faults/rows": float(faults)}
        if self.windows:
            self.windows.record(step, rollout.episodes)
            metrics |= {f"sampling/weight/{task}": weight for task, weight in (self.task_weights or {}).items()}
        return rollout, metrics

    @traced
    def update(self, kept: Rollout, keep: Array, advantages: Advantages) -> dict[str, float]:
        """Train on the columns `keep` (indices) of the last rollout, which `kept` is cut to. -> metrics."""
        before = perf_counter()
        spec, (blocks, places, owner) = self.spec, self._shelf
        samples = find_samples(kept, keep, places, owner)
        count = len(samples.steps)
        light = light_arrays(kept, advantages, samples)
        maker = np.array([self.server[block.lane.index] for block in blocks])[samples.blocks]
        ranks = ranks_of(maker, {place.index: place.rank for place in self.learners})
        source = np.where(maker == np.array([place.index for place in self.learners])[ranks], 0, maker + 1)
        order = (source * len(blocks) + samples.blocks) * (int(samples.places.max()) + 1) + samples.places
        shares = share_out(
            ranks,
            order,
            light,
            world=len(self.learners),
            seed=spec.seed,
            step=kept.step,
            epochs=spec.train.epochs,
            global_batch=spec.train.global_batch,
            micro_batch=spec.train.micro_batch,
        )
        wanted = [self._wanted(samples, share, blocks) for share in shares]
        own = [of_workers.pop(place.index, ()) for place, of_workers in zip(self.learners, wanted, strict=True)]
        # Workers answer in order, and an update waits for all ranks: every take stands in front of every update.
        taken = [
            [self.call(worker, "policy", "take_heavy", keys, True) for worker, keys in sorted(of_workers.items())]
            for of_workers in wanted
        ]
        pending = []
        for place, share, mine, parts in zip(self.learners, shares, own, taken, strict=True):
            of_rank = {name: None if array is None else array[share.samples] for name, array in light.items()}
            pending.append(self.call(place.index, "worker", "update", kept.step, mine, of_rank, share.steps, *parts))
        clearing = [self.call(s.index, "policy", "clear_shelf") for s in self.policies if "learner" not in s.slot.roles]
        results = self.backend.get_all(pending)
        self.backend.get_all(clearing)
        self.version += 1
        self.publish()
        metrics: dict[str, float] = {
            "update/samples": float(count),
            "update/optimizer_steps": float(len(shares[0].steps)),
        }
        for result in results:
            for name, value in result["sums"].items():
                metrics[name] = metrics.get(name, 0.0) + value
            for name, value in result["maxima"].items():
                metrics[name] = max(metrics.get(name, value), value)
        metrics |= read_all([result["statistics"] for result in results])
        metrics["time/learner"] = max(result["seconds"] for result in results)
        metrics["time/update"] = perf_counter() - before
        metrics |= self.phases.metrics()
        return metrics

    def _wanted(self, samples: Samples, share: Share, blocks: Sequence[Block]) -> dict[int, list[Any]]:
        """Worker -> what its `PolicyRole.take_heavy` is asked for, for the samples of one rank."""
        wanted: dict[int, list[Any]] = {}
        of_block = samples.blocks[share.samples]
        for b in dict.fromkeys(of_block.tolist()):
            lane = blocks[b].lane.index
            inside = samples.places[share.samples[of_block == b]]
            wanted.setdefault(self.server[lane], []).append(((lane, blocks[b].round_index), inside))
        return wanted

    def discard(self) -> None:
        """Free the heavy part of the last rollout, which nothing is trained on."""
        self.backend.get_all([self.call(place.index, "policy", "clear_shelf") for place in self.policies])

    # ----------------------------------------------------------------------------------- evaluation and warm-up

    @traced
    def evaluate(self, step: int, frames: int = 0) -> Evaluation:
        """Every evaluation state once per repeat. The result does not depend on how rows are placed: a row plays
        neighbours in the list, so that it seldom changes the task."""
        return self.restarts.surviving(lambda: self._evaluate(step, frames))

    def _evaluate(self, step: int, frames: int) -> Evaluation:
        before = perf_counter()
        spec, num_envs = self.spec, self.spec.env.num_envs
        items = self._eval_items(frames)
        episodes: list[Episode] = []
        recorded: list[Any] = []
        rounds = -(-len(items) // num_envs)
        for r in range(rounds):
            self.progress("eval", min(r * num_envs, len(items)), len(items))
            round_items = [items[i] if i < len(items) else None for i in range(r, num_envs * rounds, rounds)]
            of_lane = {s.index: round_items[s.first_row : s.first_row + s.rows] for s in self.lanes}
            pending = []
            for place in self.policies:
                own = {lane.index: of_lane[lane.index] for lane in place.served}
                pending.append(self.call(place.index, "worker", "play_eval", own, spec.eval.greedy))
            results = [result for played in self.backend.get_all(pending) for result in played]
            self._report_faults(results)
            for result in results:
                episodes.extend(result["episodes"])
                recorded.extend(result["frames"])
        episodes.sort(key=lambda e: (e.episode, e.row))
        repeats = range(spec.eval.repeats)
        tasks = list(dict.fromkeys(e.task for e in episodes))
        return Evaluation(
            step=step,
            success=_rate(episodes),
            tasks={task: _rate([e for e in episodes if e.task == task]) for task in tasks},
            repeats=tuple(_rate([e for e in episodes if e.episode == r]).rate for r in repeats),
            episodes=tuple(episodes),
            seconds=perf_counter() - before,
            frames=tuple(recorded),
        )

    @traced
    def warm_up(self) -> dict[str, float]:
        """Clone the simulator's scripted expert (`warmup:` in the spec), for all learners. -> metrics."""
        before = perf_counter()
        warm = self.spec.warmup
        assert warm is not None
        imitation = of_expert(self, warm, "warm-up", warm.batch)
        epoch, loss = imitation.epoch, 0.0
        for e in range(warm.epochs):

            def progress(step: int, e: int = e) -> None:
                self.progress("warmup", e, warm.epochs)

            loss = imitation.train(e * epoch + 1, (e + 1) * epoch, lambda step: warm.lr, progress)
        self.forget_imitation()
        return {
            "warmup/samples": imitation.about["imitation/samples"],
            "warmup/expert_success": imitation.about["imitation/expert_success"],
            "warmup/loss": loss,
            "time/warmup": perf_counter() - before,
        }

    def forget_imitation(self) -> None:
        """Free the demonstrations, and let reinforcement learning begin with an optimiser of its own."""
        self.learn("forget_imitation")
        self.publish()

    # ------------------------------------------------------------------------------------------ state and weights

    def imitation(self) -> Imitation:
        """The demonstrations of the spec's `imitation:`, ready to train on."""
        section = self.spec.imitation
        assert section is not None
        if section.expert is not None:
            return of_expert(self, section.expert, "imitation", section.batch)
        return of_data(self, "imitation", section.batch)

    @traced
    def save(self, model_folder: Path, trainer_folder: Path) -> None:
        """The model in its public format, and the exact state to go on from."""
        self.learn("save", model_folder, trainer_folder / "learner.pt")
        if self.windows:
            self.windows.save(trainer_folder / "tasks.json")
        if self.spec.rollout.lag:
            self.backend.get(self.call(self.policies[0].index, "policy", "save_past", trainer_folder / "past.pt"))

    def load(self, trainer_folder: Path) -> None:
        self.version = self.learn("load", trainer_folder / "learner.pt")[0]
        if self.windows:
            self.windows.load(trainer_folder / "tasks.json")
        if self.spec.rollout.lag:
            for place in self.policies:
                self.backend.get(self.call(place.index, "policy", "load_past", trainer_folder / "past.pt"))
        self.publish()

    def close(self) -> None:
        self.backend.close()

    def devices(self) -> str:
        """What each role works on, in words."""
        asked = [self.call(place.index, "worker", "device") for place in self.assignments]
        return describe(self.assignments, self.backend.get_all(asked))

    def how_far(self, phase: str, done: int, total: int) -> tuple[int, int]:
        """(done, total) of a phase that goes on: chunk steps of a rollout, episodes of an evaluation; of other phases
        what they have told."""
        if phase not in ("rollout", "eval"):
            return done, total
        played = self.backend.played([place.index for place in self.policies])
        if phase == "eval":
            return min(done + played.ended, total), total
        section = self.spec.rollout
        limit = section.steps or section.max_steps or max(task.max_steps for task in self.info.tasks)
        steps = -(-limit // section.chunk)
        return (played.rounds * steps + played.steps) // len(self.lanes), self.rounds * steps

    @traced
    def publish(self) -> None:
        """Policies beside a learner already hold the weights; the others get them by reference."""
        send_weights(self)

    # --------------------------------------------------------------------------------------------------- inside

    def _start(self, imitation: bool) -> None:
        self.policies = [s for s in self.assignments if s.served]
        self.learners = sorted((s for s in self.assignments if s.rank >= 0), key=lambda s: s.rank)
        self.home = {lane.index: s.index for s in self.assignments for lane in s.lanes}
        self.server = {lane.index: s.index for s in self.policies for lane in s.served}
        self.lanes = sorted((lane for s in self.assignments for lane in s.lanes), key=lambda lane: lane.index)
        self.backend.start(self.spec, self.assignments)
        starting = [self.call(s.index, "worker", "start_sim") for s in self.assignments if s.lanes]
        self.info = self.backend.get_all(starting)[0]
        if imitation:
            self._open_data()
        starting = [
            self.call(s.index, "worker", "start_model", self.info, self.statistics)
            for s in self.assignments
            if {"policy", "learner"} & set(s.slot.roles)
        ]
        self.backend.get_all(starting)
        self.introduce()
        if len(self.learners) > 1:
            address = self.backend.get(self.call(self.learners[0].index, "worker", "rendezvous"))
            joining = [self.call(s.index, "learner", "join", address, s.rank) for s in self.learners]
            self.backend.get_all(joining)
        self.eval_states = self.backend.get(self.call(self.home[0], "sim", "eval_states"))
        sampling = self.spec.rollout.task_sampling
        if sampling.type == "weighted":
            tasks = self.backend.get(self.call(self.home[0], "sim", "train_tasks"))
            self.windows = TaskWindows(tasks, sampling.window, sampling.smoothing)

    def _open_data(self) -> None:
        section = self.spec.imitation
        assert section is not None
        if section.data is None:
            return
        opening = [self.call(s.index, "worker", "open_data", self.info) for s in self.learners]
        self.demonstrations = min(self.backend.get_all(opening))
        if section.statistics == "data" and self.statistics is None:
            self.statistics = self.backend.get(self.call(self.learners[0].index, "worker", "data_statistics"))

    def call(self, worker: int, role: str, method: str, *arguments: Any, returns: int = 1) -> Any:
        self.phases.before(role, method)
        return self.backend.call(worker, role, method, *arguments, returns=returns)

    def learn(self, method: str, *arguments: Any) -> list[Any]:
        """Call all learners, which may have to work together. -> their results, by rank."""
        return self.backend.get_all([self.call(s.index, "learner", method, *arguments) for s in self.learners])

    def introduce(self) -> None:
        """Let every policy's worker call the simulators that it acts for."""
        meeting = [self.backend.introduce(s.index, s.sim_workers) for s in self.policies if s.sim_workers]
        self.backend.get_all(meeting)

    def _eval_items(self, frames: int) -> list[EvalItem]:
        spec, states = self.spec, list(self.eval_states)
        if spec.eval.episodes_per_task is not None:
            seen: dict[str, int] = {}
            chosen = []
            for state in states:
                seen[state.task] = seen.get(state.task, 0) + 1
                if seen[state.task] <= spec.eval.episodes_per_task:
                    chosen.append(state)
            states = chosen
        if not states:
            raise UserError(f"env {spec.env.type!r} offers no reset states in its eval split")
        shown = set(np.linspace(0, len(states) - 1, min(frames, len(states))).astype(int).tolist()) if frames else set()
        return [
            EvalItem(state=state, index=i, repeat=repeat, record=repeat == 0 and i in shown)
            for repeat in range(spec.eval.repeats)
            for i, state in enumerate(states)
        ]

    def _report_faults(self, results: Sequence[dict[str, Any]]) -> int:
        """Tell of rows that broke in any worker. -> their number. Raises EnvError when there were too many."""
        texts = [text for result in results for text in result["faults"]]
        for text in texts:
            self.on_fault(text)
        self.faults += len(texts)
        if self.faults > self.spec.runtime.max_faults:
            raise too_many_faults(self.faults, self.spec.runtime.max_faults, self.spec.env.type, texts[-1])
        return len(texts)

    def _rollout_metrics(self, rollout: Rollout, blocks: Sequence[Block], seconds: float) -> dict[str, float]:
        episodes = rollout.episodes
        n = max(len(episodes), 1)
        busy: dict[str, dict[int, float]] = {"env": {}, "policy": {}}
        for block in blocks:
            sim, policy = self.home[block.lane.index], self.server[block.lane.index]
            busy["env"][sim] = busy["env"].get(sim, 0.0) + block.sim["seconds"]
            busy["policy"][policy] = busy["policy"].get(policy, 0.0) + block.policy["seconds"]
        steps = sum(block.sim["env_steps"] for block in blocks)
        return {
            "env/success_rate": sum(e.success_once for e in episodes) / n,
            "env/success_at_end": sum(e.success_at_end for e in episodes) / n,
            "env/return": sum(e.total_reward for e in episodes) / n,
            "env/episode_length": sum(e.steps for e in episodes) / n,
            "rollout/episodes": float(len(episodes)),
            "rollout/env_steps": float(steps),
            "time/rollout": seconds,
            "time/env": max(busy["env"].values()),
            "time/policy": max(busy["policy"].values()),
        }


def _rate(episodes: Sequence[Episode]) -> Rate:
    return wilson(sum(e.success_once for e in episodes), len(episodes))

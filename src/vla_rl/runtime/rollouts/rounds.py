"""A rollout is some rounds of all rows: which of them are played, with which weights, and what is made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import define, evolve

from vla_rl.core.hookspecs import Algorithm
from vla_rl.core.reset_states import TaskWeights
from vla_rl.core.selection import groups_in
from vla_rl.core.spec.spec import Spec
from vla_rl.runtime.fleet import Fleet
from vla_rl.runtime.roles.policy import FRESH, PolicyRole
from vla_rl.runtime.rollouts.assemble import Block, Played, assemble
from vla_rl.runtime.worker import Worker


@define(kw_only=True)
class Rounds:
    """The rounds of one rollout: on which workers, of which step, and with which tasks."""

    fleet: Fleet
    spec: Spec
    algorithm: Algorithm
    step: int
    weights: TaskWeights
    """Of the tasks that states are drawn from."""
    now: int = 0
    """How many are being played."""

    def roll_out(self, version: int) -> Played:
        """Play the rounds of a rollout, further ones while `rollout.resample` asks for them, with weights of
        `rollout.lag` versions before `version`."""
        section = self.spec.rollout
        if section.lag:
            self.fleet.get_all([policy.call(PolicyRole.rewind) for policy in self.fleet.policies])
        try:
            rounds = section.rounds(self.spec.env.num_envs)
            played = self._assemble(self.play(range(rounds)))
            for further in range(rounds, rounds + section.further_rounds):
                rollout = self.algorithm.shape_rewards(played.rollout)
                if groups_in(rollout, self.algorithm.select(rollout)) >= section.groups:
                    break
                played = self._assemble([*played.blocks, *self.play(range(further, further + 1))])
        finally:  # also where the run has to stop: the newest weights are what is saved
            if section.lag:
                self.fleet.get_all([policy.call(PolicyRole.forward) for policy in self.fleet.policies])
        if self.algorithm.needs & FRESH:
            played = self._fresh(played, version)
        return played

    def play(self, rounds: range) -> list[Block]:
        """These rounds, everywhere."""
        fleet, self.now = self.fleet, len(rounds)
        pending = [
            fleet.worker_of(policy).call(Worker.play_train, self.step, rounds, self.weights)
            for policy in fleet.policies
        ]
        played: dict[tuple[int, int], tuple[Any, Any]] = {}
        for policy, of_rounds in zip(fleet.policies, fleet.get_all(pending), strict=True):
            for r, results in zip(rounds, of_rounds, strict=True):
                for lane, pair in zip(policy.assignment.served, results, strict=True):
                    played[r, lane.index] = pair
        rows = self.spec.env.num_envs
        return [
            Block(lane=lane, round_index=r, first=r * rows + lane.first_row, sim=sim, policy=policy)
            for r in rounds
            for lane in fleet.lanes
            for sim, policy in (played[r, lane.index],)
        ]

    def _assemble(self, blocks: Sequence[Block]) -> Played:
        return assemble(self.step, blocks, self.spec.env.num_envs, self.spec.rollout.group_size)

    def _fresh(self, played: Played, version: int) -> Played:
        """With values, those of final observations included (AcceRL eq. 3-4), and log-probs of the newest weights,
        as the algorithm needs them. Where these chose everything, log-probs are the recorded ones, to the bit."""
        if not bool((played.rollout.versions != version).any()):
            log_probs = played.rollout.log_probs if "fresh-log-probs" in self.algorithm.needs else None
            return evolve(played, rollout=played.rollout.evolve(fresh_log_probs=log_probs))
        policy_of = self.fleet.policy_of
        pending = [
            policy_of[b.lane.index].call(PolicyRole.refresh, b.lane.index, b.round_index, b.lane.rows)
            for b in played.blocks
        ]
        return self._assemble(
            [
                evolve(b, policy={**b.policy, "light": {**b.policy["light"], **now}})
                for b, now in zip(played.blocks, self.fleet.get_all(pending), strict=True)
            ]
        )

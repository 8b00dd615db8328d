"""`check_env`: does a simulator keep to the contract of `SimEnv`?"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from vla_rl.core.contexts import EnvContext
from vla_rl.core.declarations import EnvPlugin
from vla_rl.core.hookspecs import SimEnv
from vla_rl.testing.common.findings import Findings, build_component
from vla_rl.testing.env_checks import arrangements, ends, experts, first_action, scenes, surroundings, values, wandering
from vla_rl.testing.env_checks.player import Player
from vla_rl.testing.env_checks.traces import EnvTrace

SECONDS = 60.0


def check_env(
    env: SimEnv | EnvPlugin,
    config: Any = None,
    *,
    num_envs: int = 3,
    chunk: int = 4,
    device: str = "cpu",
    expert: bool = True,
    expert_success: float = 0.5,
    whole_range: bool = True,
    seconds: float = SECONDS,
) -> None:
    """Play with a simulator, and compare with what `SimEnv` promises. Raises CheckFailed with all findings.

    `vla-rl check-env TYPE key=value` prints the same as a table, with what could not be seen.

    Args:
        env: a component, which is closed at the end, or an `EnvPlugin` that is built with `config`, `num_envs` envs,
            `chunk` and `device`. For a component, pass the chunk that it was built with.
        expert: where `expert_chunk` is offered, run one episode in every env with it; at least `expert_success` of
            them must succeed. Costs a whole episode of simulation.
        whole_range: parts of an action's range that do nothing, such as a throttle below 0, are findings.
        seconds: about how long to run episodes. A slow simulator runs fewer states and shorter episodes; building it,
            about 40 chunks and the expert's episode are never cut.
    """
    context = EnvContext(num_envs=num_envs, chunk=chunk, device=device)
    options: dict[str, Any] = {"expert": expert, "expert_success": expert_success, "whole_range": whole_range}
    examine_env(env, config, context, **options, seconds=seconds).close()


def examine_env(
    env: SimEnv | EnvPlugin,
    config: Any,
    context: EnvContext,
    *,
    expert: bool = True,
    expert_success: float = 0.5,
    whole_range: bool = True,
    seconds: float = SECONDS,
    on_section: Callable[[str], None] = lambda name: None,
) -> Findings:
    """`check_env` that returns what it found, section by section. `on_section` is called with the name of each."""
    sim: SimEnv
    before = surroundings.Surroundings.capture_now()
    on_section("building the simulator")
    sim, name = build_component("env", env, config, context)
    f = Findings(f"check_env of {name}", on_section)
    another = None
    if isinstance(env, EnvPlugin):
        another = partial(_built_again, env, config, context)
    try:
        with f.section("info"):
            values.check_info(f, sim)
            if another:
                f.expect(
                    sim.num_envs == context.num_envs, "num_envs", context.num_envs, sim.num_envs, "as in EnvContext"
                )
        splits: dict[str, Any] = {}
        with f.section("reset_states"):
            splits = values.check_states(f, sim)
        if splits and all(splits.values()):
            _roll_out(Player(sim, f, context.chunk, splits, seconds), expert, expert_success, whole_range, another)
    finally:
        started = surroundings.child_processes()
        with f.section("close, twice"):
            sim.close()
            sim.close()
        with f.section("after close"):
            surroundings.check_surroundings(f, before, started)
    return f


def _roll_out(
    player: Player,
    expert: bool,
    expert_success: float,
    whole_range: bool,
    another: Callable[[], SimEnv] | None,
) -> None:
    section, starts, reference = player.findings.section, scenes.StartChecks(), arrangements.Reference()
    first: dict[int, EnvTrace] = {}
    ended: list[EnvTrace] = []
    with section("first reset"):
        scenes.first_contact(player)
    with section("states"):
        starts = scenes.enter_states(player)
    if not player.splits["train"]:
        return
    with section("scenes"):
        arrangements.measure_chance(player)
        if player.info.fixed_states:
            scenes.enter_again(player, starts)
            scenes.scenes_follow_ids(player, starts)
            scenes.splits_apart(player, starts)
        else:
            player.notice("not done: EnvInfo.fixed_states says that a person arranges the scenes")
    with section("generators"):
        surroundings.generators_left_alone(player)
    with section("actions"):
        first, ended = wandering.run_random_episodes(player)
        wandering.actions_count(player, whole_range)
    with section("first action"):
        first_action.first_actions(player)
    if expert:
        with section("expert"):
            ended += [trace for trace in experts.run_expert(player, expert_success) if trace.end_step is not None]
    with section("success and images"):
        wandering.success_is_reported(player)
        wandering.what_is_shown_changes(player)
    if player.info.takeovers:
        with section("takeovers"):
            wandering.takeovers_are_reported(player)
    with section("determinism"):
        arrangements.check_determinism(player, reference, first)
    with section("envs apart"):
        arrangements.independent_envs(player, reference)
    with section("chunks"):
        arrangements.check_chunks(player, reference)
    with section("resets of other envs"):
        arrangements.independent_envs_agree(player, reference)
    if expert:
        with section("expert in other envs"):
            arrangements.expert_leaves_others(player, reference)
    with section("ends"):
        ends.check_ends(player, ended, starts, reference.has_episodes)
    with section("envs of one process"):
        surroundings.envs_of_one_process(player, reference)
    with section("offload"):
        arrangements.check_offload(player, reference, another)
    with section("what is left behind"):
        surroundings.nothing_piles_up(player, another, reference.has_episodes)


def _built_again(plugin: EnvPlugin, config: Any, context: EnvContext) -> SimEnv:
    sim: SimEnv = build_component("env", plugin, config, context)[0]
    return sim

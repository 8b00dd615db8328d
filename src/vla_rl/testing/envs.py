"""`check_env`: does a simulator keep to the contract of `SimEnv`?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vla_rl.core.contexts import EnvContext
from vla_rl.core.declarations import EnvPlugin
from vla_rl.core.hookspecs import SimEnv
from vla_rl.testing.common.findings import Findings, build_component
from vla_rl.testing.env_checks import actions, ends, experts, first_action, repeats, scenes, surroundings, values
from vla_rl.testing.env_checks.player import CheckSettings, Player

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
        another = lambda: build_component("env", env, config, context)[0]  # noqa: E731
    options = CheckSettings(
        expert=expert, expert_success=expert_success, check_range=whole_range, seconds=seconds, make_env=another
    )
    try:
        with f.section("info"):
            values.check_info(f, sim)
            if another:
                expected, remedy = context.num_envs, "as in EnvContext"
                f.expect(sim.num_envs == expected, "num_envs", expected, sim.num_envs, remedy)
        splits: dict[str, Any] = {}
        with f.section("reset_states"):
            splits = values.check_states(f, sim)
        if splits and all(splits.values()):
            _roll_out(Player(sim, f, context.chunk, splits, options))
    finally:
        started = surroundings.child_processes()
        with f.section("close, twice"):
            sim.close()
            sim.close()
        with f.section("after close"):
            surroundings.check_surroundings(f, before, started)
    return f


def _roll_out(player: Player) -> None:
    checks: dict[str, Callable[[Player], None]] = {
        "first reset": scenes.check_first_contact,
        "states": scenes.check_states,
        "scenes": scenes.check_scenes,
        "generators": surroundings.check_generators,
        "actions": actions.check_actions,
        "first action": first_action.check_first_actions,
        "expert": experts.check_expert,
        "success and images": actions.check_outcomes,
        "takeovers": actions.check_takeovers,
        "determinism": repeats.check_determinism,
        "envs apart": repeats.check_envs_apart,
        "chunks": repeats.check_chunks,
        "resets of other envs": repeats.check_resets_of_others,
        "expert in other envs": repeats.check_expert_apart,
        "ends": ends.check_ends,
        "envs of one process": repeats.check_envs_of_one_process,
        "offload": repeats.check_offload,
        "what is left behind": surroundings.check_left_behind,
    }
    if not player.options.expert:
        del checks["expert"], checks["expert in other envs"]
    if not player.info.takeovers:
        del checks["takeovers"]
    for name, check in checks.items():
        if player.splits["train"]:  # else no state can be entered
            with player.findings.section(name):
                check(player)

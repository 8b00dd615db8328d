from __future__ import annotations

import itertools
import subprocess
import sys

import attrs
import numpy as np
import pytest

from vla_rl.core.hookspecs import SimEnv
from vla_rl.core.types import ActionSource, Observation, ResetState
from vla_rl.testing import CheckFailed, ScriptedEnv, check_env
from vla_rl.testing.env_checks.surroundings import child_processes
from vla_rl.testing.scripted import ScriptedConfig, vla_rl_plugins


def findings(env: SimEnv, **options: object) -> str:
    with pytest.raises(CheckFailed) as failed:
        check_env(env, chunk=4, **options)
    return str(failed.value)


def env(cls: type[ScriptedEnv] = ScriptedEnv) -> ScriptedEnv:
    return cls(3, chunk=4, stamp=False)


def test_the_scripted_env_passes_built_and_as_a_plugin() -> None:
    check_env(env(), chunk=4)
    check_env(vla_rl_plugins["env"]["scripted"], ScriptedConfig(image=12), num_envs=1)


def test_a_process_that_python_keeps_is_not_a_leak_however_long_its_command_is() -> None:
    """The process's name may come late, as where Python's own folder has a long path."""
    waits = "import time; time.sleep(60)"
    commands = [f"{'pass; ' * 40}{waits}  # multiprocessing.{name}" for name in ("resource_tracker", "my_own")]
    pythons, mine = (subprocess.Popen([sys.executable, "-S", "-c", command]) for command in commands)
    try:
        assert pythons.pid not in child_processes()
        assert mine.pid in child_processes()
    finally:
        for process in (pythons, mine):
            process.kill()
            process.wait()


def test_ends_that_are_prescribed_whatever_is_done_are_found() -> None:
    scripted = ScriptedEnv(3, lambda state: (2, "truncated"), chunk=4, stamp=False)
    text = findings(scripted, expert=False)
    assert "1 finding" in text and "expected other observations, rewards or ends after other actions" in text


def test_shared_states_are_found() -> None:
    class Env(ScriptedEnv):
        def reset_states(self, split: str) -> tuple[ResetState, ...]:
            return super().reset_states("train")

    assert "expected splits without a common id, got [0, 1, 2, 3, 4] in both" in findings(env(Env))


def test_a_reset_of_everything_is_found() -> None:
    class Env(ScriptedEnv):
        def reset(self, env_ids, state_ids, seed):
            for env_id in set(range(3)) - set(env_ids.tolist()):
                super().reset(np.array([env_id]), np.array([1]), np.array([0]))
            return super().reset(env_ids, state_ids, seed)

    assert "expected the other envs untouched" in findings(env(Env))


def test_chance_that_is_not_keyed_is_found() -> None:
    class Env(ScriptedEnv):
        count = itertools.count()

        def reset(self, env_ids, state_ids, seed):
            obs = super().reset(env_ids, state_ids, seed)
            return attrs.evolve(obs, state=obs.state + np.float32(next(self.count)))

    text = findings(env(Env))
    assert "expected equal observations for equal state ids" in text
    assert "derive everything random from state id and seed" in text


def test_buffers_that_are_written_again_are_found() -> None:
    class Env(ScriptedEnv):
        buffer = np.zeros((3, 8, 8, 3), np.uint8)

        def _make_observation(self, env_ids):
            obs = super()._make_observation(env_ids)
            self.buffer[: len(env_ids)] = obs.images["main"]
            return attrs.evolve(obs, images={"main": self.buffer[: len(env_ids)]})

    assert "observations and results that stay as returned" in findings(env(Env))


def with_result(**changes):
    """An env whose chunk_step changes its result: name -> function of (result, active)."""

    class Env(ScriptedEnv):
        def chunk_step(self, actions, active, stop_at_end):
            result = super().chunk_step(actions, active, stop_at_end)
            return attrs.evolve(result, **{name: change(result, active) for name, change in changes.items()})

    return env(Env)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rewards": lambda r, a: r.rewards.astype(np.float64)}, "expected float32 [3, 4], got float64 [3, 4]"),
        ({"success": lambda r, a: r.success[:, None]}, "success: expected bool [3], got bool [3, 1]"),
        ({"rewards": lambda r, a: r.rewards * np.float32(np.nan)}, "rewards: expected finite numbers"),
        ({"rewards": lambda r, a: r.rewards + np.float32(1)}, "expected 0 where nothing was executed"),
        ({"executed": lambda r, a: r.executed | True}, "expected False in envs that are not active"),
        ({"executed": lambda r, a: r.executed & False}, "expected True for the first action of active envs"),
        ({"executed": lambda r, a: r.executed & (np.arange(4) != 1)}, "got a gap"),
        ({"executed": lambda r, a: r.executed & (np.arange(4) < 3)}, "expected all actions of active envs, got fewer"),
        ({"terminated": lambda r, a: r.executed & (np.arange(4) == 1)}, "expected nothing after the end"),
    ],
)
def test_wrong_results_are_found(changes, text: str) -> None:
    assert text in findings(with_result(**changes))


def with_observation(change):
    class Env(ScriptedEnv):
        def _make_observation(self, env_ids):
            return change(super()._make_observation(env_ids))

    return env(Env)


def renamed(obs: Observation) -> Observation:
    return attrs.evolve(obs, images={"other": obs.images["main"]})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (renamed, "expected ['main'], got ['other']"),
        (
            lambda o: attrs.evolve(o, images={"main": o.images["main"] / 255}),
            "expected uint8 [1, 8, 8, 3], got float64",
        ),
        (lambda o: attrs.evolve(o, state=o.state + np.float32(np.inf)), "NaN or inf in 1 of 1 envs"),
        (lambda o: attrs.evolve(o, state=None), "state: expected float32 [1, 2], got None; mind info.state_dim"),
        (lambda o: attrs.evolve(o, instructions=("go",) * len(o)), "that of the state's task"),
    ],
)
def test_wrong_observations_are_found(change, text: str) -> None:
    assert text in findings(with_observation(change))


def test_envs_that_disturb_each_other_are_found() -> None:
    class Env(ScriptedEnv):
        def chunk_step(self, actions, active, stop_at_end):
            result = super().chunk_step(actions, active, stop_at_end)
            return attrs.evolve(result, obs=attrs.evolve(result.obs, state=result.obs.state + active.mean(dtype="f")))

    assert "expected env 0 alone as with others" in findings(env(Env))


def test_a_bad_expert_is_found() -> None:
    class Env(ScriptedEnv):
        def expert_chunk(self):
            return -super().expert_chunk()

    assert "expected success in 50% of train states, got 0% of 3 (not solved: [0, 32, 63])" in findings(env(Env))
    check_env(env(Env), chunk=4, expert=False)


def test_a_restore_that_forgets_is_found() -> None:
    class Env(ScriptedEnv):
        def restore(self, snapshot):
            return super().restore([*snapshot[:3], self._step, *snapshot[4:]])

    assert "expected the same step after a restore" in findings(env(Env))


def test_everything_is_listed_at_once_and_exceptions_are_findings() -> None:
    class Env(ScriptedEnv):
        closed = 0

        def expert_chunk(self):
            raise ZeroDivisionError("no path")

        def close(self):
            self.closed += 1
            if self.closed == 2:
                raise RuntimeError("closed already")

    broken = env(Env)
    broken.info = attrs.evolve(broken.info, action_low=(1.0, 1.0))
    with pytest.raises(CheckFailed) as failed:
        check_env(broken, chunk=4)
    assert len(failed.value.findings) >= 3
    text = str(failed.value)
    assert text.startswith("check_env of Env: ")
    assert "expected finite action_low < action_high" in text
    assert "expert: expected no exception, got ZeroDivisionError: no path" in text
    assert "close, twice: expected no exception, got RuntimeError: closed already" in text


def test_a_signature_that_does_not_fit_is_found() -> None:
    class Env(ScriptedEnv):
        def reset(self, env_ids, state_id, seed):
            return super().reset(env_ids, state_id, seed)

    assert "unknown argument 'state_id'; did you mean 'state_ids'?" in findings(env(Env))


class Helped(ScriptedEnv):
    """A person acts where the policy's first number is above 0.5, with this share of the largest action."""

    def __init__(self, share: float) -> None:
        super().__init__(3, chunk=4, stamp=False)
        self.info = attrs.evolve(self.info, takeovers=True)
        self.share = share

    def chunk_step(self, actions, active, stop_at_end):
        helped = np.array(actions, np.float32)
        by_person = helped[..., 0] > 0.5
        helped[by_person] = self.share * np.array(self.info.action_high, np.float32)
        result = super().chunk_step(helped, active, stop_at_end)
        width = result.rewards.shape[1]
        source = np.where(by_person, ActionSource.PERSON, ActionSource.POLICY).astype(np.int8)[:, :width]
        return attrs.evolve(result, source=source, executed_actions=helped[:, :width])


def test_actions_of_a_person_beyond_the_bounds_are_found() -> None:
    check_env(Helped(1.0), chunk=4, whole_range=False)
    assert "executed_actions: expected actions within the bounds of EnvInfo, as the policy's are, got one that is" in (
        findings(Helped(1e6), whole_range=False)
    )

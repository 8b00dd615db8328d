"""`check_env` against simulators that are broken in one place, and against unusual ones that are not."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Generator
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import broken_batches
import broken_ranges
import broken_scenes
import broken_surroundings
import broken_takeovers
import numpy as np
import pytest
import shared_state_envs
import torch
import unusual_scenes
from attrs import make_class
from small_simulators import (
    BuggyExpertEnv,
    NoExpertEnv,
    Scene,
    SceneEnv,
    SmallEnv,
    small_batch,
    small_envs,
    small_info,
    small_states,
)

from vla_rl.core.contexts import EnvContext
from vla_rl.core.declarations import EnvPlugin
from vla_rl.core.errors import UserError
from vla_rl.core.hookspecs import SimEnv
from vla_rl.testing import CheckFailed, check_env
from vla_rl.testing.common.findings import Findings
from vla_rl.testing.envs import examine_env
from vla_rl.toolkit.envs.settings import Processes
from vla_rl.toolkit.envs.subproc_envs import SubprocEnvs

UNSOLVED = (
    unusual_scenes.Needle,
    unusual_scenes.Endless,
    unusual_scenes.Alive,
    unusual_scenes.Mine,
    unusual_scenes.Sluggish,
    unusual_scenes.Wind,
    unusual_scenes.Locked,
    unusual_scenes.Coarse,
)
"""Their expert, which is that of a plain scene, does not solve them."""


BROKEN = (*broken_scenes.SCENES, *broken_ranges.SCENES, *broken_surroundings.SCENES)


@pytest.fixture(autouse=True)
def _settings_of_the_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Generator[None]:
    """What broken simulators change for the whole process is put back, and folders that they leave are removed."""
    get_temp_dir()  # that of the fork server, which later tests need
    monkeypatch.chdir(Path.cwd())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    torch.set_default_dtype(torch.float32)


def found(env: SimEnv, expert: bool) -> str:
    with pytest.raises(CheckFailed) as failed:
        check_env(env, chunk=4, expert=expert)
    return str(failed.value)


def says_one_of(text: str, kind: type) -> bool:
    return any(words in text for words in str(kind.__doc__).split("|"))


def examined(env: SimEnv, expert: bool = False) -> Findings:
    return examine_env(env, None, EnvContext(num_envs=env.num_envs, chunk=4), expert=expert)


def notices(findings: Findings) -> str:
    return "\n".join(text for section in findings.sections for text in section.notices)


# ----------------------------------------------------------------------------------------------------- broken


@pytest.mark.parametrize("scene", BROKEN, ids=lambda scene: scene.__name__)
def test_a_broken_scene_is_found_without_an_expert(scene: type[Scene]) -> None:
    assert says_one_of(text := found(small_batch(scene), expert=False), scene), text


@pytest.mark.parametrize(
    "scene",
    [s for s in broken_scenes.SCENES if s not in broken_scenes.BATCH_ONLY] + list(broken_scenes.EXPERTS),
    ids=lambda scene: scene.__name__,
)
def test_a_broken_env_is_found(scene: type[Scene]) -> None:
    assert says_one_of(text := found(small_envs(scene), expert=True), scene), text


@pytest.mark.parametrize(
    "batch",
    [*broken_batches.BATCHES, *broken_surroundings.BATCHES, *broken_takeovers.BATCHES],
    ids=lambda batch: batch.__name__,
)
def test_a_broken_batch_is_found_without_an_expert(batch: type[SmallEnv]) -> None:
    assert says_one_of(text := found(batch(), expert=False), batch), text


@pytest.mark.parametrize("batch", broken_batches.EXPERTS, ids=lambda batch: batch.__name__)
def test_a_broken_expert_is_found(batch: type[SmallEnv]) -> None:
    assert says_one_of(text := found(batch(), expert=True), batch), text


@pytest.mark.parametrize("env_type", shared_state_envs.ENVS, ids=lambda env_type: env_type.__name__)
def test_envs_that_play_right_only_in_separate_processes_are_found(env_type: type[SceneEnv]) -> None:
    with pytest.raises(CheckFailed) as failed:
        check_env(independent_envs(env_type), num_envs=2, chunk=4, expert=False)
    (text,) = failed.value.findings
    assert "the same episodes in envs that share a process (processes: {envs_per_process: 2})" in text


# ---------------------------------------------------------------------------------------------------- correct


@pytest.mark.parametrize("scene", [Scene, *unusual_scenes.SCENES], ids=lambda scene: scene.__name__)
def test_an_unusual_scene_passes(scene: type[Scene]) -> None:
    check_env(small_batch(scene), chunk=4, expert=scene not in UNSOLVED)


@pytest.mark.parametrize("scene", [Scene, *unusual_scenes.SCENES], ids=lambda scene: scene.__name__)
def test_one_env_of_an_unusual_scene_passes(scene: type[Scene]) -> None:
    check_env(small_envs(scene, num_envs=1), chunk=4, expert=False)


@pytest.mark.parametrize("scene", [Scene, unusual_scenes.NoisyEyes, unusual_scenes.Bandit])
@pytest.mark.parametrize("chunk", [1, 7])
def test_other_chunks_pass(scene: type[Scene], chunk: int) -> None:
    check_env(small_batch(scene, chunk=chunk), chunk=chunk)


@pytest.mark.parametrize("batch", unusual_scenes.BATCHES, ids=lambda batch: batch.__name__)
def test_an_unusual_batch_passes(batch: type[SmallEnv]) -> None:
    check_env(batch(), chunk=4)


@pytest.mark.parametrize("batch", [*broken_takeovers.RIGHT, broken_batches.Measured], ids=lambda batch: batch.__name__)
def test_a_simulator_with_a_person_passes(batch: type[SmallEnv]) -> None:
    """The person may even act in every step."""
    check_env(batch(), chunk=4, expert=False)


def independent_envs(env_type: type[SceneEnv]) -> SubprocEnvs:
    splits = {split: small_states(split) for split in ("train", "eval")}
    return SubprocEnvs(small_info(), splits, env_type, EnvContext(num_envs=2, chunk=4), Processes(apart=True))


def test_envs_in_processes_pass() -> None:
    check_env(independent_envs(SceneEnv), num_envs=2, chunk=4)


def test_files_that_envs_leave_open_in_their_processes_are_found() -> None:
    with pytest.raises(CheckFailed, match="as many open files after each episode") as failed:
        check_env(independent_envs(shared_state_envs.LeavesFilesOpen), num_envs=2, chunk=4, expert=False)
    assert len(failed.value.findings) == 1


def test_programs_that_envs_start_end_with_them() -> None:
    check_env(independent_envs(shared_state_envs.StartsAServer), num_envs=2, chunk=4, expert=False)


def test_envs_without_an_expert_continue_after_they_were_asked_for_one() -> None:
    env = independent_envs(NoExpertEnv)
    try:
        env.reset(np.arange(2), np.arange(2), np.arange(2))
        for _ in range(2):
            with pytest.raises(UserError, match="no expert here"):
                env.expert_chunk()
        assert env.chunk_step(np.zeros((2, 4, 2), np.float32), np.ones(2, bool), True).executed.all()
        assert not env.faults()
    finally:
        env.close()


def test_a_bug_in_the_expert_of_an_env_is_a_fault_of_that_env() -> None:
    env = independent_envs(BuggyExpertEnv)
    try:
        env.reset(np.arange(2), np.arange(2), np.arange(2))
        assert not env.expert_chunk().any()
        faults = env.faults()
        assert faults.keys() == {0, 1}
        assert all("TypeError: object of type 'NoneType'" in text for texts in faults.values() for text in texts)
    finally:
        env.close()


# ------------------------------------------------------------------------------------------ what is not seen


def test_what_playing_cannot_show_is_said_and_is_not_a_finding() -> None:
    text = notices(examined(small_batch(unusual_scenes.Endless)))
    for what in ("success", "an end", "a reward other than 0"):
        assert f"not seen: {what}" in text
    assert "an effect of number 1 of an action" in notices(examined(small_batch(unusual_scenes.NoGripper)))
    assert "not seen:" not in notices(examined(small_batch(Scene)))
    failures = notices(examined(small_batch(unusual_scenes.Needle)))
    assert re.search(r"not seen: an end by success; \d+ episodes terminated as failures, after \d+ actions", failures)
    assert "an effect of actions; another source chose all" in notices(examined(broken_takeovers.AlwaysAPerson()))


def test_little_time_means_fewer_states_and_shorter_episodes_and_is_said() -> None:
    quick = examine_env(unusual_scenes.ManyStates(), None, EnvContext(num_envs=3, chunk=4), seconds=0)
    assert "not seen: all eval states; entered 3 of 3000 (1 of 2 tasks)" in notices(quick)
    assert "not seen: whole episodes; compared 8 of up to 12 actions" in notices(quick)
    quick.close()


def test_an_error_that_comes_everywhere_is_reported_once() -> None:
    findings = examined(small_envs(broken_scenes.BreaksAlways))
    texts = [text for section in findings.sections for text in section.findings]
    assert sum("Traceback" in text for text in texts) == 1
    assert all("the same error as in 'first reset'" in text for text in texts[1:])
    assert len(texts) < 5


class CountsResets(broken_scenes.WideImages):
    """Counts how often envs are made and reset."""

    resets = made = 0

    def __init__(self, number: int) -> None:
        super().__init__(number)
        CountsResets.made += 1

    def reset(self, state: int, seed: int) -> None:
        super().reset(state, seed)
        CountsResets.resets += 1


class BreaksOnEveryStep(Scene):
    """Cannot be played at all."""

    moves = 0

    def move(self, action: Any) -> None:
        BreaksOnEveryStep.moves += 1
        raise RuntimeError("no torque")


def test_what_fails_alike_everywhere_ends_the_check_soon() -> None:
    check = examined(small_envs(CountsResets))
    assert CountsResets.resets <= 6 and CountsResets.made <= 2, "a fresh env would not mend it"
    texts = [text for section in check.sections for text in section.findings]
    assert "env 1: its image 'top' is uint16 [8, 24, 3], expected uint8 [8, 24, 3]; correct `render`" in texts[0]
    assert len(texts) == 2

    check = examined(small_batch(BreaksOnEveryStep))
    assert BreaksOnEveryStep.moves <= 5
    skipped = {section.name: section.skipped for section in check.sections if section.skipped}
    assert skipped["actions"].startswith("not done: chunk_step failed 3 times in a row in 0 s; see the findings above")


def test_sections_are_announced_as_they_begin() -> None:
    told: list[str] = []
    context = EnvContext(num_envs=3, chunk=4)
    findings = examine_env(small_batch(Scene), None, context, expert=False, seconds=0, on_section=told.append)
    assert told[:2] == ["building the simulator", "info"]
    assert told[1:] == [section.name for section in findings.sections]


def test_a_finding_says_what_was_played_and_where() -> None:
    text = found(broken_batches.FirstActionOnly(), expert=False)
    assert "(env 0, state 0 with random actions, ended by action 7)" in text
    assert "apply every action of a chunk, in order" in text


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (broken_surroundings.LeavesAFolder, "as many temporary files or folders after each simulator that was closed"),
        (broken_surroundings.SeedsWhereItIsBuilt, "build: expected the global generator of Python left alone"),
        (broken_surroundings.DrawsWhereItIsBuilt, "expected the same episode in a simulator that is built again"),
    ],
)
def test_what_building_leaves_behind_is_found(batch: type[SmallEnv], message: str) -> None:
    def build(config: Any, context: EnvContext) -> SimEnv:
        return batch(context.num_envs, context.chunk)

    with pytest.raises(CheckFailed, match=message) as failed:
        check_env(EnvPlugin(config=make_class("Config", []), build=build, summary="a broken one"), expert=False)
    assert len(failed.value.findings) == 1


def test_a_simulator_of_another_size_than_was_asked_for_is_found() -> None:
    def build(config: Any, context: EnvContext) -> SimEnv:
        return SmallEnv(2, context.chunk)

    plugin = EnvPlugin(config=make_class("Config", []), build=build, summary="two envs, always")
    with pytest.raises(CheckFailed, match="num_envs: expected 3, got 2"):
        check_env(plugin)

from __future__ import annotations

from fork_server import ForkServer
from vla_rl import testing

pytest_plugins = ["pytester"]


def test_fixtures_are_found_without_an_import(pytester) -> None:
    pytester.makepyfile(
        """
        from vla_rl.testing.scripted import vla_rl_plugins

        def test_contract(check_env, check_model, check_algorithm, check_placement, scripted_env):
            check_env(vla_rl_plugins["env"]["scripted"])
            assert scripted_env.num_envs == 4
        """
    )
    pytester.runpytest_inprocess().assert_outcomes(passed=1)


def test_pytest_starts_without_torch(bare_fork_server: ForkServer) -> None:
    code = "import sys, vla_rl.testing.fixtures, vla_rl.testing.scripted; print('torch' in sys.modules)"
    assert bare_fork_server.run_python("-c", code, check=True).stdout == "False\n"


def test_every_public_name_is_there() -> None:
    assert all(getattr(testing, name).__name__ == name for name in testing.__all__)

from acme_env import BeaconsConfig, plugin


def test_the_simulator_keeps_to_the_contract(check_env):
    check_env(plugin, BeaconsConfig(pixels=32), num_envs=6)

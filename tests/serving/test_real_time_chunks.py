"""A served policy continues what its client still executes."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("websockets", reason="pip install -e '.[serve]'")
pytest.importorskip("msgpack", reason="pip install -e '.[serve]'")

from clients import Client, request_of, served
from trained import sight, train

import vla_rl


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    model = {"type": "pi0", "preset": "tiny", "denoise_steps": 5}
    return train(tmp_path_factory.mktemp("served") / "run", model=model)


@pytest.fixture
def policy(run):
    return vla_rl.open_policy(run, greedy=False)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return train(tmp_path_factory.mktemp("served") / "plain")


def test_it_continues_the_last_chunk(policy):
    """Another draw of the noise is another chunk; with the last one it begins as that one ends."""
    closer = []
    for seed in range(6):
        seen = sight(policy, seed)
        last = policy.act(**seen, key=(0, 0, seed))
        free = policy.act(**seen, key=(1, 0, seed))
        held = policy.act(**seen, key=(1, 0, seed), previous=last[1:], delay=2)
        off = [np.abs(chunk[:2] - last[1:3]).mean() for chunk in (free, held)]
        closer.append(off[1] / off[0])
    assert np.median(closer) < 0.5


def test_clients_get_it_next_to_others(policy):
    with served(policy) as server, Client(server) as client:
        assert client.metadata["real_time_chunking"] is True
        seen = sight(policy, 0)
        first = client.infer(request_of(seen))["actions"]
        rest = {"previous_actions": first[2:], "delay": 1}
        found = client.infer({**request_of(seen), **rest})["actions"]
        wanted = policy.act(**seen, key=(0, 0, 1), previous=first[2:], delay=1)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)


def test_rows_with_and_without_are_what_each_is_alone(policy):
    seen = [sight(policy, seed) for seed in range(4)]
    rows = vla_rl.Observation.concat([policy.observation(**one) for one in seen])
    keys = [(0, 0, n) for n in range(4)]
    last = policy.act_on(rows, keys)
    rests = [None, policy.unexecuted(last[1][1:], 1), None, policy.unexecuted(last[3][2:], 2)]
    together = policy.act_on(rows, keys, rests)
    for n in range(4):
        alone = policy.act_on(policy.observation(**seen[n]), [keys[n]], [rests[n]])
        np.testing.assert_allclose(together[n], alone[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"previous": np.zeros((5, 3))}, r"shape \[5, 3\]; it must be \[M, 3\], M within 1 and 4"),
        ({"previous": np.zeros((0, 3))}, r"shape \[0, 3\]"),
        ({"previous": np.zeros(3)}, r"shape \[3\]"),
        ({"previous": "go"}, "is 'go'; it must be"),
        ({"previous": np.full((2, 3), np.nan)}, "not finite"),
        ({"previous": np.zeros((2, 3)), "delay": 3}, "the delay is 3; it must be a whole number within 0 and 2"),
        ({"previous": np.zeros((2, 3)), "delay": 0.5}, r"the delay is 0\.5"),
    ],
)
def test_what_is_not_the_rest_of_a_chunk_is_refused(policy, change, message):
    with pytest.raises(vla_rl.BadObservation, match=message):
        policy.act(**sight(policy, 0), **change)


def test_models_that_do_not_denoise_say_so(plain):
    policy = vla_rl.open_policy(plain)
    assert policy.about()["real_time_chunking"] is False
    with pytest.raises(vla_rl.BadObservation, match="model 'linear' cannot continue previous actions"):
        policy.act(**sight(policy, 0), previous=np.zeros((2, 3)))

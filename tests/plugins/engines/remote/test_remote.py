"""Policies of other processes on our simulators: the same episodes as of the policy here."""

from __future__ import annotations

import functools
import json
import signal
import socket
import subprocess
import threading
from contextlib import ExitStack, contextmanager, suppress

import attrs
import numpy as np
import pytest

pytest.importorskip("websockets", reason="pip install -e '.[serve]'")
pytest.importorskip("msgpack", reason="pip install -e '.[serve]'")

from typer.testing import CliRunner
from websockets.sync.server import serve as listen

import vla_rl
from serving.clients import WAIT, served
from serving.trained import spec, train
from vla_rl.cli.main import app
from vla_rl.core.contexts import EngineContext
from vla_rl.core.errors import PluginError, SpecError, UserError
from vla_rl.core.plan import Cluster, DoesNotFit
from vla_rl.core.randomness import Noise
from vla_rl.core.spec.spec import parse_spec
from vla_rl.core.types import EnvInfo, Observation
from vla_rl.plugins.engines.remote import plugin
from vla_rl.plugins.engines.remote.address import proxy_for
from vla_rl.plugins.engines.remote.config import RemoteConfig
from vla_rl.plugins.engines.remote.engine import RemoteEngine
from vla_rl.runtime.checks.run import check_spec
from vla_rl.runtime.placement.assignments import assign_workers
from vla_rl.runtime.planning.plan import plan_for
from vla_rl.runtime.start import start
from vla_rl.serving.policy import Policy
from vla_rl.testing import check_engine
from vla_rl.toolkit import waiting
from vla_rl.toolkit.models.acting.key_maps import PRESETS
from vla_rl.toolkit.models.acting.openpi import pack_frame


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(tmp_path_factory.mktemp("served") / "run")


@pytest.fixture
def policy(run):
    return vla_rl.open_policy(run)


def observation(info: EnvInfo, rows: int = 5) -> Observation:
    random = np.random.default_rng(0)
    return Observation(
        images={c: random.integers(0, 256, (rows, *size, 3), dtype=np.uint8) for c, size in info.cameras.items()},
        state=random.normal(size=(rows, info.state_dim)).astype(np.float32),
        instructions=tuple(info.tasks[i % len(info.tasks)].instruction for i in range(rows)),
    )


def remote(url, info, chunk=4, **settings):
    return RemoteEngine(RemoteConfig(url=url, **settings), EngineContext(chunk=chunk, env=info))


def url_of(server):
    return f"ws://127.0.0.1:{server.settings.port}"


def by(engine, **changes):
    """Sections of a spec whose engine is this one. Its model needs files that are not there, and is not built."""
    rollout = changes.pop("rollout", spec()["rollout"])
    model = {"type": "linear", "checkpoint": "nowhere"}
    return {"model": model, "rollout": {**rollout, "engine": engine}, **changes}


def choose(model, obs):
    return model.act(obs, Noise(0, "any", range(len(obs)), [0] * len(obs), [0] * len(obs)), True).actions


def episodes(given, checkpoint=None):
    """All that an evaluation knows of each episode, and the actions that the simulator was given."""
    driver = start(parse_spec(given))
    taken, sim = [], driver.backend.worker.roles["sim"]
    step = sim.step

    @functools.wraps(step)
    def noted(lane, actions, tickets):
        taken.append(actions)
        return step(lane, actions, tickets)

    sim.step = noted
    try:
        if checkpoint is not None:
            driver.learners.load(checkpoint)
        found = driver.workers.evaluate(0)
    finally:
        driver.workers.close()
    return found.episodes, [actions for actions in taken if actions is not None]


def are_equal(here, there, count):
    """What `episodes` gave twice."""
    assert here[0] == there[0] and len(here[0]) == count
    assert len(here[1]) == len(there[1]) > 3
    assert all(np.array_equal(a, b) for a, b in zip(here[1], there[1], strict=True))


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_episodes_equal_those_of_the_policy_here(run, policy, algorithm):
    """Compare the episodes of a policy in this process with those through a websocket."""

    def of(model):
        rollout = {"chunk": 4, "episodes": 8, "group_size": 4}
        if model["type"] == "remote":
            return spec(**by(model, rollout=rollout), algorithm={"type": algorithm})
        return spec(model=model, algorithm={"type": algorithm}, rollout=rollout)

    trained = run / "checkpoints" / "last" / "trainer"
    here = episodes(of({"type": "linear"}), trained if algorithm == "grpo" else None)
    if algorithm == "ppo":  # an untrained model, with a critic that a remote one has not
        policy = vla_rl.open_policy(run)
        fresh = start(parse_spec(spec()))
        policy.engine.load(fresh.backend.worker.roles["policy"].engine.model.weights())
        fresh.workers.close()
    with served(policy) as server:
        are_equal(here, episodes(of({"type": "remote", "url": url_of(server)})), 16)


@pytest.mark.sim
def test_episodes_on_libero_equal_those_of_the_policy_here(tmp_path):
    """Compare the episodes of a small trained policy on the real simulator."""
    pytest.importorskip("libero", reason="needs LIBERO: pip install -e '.[libero]'")
    changes = {
        "env": {
            "type": "libero",
            "suite": "libero_spatial",
            "tasks": [0],
            "num_envs": 2,
            "cameras": {"agentview": 64, "wrist": 64},
        },
        "rollout": {"chunk": 4, "episodes": 2, "group_size": 2, "max_steps": 16},
    }
    run = train(tmp_path / "run", model={"type": "film_resnet"}, **changes)
    policy = vla_rl.open_policy(run)
    here = episodes(spec(model={"type": "film_resnet"}, **changes), run / "checkpoints" / "last" / "trainer")
    with served(policy) as server:
        are_equal(here, episodes(spec(**by({"type": "remote", "url": url_of(server)}, **changes))), 2)


@pytest.mark.parametrize("connections", [1, 3, 16])
def test_rows_come_back_in_their_order(policy, connections):
    obs = observation(policy.info)
    wanted = [
        policy.act({c: image[i] for c, image in obs.images.items()}, obs.state[i], obs.instructions[i])
        for i in range(len(obs))
    ]
    with served(policy) as server:
        model = remote(url_of(server), policy.info, connections=connections)
        assert np.array_equal(choose(model, obs), wanted)
        short = remote(url_of(server), policy.info, chunk=2)
        assert np.array_equal(choose(short, obs), np.array(wanted)[:, :2])


ARM = """
images: [observation/exterior_image_1_left, observation/wrist_image_left]
state: [observation/joint_position, observation/gripper_position]
state_sizes: [3, 1]
"""


@pytest.mark.parametrize(("name", "written"), [("libero", None), ("aloha", None), ("droid", ARM)])
def test_requests_have_the_keys_of_openpis_robots(policy, tmp_path, name, written):
    """What the server reads by a preset is what the client wrote by it, or by a file."""
    obs, keys = observation(policy.info), name
    if written is not None:
        (tmp_path / "keys.yaml").write_text(written)
        keys = str(tmp_path / "keys.yaml")
    with served(policy) as server:
        wanted = choose(remote(url_of(server), policy.info), obs)
    with served(policy, keys=PRESETS[name]) as server:
        assert np.array_equal(choose(remote(url_of(server), policy.info, keys=keys), obs), wanted)


def test_a_state_is_divided_as_the_key_map_says(policy):
    with served(policy) as server, pytest.raises(UserError, match=r"has 4 numbers, and the key map says \[7, 1\] for"):
        choose(remote(url_of(server), policy.info, keys="droid"), observation(policy.info))


def test_it_keeps_to_the_contract_of_engines(policy):
    with served(policy) as server:
        check_engine(plugin, RemoteConfig(url=url_of(server)), env=policy.info, chunk=4)
        with pytest.raises(UserError, match="takes no weights"):
            remote(url_of(server), policy.info).load([])


@pytest.mark.parametrize("command", ["run", "sft", "check"])
def test_training_it_is_refused_before_any_worker_starts(tmp_path, monkeypatch, command):
    monkeypatch.setattr("vla_rl.runtime.start.start", lambda *_, **__: pytest.fail("a worker started"))
    changes = {
        **by({"type": "remote", "url": "ws://h:1"}),
        "imitation": {"expert": {"episodes": 4}, "steps": 1, "lr": 1e-3},
    }
    if command != "sft":
        del changes["imitation"]
    file = tmp_path / "spec.yaml"
    file.write_text(json.dumps(spec(**changes)))
    options = [] if command == "check" else ["--folder", str(tmp_path / "run")]
    done = CliRunner().invoke(app, [command, str(file), *options])
    assert done.exit_code == 2 and not (tmp_path / "run").exists()
    assert (
        done.output.count("rollout.engine: 'remote' acts with its own policy, so nothing can train it; evaluate it")
        == 1
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout": {"chunk": 4, "episodes": 8, "group_size": 4, "lag": 1}},
        {"train": {"steps": 1, "lr": 1e-1, "micro_batch": 32, "precision": "bf16"}},
    ],
    ids=["old weights", "precision"],
)
def test_settings_of_training_do_not_reach_it(run, policy, changes):
    trained = run / "checkpoints" / "last" / "trainer"
    here = episodes(spec(model={"type": "linear"}, **({} if "train" in changes else changes)), trained)
    with served(policy) as server:
        are_equal(here, episodes(spec(**by({"type": "remote", "url": url_of(server)}, **changes))), 16)


def test_a_checkpoint_is_not_loaded_into_it(run):
    done = CliRunner().invoke(app, ["eval", str(run), "rollout.engine={type: remote, url: 'ws://h:1'}"])
    assert done.exit_code == 2 and "'remote' has its own policy and takes no weights of a checkpoint" in done.output


def test_it_is_served_in_turn(run, policy):
    obs = observation(policy.info)
    with served(policy) as server:
        wanted = choose(remote(url_of(server), policy.info), obs)
        relay = vla_rl.open_policy(run, overrides=[f"rollout.engine={{type: remote, url: {url_of(server)!r}}}"])
        assert relay.step is None and relay.about()["real_time_chunking"] is False
        with served(relay) as second:
            assert np.array_equal(choose(remote(url_of(second), policy.info), obs), wanted)


def test_its_plans_have_no_learners():
    cluster = Cluster(cpus=8, gpus=4, memory=2**36)
    given = spec(**by({"type": "remote", "url": "ws://h:1"}), runtime={"backend": "ray"})
    apart = {"type": "disaggregated", "learner": [3], "policy": [2], "sim": [0, 1]}
    plan = plan_for(parse_spec({**given, "placement": apart}), cluster)
    assert plan.hosting("policy") and not plan.hosting("learner") and len(plan.slots) == 3
    assert all(a.rank < 0 and a.world == 0 for a in assign_workers(plan, 8, one_process=False))
    with pytest.raises(DoesNotFit, match="'auto' measures training, and engine 'remote' has its own policy"):
        plan_for(parse_spec({**given, "placement": {"type": "auto"}}), cluster)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({}, "url: required"),
        ({"url": "http://h:1"}, "'http://h:1' is not of the form ws://HOST:PORT"),
        ({"url": "ws://h:99999"}, "'ws://h:99999' is not .*: a port is a whole number within 1 and 65535"),
        ({"url": "ws://h:x"}, "a port is a whole number"),
        ({"url": "ws://h:0"}, "names no port; one is within 1 and 65535"),
        ({"url": "ws://h:"}, "names no port"),
        ({"url": "ws://"}, "names no host"),
        ({"url": "ws://:8000"}, "names no host"),
        ({"url": "h:8000"}, "not of the form ws://HOST:PORT"),
        ({"url": "ws://::1:8000"}, r"in brackets: ws://\[::1\]:8000"),
        ({"url": "ws://[::1:8000"}, r"in brackets: ws://\[::1\]:8000"),
        ({"url": "ws://[zz]:8000"}, "'zz' does not appear to be an IPv4 or IPv6 address"),
        ({"url": "ws://h h:1"}, "it has a space"),
        ({"url": "ws://h:1\n"}, "a sign that cannot be seen"),
        ({"url": "ws://a..b:1"}, "'a..b' is not a host name"),
        ({"url": f"ws://{'a' * 64}:1"}, "is not a host name"),
        ({"url": "ws://me@h:1"}, "a user without a password"),
        ({"url": "ws://h:1#x"}, "it has a part after #"),
        ({"url": "ws://h:1", "keys": "libro"}, "'libro' is neither a file nor one .* did you mean 'libero'"),
    ],
)
def test_wrong_settings(model, message):
    with pytest.raises(SpecError, match=message):
        check_spec(parse_spec(spec(**by({"type": "remote", **model}))), training=False)


@pytest.mark.parametrize(
    ("change", "chunk", "message"),
    [
        ({"state_dim": 5}, 4, "trained on a 4-dimensional state, the simulator's has 5"),
        ({"action_low": (0.0,) * 7, "action_high": (1.0,) * 7}, 4, "trained for 3-dimensional actions"),
        ({"cameras": {"overhead": (16, 16)}}, 4, r"with camera 'wrist' of \[16, 16\]; the simulator has: overhead"),
        ({"cameras": {"overhead": (16, 16), "wrist": (8, 8)}}, 4, r"with camera 'wrist' of \[16, 16\]"),
        ({}, 5, "chunks of 4 actions, the spec asks for 5"),
    ],
)
def test_a_policy_of_another_robot_is_refused(policy, change, chunk, message):
    with served(policy) as server, pytest.raises(UserError, match=message):
        remote(url_of(server), attrs.evolve(policy.info, **change), chunk)


def test_the_key_is_given(policy, tmp_path):
    (tmp_path / "key").write_text("secret\n")
    with served(policy, api_key="secret") as server:
        with pytest.raises(UserError, match=r"wants another key: set rollout.engine.api_key_file"):
            remote(url_of(server), policy.info)
        model = remote(url_of(server), policy.info, api_key_file=str(tmp_path / "key"))
        assert choose(model, observation(policy.info)).shape == (5, 4, 3)


def test_no_server_answers(policy):
    with pytest.raises(UserError, match=r"ws://127.0.0.1:9 did not answer within 0.5 s: .*is it served there"):
        remote("ws://127.0.0.1:9", policy.info, timeout_s=0.5)


@pytest.mark.parametrize("url", ["ws://[::1]:8000", "wss://policy.example.org", "WS://h:1/path?a=b", "ws://a:b@h:1"])
def test_right_addresses(url):
    assert parse_spec(spec(**by({"type": "remote", "url": url}))).rollout.engine.config.url == url


@pytest.fixture
def proxies(monkeypatch):
    """Sets a variable of the environment that names a proxy; there are no others."""
    for name in ("ws", "wss", "http", "https", "all", "socks", "no"):
        monkeypatch.delenv(f"{name}_proxy", raising=False)
        monkeypatch.delenv(f"{name}_proxy".upper(), raising=False)
    return monkeypatch.setenv


def test_the_own_machine_is_reached_without_a_proxy(policy, proxies):
    """Whatever the environment says."""
    for name in ("ws_proxy", "http_proxy", "https_proxy", "all_proxy", "socks_proxy", "HTTP_PROXY"):
        proxies(name, "http://127.0.0.1:9")
    obs = observation(policy.info)
    with served(policy) as server:
        model = remote(url_of(server), policy.info)
        assert choose(model, obs).shape == (5, 4, 3)
    for host in ("localhost", "127.0.0.7", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0", "policy.localhost", "127.1"):
        assert proxy_for(f"ws://{host}:8000") is None and proxy_for(f"wss://{host}") is None
    assert str(proxy_for("ws://192.0.2.7:8000")) == "http://127.0.0.1:9 (ws_proxy)"
    assert str(proxy_for("wss://192.0.2.7:8000")) == "socks5h://127.0.0.1:9 (socks_proxy)"
    proxies("no_proxy", "robot.lan,192.0.2.7")
    assert proxy_for("ws://192.0.2.7:8000") is None and proxy_for("ws://robot.lan") is None


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("http_proxy", "http://127.0.0.1:9", r"proxy http://127.0.0.1:9 \(http_proxy\): .*refused; .*no_proxy"),
        ("WS_PROXY", "http://me:secret@127.0.0.1:9", r"proxy http://127.0.0.1:9 \(WS_PROXY\): .*refused"),
        ("https_proxy", "gopher://me:secret@h", r"gopher://h \(https_proxy\): that is not the address of .*: scheme"),
        ("http_proxy", "http://me:secret@h:99999", r"http://h:99999 \(http_proxy\): that is not an address"),
        ("http_proxy", "127.0.0.1:9", r"127.0.0.1:9 \(http_proxy\): that is not the address of a proxy"),
        ("http_proxy", 407, r"\(http_proxy\): proxy rejected connection: HTTP 407"),
        ("http_proxy", 503, r"did not answer within 0.7 s: .* \(http_proxy\): proxy rejected connection: HTTP 503"),
    ],
)
def test_a_proxy_that_is_in_the_way_is_named(policy, proxies, variable, value, message):
    """At once, without its password, unless it says that the server is not there yet."""
    with ExitStack() as stack:
        if isinstance(value, int):
            value = stack.enter_context(rejecting(value))
        proxies(variable, value)
        with pytest.raises(UserError, match=message) as refused:
            remote("ws://192.0.2.7:8000", policy.info, timeout_s=0.7 if "503" in message else 1000.0)
    assert "secret" not in str(refused.value)


@contextmanager
def rejecting(status):
    """A proxy that answers so."""
    with socket.create_server(("127.0.0.1", 0)) as door:

        def answer():
            with suppress(OSError):
                while True:
                    line, _ = door.accept()
                    with line:
                        line.recv(65536)
                        line.sendall(f"HTTP/1.1 {status} No\r\nContent-Length: 0\r\n\r\n".encode())

        threading.Thread(target=answer, daemon=True).start()
        yield f"http://127.0.0.1:{door.getsockname()[1]}"
        door.shutdown(socket.SHUT_RDWR)


def test_what_waiting_does_not_mend_is_said_at_once(policy, proxies, monkeypatch):
    monkeypatch.setattr("vla_rl.plugins.engines.remote.engine.NAME_S", 0.0)
    with pytest.raises(UserError, match="no-such-host.invalid:1 cannot be reached: its host name is not known"):
        remote("ws://no-such-host.invalid:1", policy.info, timeout_s=1000.0)
    with (
        served(policy) as server,
        pytest.raises(UserError, match="HTTP 403: this server does not answer to the host 127"),
    ):
        remote(f"ws://127.1:{server.settings.port}", policy.info, timeout_s=1000.0)


@pytest.mark.parametrize(
    ("greeting", "reply", "message"),
    [
        ({}, None, "does not say which keys it wants: set rollout.engine.keys"),
        ({"keys": 3}, None, "does not say which keys"),
        ({"keys": {"images": 3}}, None, "does not say which keys"),
        ({"keys": {"images": [1, 2]}}, None, "does not say which keys"),
        ({"cameras": ["top"], "action_chunk": "x", "state_dim": None}, None, "does not say which keys"),
        ("hello", None, "does not speak openpi's protocol: it said hello"),
        (b"\xc1", None, "does not speak openpi's protocol: the frame cannot be read"),
        (None, "Traceback: no", "refused a request: Traceback: no"),
        (None, {"action": 1}, r"gave actions of object \[\]"),
        (
            None,
            {"actions": np.zeros((4, 7))},
            r"gave actions of float64 \[4, 7\], where the simulator takes \[chunk, 3\]",
        ),
        (None, {"actions": np.zeros((3, 3))}, "trained for chunks of 3 actions, the spec asks for 4"),
        (None, {"actions": np.full((4, 3), np.inf)}, "not finite"),
        (None, {"actions": np.full((4, 3), 99)}, None),
    ],
)
def test_servers_of_others(policy, greeting, reply, message):
    """Incompatible servers are recognised, and numbers outside of the bounds are clipped."""
    info = policy.info
    keys = {"images": {c: c for c in info.cameras}, "state": ["state"]}

    def answer(connection):
        said = {"keys": keys} if greeting is None else greeting
        connection.send(said if isinstance(said, str | bytes) else pack_frame(said))
        for _ in connection:
            connection.send(reply if isinstance(reply, str) else pack_frame(reply))

    with listen(answer, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        if message is None:
            assert np.array_equal(
                choose(remote(url, info), observation(info)), np.broadcast_to(info.action_high, (5, 4, 3))
            )
        else:
            with pytest.raises((PluginError, UserError), match=message):
                choose(remote(url, info), observation(info))
        server.shutdown()


def test_who_waits_says_for_whom(policy, monkeypatch):
    """For a server that is not there yet, and for one that has gone."""
    said = []
    monkeypatch.setattr(waiting, "PATIENCE_S", 0.1)
    with waiting.listen_to_work(lambda: said.extend(work.title for work in waiting.list_running_work())):
        with pytest.raises(UserError, match="did not answer"):
            remote("ws://127.0.0.1:9", policy.info, timeout_s=0.5)
        with served(policy) as server:
            url = url_of(server)
            model = remote(url, policy.info, timeout_s=0.5)
        with pytest.raises(UserError, match="did not answer"):
            choose(model, observation(policy.info))
    assert set(said) == {"waiting for the policy: ws://127.0.0.1:9", f"waiting for the policy: {url}"}


def test_a_server_that_hangs_is_given_up(policy, monkeypatch):
    go = threading.Event()
    with served(policy) as server:
        model = remote(url_of(server), policy.info, timeout_s=0.5)
        monkeypatch.setattr(Policy, "act_on", lambda *_: go.wait(WAIT))
        with pytest.raises(UserError, match=r"did not answer within 0.5 s"):
            choose(model, observation(policy.info))
        go.set()


def test_a_server_that_is_killed_and_comes_back(run, policy, fork_server):
    """The command line's; what was not answered is asked again. SIGTERM ends it, and it says what it did."""
    obs = observation(policy.info)
    with served(policy) as server:
        wanted = choose(remote(url_of(server), policy.info), obs)
        port = server.settings.port
    command = ("-m", "vla_rl.cli.main", "serve", run, "--port", str(port), "--device", "cpu")
    start = functools.partial(fork_server.start_python, *command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    first = start()
    try:
        model = remote(f"ws://127.0.0.1:{port}", policy.info)
        assert np.array_equal(choose(model, obs), wanted)
        first.kill()
        first.wait(WAIT)
        second = start()
        try:
            assert np.array_equal(choose(model, obs), wanted)
            second.send_signal(signal.SIGTERM)
            said, errors = second.communicate(timeout=WAIT)
        finally:
            second.kill()
    finally:
        first.kill()
    assert second.returncode == 0, errors
    assert f"linear of step 1 on cpu: ws://127.0.0.1:{port} (openpi)" in said
    assert "answered 5 requests, refused 0; 0 of 5 chunks" in said


def test_vla_rl_eval_of_a_url(run, policy, tmp_path):
    runner = CliRunner()
    with served(policy) as server:
        results = []
        for number, what in enumerate(([str(run)], [str(run), "--policy", url_of(server)])):
            file = tmp_path / f"{number}.json"
            done = runner.invoke(app, ["eval", *what, "--output", str(file)])
            assert done.exit_code == 0, done.output
            found = json.loads(file.read_text())
            results.append(({**found, "step": None, "seconds": None}, done.output))
        assert results[0] == results[1]
        checkpoint = run / "checkpoints" / "step_000001"
        done = runner.invoke(app, ["eval", str(checkpoint), "--policy", url_of(server), "env.image_size=32"])
        assert done.exit_code == 2 and "with camera 'overhead' of [16, 16]" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dialect", "openpy"], "there is no 'openpy'; did you mean 'openpi'?"),
        (["--keys", "nowhere.yaml"], "'nowhere.yaml' is neither a file nor one of the key maps libero, droid, aloha"),
        (["--api-key-file", "nowhere"], "the key in nowhere cannot be read"),
        (["--port", "0", "--device", "cuda:99"], "there is no device 'cuda:99'; torch sees: cpu"),
        (["--host", "a..b"], "cannot listen on 'a..b'"),
        (["--allow-origin", "*"], "--allow-origin: '*' is not an origin"),
        (["--allow-host", "http://robot"], "--allow-host: 'http://robot' is not a host name"),
        (["--host", "192.0.2.1"], "cannot listen on 192.0.2.1:8000: Cannot assign requested address; --host is"),
    ],
)
def test_vla_rl_serve_says_what_is_wrong(run, arguments, message):
    """Before a model is loaded."""
    done = CliRunner().invoke(app, ["serve", str(run), *arguments])
    assert done.exit_code == 2 and message in done.output

"""The channel between a policy's worker and its simulators': order, failures, ends."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from vla_rl.runtime.comm import peers, rpc_server
from vla_rl.runtime.comm.channel import Channel
from vla_rl.runtime.comm.peers import RayPeers, RpcClient
from vla_rl.runtime.comm.rpc_server import RpcServer
from vla_rl.runtime.comm.shared_memory import host_key


class SimFault(RuntimeError):
    pass


POLICY, OTHER = 7, 8


@pytest.fixture
def listener(tmp_path):
    """(listening socket, its address)."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(tmp_path / "listener"))
        listening.listen()
        yield listening, str(tmp_path / "listener")


@pytest.fixture
def ends(listener):
    """(simulators, {policy worker: its channel to them})."""
    server, channels = RpcServer(), {}
    for policy in (POLICY, OTHER):
        assert server.connect_policy(policy, host_key(), listener[1])
        channels[policy] = Channel(listener[0].accept()[0])
    yield server, channels
    for channel in [*channels.values(), *server.channels.values()]:
        channel.close()


@pytest.fixture
def served(ends):
    """-> begin(call, policy): a client; a thread stands for the process of the simulators, which does one thing at a
    time."""
    server, channels = ends
    with ThreadPoolExecutor(1) as pool:

        def begin(call, policy=POLICY):
            serving = pool.submit(server.answer_calls, policy, call)
            return RpcClient(channels[policy], lambda wait: serving.result(20) if wait or serving.done() else None)

        yield begin
        for channel in channels.values():
            channel.close()


def waited(ticket):
    while not ticket.done:
        ticket.client.receive()
    return ticket.value


def double(role, method, number):
    if method == "break":
        fault = SimFault(f"env {number}")
        fault.add_note("in plugin x")
        raise fault
    return number * 2


def test_answers_come_in_the_order_of_calls(served):
    client = served(double)
    tickets = [client.call("sim", "step", i) for i in range(5)]
    assert waited(tickets[4]) == 8
    assert [ticket.value for ticket in tickets] == [0, 2, 4, 6, 8]
    client.end_rollout()


def test_lanes_that_work_at_the_same_time_answer_in_any_order(listener):
    """A call that waits for the next one, and one that has no waiting caller when the policy takes its leave."""
    server, begun, leaving = RpcServer(threads=3), threading.Event(), threading.Event()
    assert server.connect_policy(POLICY, host_key(), listener[1])
    channel = Channel(listener[0].accept()[0])

    def call(role, method, number):
        if method == "wait":
            assert begun.wait(20)
        if method == "linger":
            assert leaving.wait(20)
        if method == "go":
            begun.set()
        return double(role, method, number)

    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(server.answer_calls, POLICY, call)
        client = RpcClient(channel, lambda wait: serving.result(20) if wait or serving.done() else None)
        first, second = client.call("sim", "wait", 1), client.call("sim", "go", 2)
        client.receive()
        assert second.done and second.value == 4 and not first.done
        assert waited(first) == 2
        client.call("sim", "linger", 3)
        threading.Timer(0.05, leaving.set).start()
        client.end_rollout()
        serving.result(20)
        again = pool.submit(server.answer_calls, POLICY, call)
        client = RpcClient(channel, lambda wait: again.result(20) if wait or again.done() else None)
        assert waited(client.call("sim", "go", 4)) == 8, "not the answer of before"
        with pytest.raises(SimFault, match="env 5"):
            waited(client.call("sim", "break", 5))
        channel.close()
        again.result(20)


def test_a_thread_that_breaks_leaves_no_caller_waiting(listener, monkeypatch):
    def broken(request, call):
        raise MemoryError("no room for the answer")

    monkeypatch.setattr(rpc_server, "_answer_to", broken)
    server = RpcServer(threads=2)
    assert server.connect_policy(POLICY, host_key(), listener[1])
    channel = Channel(listener[0].accept()[0])
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(server.answer_calls, POLICY, double)
        client = RpcClient(channel, lambda wait: serving.result(20) if wait or serving.done() else None)
        with pytest.raises(MemoryError, match="no room"):
            waited(client.call("sim", "step", 1))
    channel.close()


def test_messages_of_any_size_arrive_whole(served):
    client = served(lambda role, method, size: bytes(size))
    for size in (0, 1, 10**7):
        assert waited(client.call("sim", "step", size)) == bytes(size)
    client.end_rollout()


def test_what_a_call_raises_is_raised_where_it_was_asked_for(served):
    client = served(double)
    good, bad = client.call("sim", "step", 1), client.call("sim", "break", 1)
    assert waited(good) == 2
    with pytest.raises(SimFault, match="env 1") as caught:
        waited(bad)
    assert caught.value.__notes__ == ["in plugin x"] and "in double" in str(caught.value.__cause__)


def test_what_cannot_be_pickled_is_described_in_words(served):
    class Local(Exception):
        pass

    def fail(role, method, number):
        raise Local("env 3")

    client = served(fail)
    with pytest.raises(RuntimeError, match="Local: env 3"):
        waited(client.call("sim", "step", 1))


def test_two_that_send_more_than_fits_do_not_wait_for_each_other(served):
    client = served(lambda role, method, data: data)
    data = bytes(200_000)
    tickets = [client.call("sim", "step", data) for _ in range(12)]
    assert all(waited(ticket) == data for ticket in tickets)
    client.end_rollout()


def test_answers_that_no_caller_waits_for_are_dropped(served):
    client = served(double)
    for i in range(3):
        client.call("sim", "step", i)
    client.end_rollout()
    again = served(double)
    assert waited(again.call("sim", "step", 5)) == 10
    again.end_rollout()


def test_simulators_answer_several_policies_at_a_time(served):
    first, second = served(double), served(double, OTHER)
    assert waited(second.call("sim", "step", 3)) == 6, "while the first one's rollout continues"
    assert waited(first.call("sim", "step", 4)) == 8
    first.end_rollout()
    assert waited(second.call("sim", "step", 5)) == 10
    second.end_rollout()


def test_each_policy_hears_of_its_own_failures(served):
    first, second = served(double), served(double, OTHER)
    bad = second.call("sim", "break", 2)
    with pytest.raises(SimFault, match="env 2"):
        waited(bad)
    assert waited(first.call("sim", "step", 4)) == 8
    first.end_rollout()


def test_a_policy_that_is_gone_stops_no_other(served, ends):
    ends[1][OTHER].close()
    client = served(double)
    assert waited(client.call("sim", "step", 4)) == 8
    client.end_rollout()
    again = served(double)
    assert waited(again.call("sim", "step", 5)) == 10
    again.end_rollout()


def test_a_worker_that_is_gone_is_reported_by_whoever_knows(ends):
    def died(wait):
        raise SimFault("the actor died")

    server, channels = ends
    client = RpcClient(channels[POLICY], died)
    ticket = client.call("sim", "step", 1)
    server.channels[POLICY].close()
    with pytest.raises(SimFault, match="the actor died"):
        waited(ticket)


def test_no_policy_waits_for_a_worker_that_serves_no_more(ends, monkeypatch):
    """The worker's socket may live on in a process that it forked."""
    monkeypatch.setattr(peers, "LOOK_S", 0.01)
    looks = []

    def check(wait):
        looks.append(wait)
        if len(looks) == 3:
            raise SimFault("serves no more")

    client = RpcClient(ends[1][POLICY], check)
    with pytest.raises(SimFault, match="serves no more"):
        waited(client.call("sim", "step", 1))


def test_a_server_that_breaks_leaves_no_caller_waiting(served, ends, monkeypatch):
    def broken(request, call):
        raise MemoryError("no room for the answer")

    monkeypatch.setattr(rpc_server, "_answer_to", broken)
    client = served(double)
    with pytest.raises(MemoryError, match="no room"):
        waited(client.call("sim", "step", 1))


def test_only_workers_of_one_machine_have_a_line():
    server = RpcServer()
    assert not server.connect_policy(POLICY, None, "nowhere")
    assert not server.connect_policy(POLICY, ("another machine", 1), "nowhere")
    assert not server.channels


def test_the_first_answer_is_there_from_whichever_line_it_comes(served):
    slow, _other = socket.socketpair()
    silent = RpcClient(Channel(slow), lambda wait: None)
    quick = served(double)
    peers = RayPeers.__new__(RayPeers)
    peers.ray = SimpleNamespace(wait=lambda calls, num_returns, timeout: ([], calls))
    first, second = silent.call("sim", "step", 1), quick.call("sim", "step", 2)
    assert peers.wait_for_any([first, second], None) == [second]
    third = quick.call("sim", "step", 3)
    assert waited(quick.call("sim", "step", 4)) == 8 and peers.wait_for_any([first, third], 0.0) == [third]
    assert peers.wait_for_any([first], 0.01) == [] and peers.wait_for_any([first, "a call of Ray"], 0.01) == []
    assert peers.wait_for_any(["a call of Ray", second], 0.01) == [second]
    quick.end_rollout()

"""The line between a policy's worker and its simulators': order, failures, ends."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from vla_rl.core.runtime.peers import Answering, Caller, Line, RayPeers
from vla_rl.core.runtime.wire import here


class SimFault(RuntimeError):
    pass


POLICY, OTHER = 7, 8


@pytest.fixture
def door(tmp_path):
    """(listening socket, its address)."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(tmp_path / "door"))
        listening.listen()
        yield listening, str(tmp_path / "door")


@pytest.fixture
def ends(door):
    """(simulators, {policy worker: its line to them})."""
    answering, lines = Answering(), {}
    for policy in (POLICY, OTHER):
        assert answering.connect(policy, here(), door[1])
        lines[policy] = Line(door[0].accept()[0])
    yield answering, lines
    for line in [*lines.values(), *(o.line for o in answering.lines.values())]:
        line.close()


@pytest.fixture
def served(ends):
    """-> begin(call, policy): a caller; a thread stands for the process of the simulators, which does one thing at a
    time."""
    answering, lines = ends
    with ThreadPoolExecutor(1) as pool:

        def begin(call, policy=POLICY):
            serving = pool.submit(answering.serve, policy, call)
            return Caller(lines[policy], serving, lambda future: future.result(timeout=20))

        yield begin


def waited(ticket):
    while not ticket.done:
        ticket.caller.receive()
    return ticket.value


def double(role, method, number):
    if method == "break":
        raise SimFault(f"row {number}")
    return number * 2


def test_answers_come_in_the_order_of_calls(served):
    caller = served(double)
    tickets = [caller.call("sim", "step", i) for i in range(5)]
    assert waited(tickets[4]) == 8
    assert [ticket.value for ticket in tickets] == [0, 2, 4, 6, 8]
    caller.end()


def test_messages_of_any_size_arrive_whole(served):
    caller = served(lambda role, method, size: bytes(size))
    for size in (0, 1, 10**7):
        assert waited(caller.call("sim", "step", size)) == bytes(size)
    caller.end()


def test_what_a_call_raises_is_raised_by_the_caller_and_the_line_lives_on(served):
    caller = served(double)
    good, bad, later = (caller.call("sim", method, 1) for method in ("step", "break", "step"))
    assert waited(good) == 2
    with pytest.raises(SimFault, match="row 1"):
        waited(bad)
    assert not later.done
    caller.end()  # again: nothing
    again = served(double)
    assert waited(again.call("sim", "step", 21)) == 42
    again.end()


def test_answers_that_nobody_waits_for_are_dropped(served):
    caller = served(double)
    for i in range(3):
        caller.call("sim", "step", i)
    caller.end()
    again = served(double)
    assert waited(again.call("sim", "step", 5)) == 10
    again.end()


def test_simulators_answer_several_policies_at_a_time(served):
    first, second = served(double), served(double, OTHER)
    assert waited(second.call("sim", "step", 3)) == 6, "while the first one's rollout goes on"
    assert waited(first.call("sim", "step", 4)) == 8
    first.end()
    assert waited(second.call("sim", "step", 5)) == 10
    second.end()


def test_each_policy_hears_of_its_own_failures(served):
    first, second = served(double), served(double, OTHER)
    bad = second.call("sim", "break", 2)
    first.end()
    with pytest.raises(SimFault, match="row 2"):
        waited(bad)


def test_a_policy_that_is_gone_stops_nobody(served, ends):
    ends[1][OTHER].close()
    caller = served(double)
    assert waited(caller.call("sim", "step", 4)) == 8
    caller.end()


def test_a_worker_that_is_gone_is_told_by_whoever_knows(ends):
    def died(serving):
        raise SimFault("the actor died")

    answering, lines = ends
    caller = Caller(lines[POLICY], "serving", died)
    ticket = caller.call("sim", "step", 1)
    answering.lines[POLICY].line.close()
    with pytest.raises(SimFault, match="the actor died"):
        waited(ticket)


def test_only_workers_of_one_machine_have_a_line():
    answering = Answering()
    assert not answering.connect(POLICY, None, "nowhere")
    assert not answering.connect(POLICY, ("another machine", 1), "nowhere")
    assert not answering.lines


def test_the_first_answer_is_there_from_whichever_line_it_comes(served):
    slow, _ = socket.socketpair()
    silent = Caller(Line(slow), None, lambda serving: None)
    quick = served(double)
    peers = RayPeers.__new__(RayPeers)
    peers.ray = SimpleNamespace(wait=lambda calls, num_returns, timeout: ([], calls))
    first, second = silent.call("sim", "step", 1), quick.call("sim", "step", 2)
    assert peers.ready([first, second], None) == [second]
    assert peers.ready([first], 0.01) == [] and peers.ready([first, "a call of Ray"], 0.01) == []
    assert peers.ready(["a call of Ray", second], 0.01) == [second]
    quick.end()

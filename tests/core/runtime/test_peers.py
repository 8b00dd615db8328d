"""The line between a policy's worker and its simulators': order, failures, ends."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from vla_rl.core.runtime.peers import Caller, Line, RayPeers, connect, serve
from vla_rl.core.runtime.wire import here


class SimFault(RuntimeError):
    pass


@pytest.fixture
def ends():
    """(line of the policy, line of the simulators)."""
    ours, theirs = socket.socketpair()
    yield Line(ours), Line(theirs)
    ours.close()
    theirs.close()


@pytest.fixture
def served(ends):
    """-> begin(call): a caller whose other end answers by `call`, in a thread that stands for the other process."""
    with ThreadPoolExecutor(1) as pool:

        def begin(call):
            return Caller(ends[0], pool.submit(serve, ends[1], call), lambda future: future.result(timeout=20))

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


def test_what_a_call_raises_is_raised_by_the_caller_and_the_line_lives_on(served, ends):
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


def test_a_worker_that_is_gone_is_told_by_whoever_knows(ends):
    def died(serving):
        raise SimFault("the actor died")

    caller = Caller(ends[0], "serving", died)
    ticket = caller.call("sim", "step", 1)
    ends[1].close()
    with pytest.raises(SimFault, match="the actor died"):
        waited(ticket)


def test_only_workers_of_one_machine_have_a_line(tmp_path):
    assert connect(None, str(tmp_path / "door")) is None
    assert connect(("another machine", 1), str(tmp_path / "door")) is None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.bind(str(tmp_path / "door"))
        door.listen()
        line = connect(here(), str(tmp_path / "door"))
        assert line is not None
        line.close()


def test_the_first_answer_is_there_from_whichever_line_it_comes(served, ends):
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

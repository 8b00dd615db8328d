"""Weights between processes, by each strategy that a CPU has: every bit arrives, and an end that dies is named."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from transfer_ends import CPU, layout_of, listening, pass_on, stored, two_ends, weights

from vla_rl.core.errors import PluginError, WorkerDied
from vla_rl.runtime.comm.backend import CallHung
from vla_rl.runtime.comm.process_group import open_store
from vla_rl.runtime.comm.weight_transfer.connect import open_receiver, open_sender
from vla_rl.runtime.comm.weight_transfer.link import TransferLink
from vla_rl.runtime.messages.weights import ALIGNMENT, WeightLayout, compute_checksum

STRATEGIES = ["nccl", "host"]
LONG = 60


def test_a_layout_cuts_weights_into_bounded_buckets():
    pairs = weights(1)
    layout = layout_of(pairs, 2**19)
    assert [tensor.name for tensor in layout.tensors] == [name for name, _ in pairs]
    assert all(tensor.start % ALIGNMENT == 0 for tensor in layout.tensors)
    ends = [0, *(bucket.end for bucket in layout.buckets)]
    assert [bucket.start for bucket in layout.buckets] == ends[:-1] and ends[-1] == layout.nbytes
    assert len(layout.buckets) > 4
    assert all(bucket.nbytes <= 2**19 + ALIGNMENT or len(bucket.tensors) == 1 for bucket in layout.buckets)
    assert layout.largest_bytes == 3 * 200_000 * 4
    sizes = sum(tensor.nbytes for _, tensor in pairs)
    assert sizes <= layout.nbytes < sizes + ALIGNMENT * len(pairs)


def test_a_layout_that_does_not_fit_names_the_parameter():
    layout = layout_of(weights(1))
    layout.check_layout(weights(2))
    with pytest.raises(PluginError, match=r"'scalar' does not fit: the learner sends \[\] torch.float32, .* nothing"):
        layout.check_layout(weights(1)[:-1])
    with pytest.raises(PluginError, match=r"'new' does not fit: the learner sends nothing, .* holds \[2\]"):
        layout.check_layout([*weights(1), ("new", torch.zeros(2))])
    wide = [(name, torch.cat([t, t])) if name == "large" else (name, t) for name, t in weights(1)]
    with pytest.raises(PluginError, match=r"'large' .* sends \[3, 200000\] torch.float32, .* holds \[6, 200000\]"):
        layout.check_layout(wide)


def test_weights_that_change_their_shape_are_refused():
    layout = layout_of(weights(1))
    sender = open_sender(stored(layout), CPU, None)
    changed = weights(1)
    changed[3] = (changed[3][0], changed[3][1].float()[:4])
    with pytest.raises(PluginError, match=r"gives 'layer.3' \[4, 1\] .* at the start of the run it gave 'layer.3' \["):
        sender.send_version(changed, False)
    with pytest.raises(PluginError, match=r"gives nothing, and at the start of the run it gave 'scalar'"):
        sender.send_version(weights(1)[:-1], False)


def test_the_object_store_gets_one_array():
    """Ray passes it on to policies on other machines."""
    layout = layout_of(weights(1))
    transfer = stored(layout)
    pairs, checksums = pass_on(open_sender(transfer, CPU, None), open_receiver(transfer, 0, CPU), weights(5), True)
    arrived = dict(pairs)
    assert arrived.keys() == checksums.keys()
    for name, tensor in weights(5):
        assert torch.equal(arrived[name], tensor) and checksums[name] == compute_checksum(tensor)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_bit_arrives_in_the_same_parameters(strategy):
    """At two policies, and version after version."""
    with two_ends(strategy, versions=3, policies=2) as (reports, go, _):
        for version in (1, 2, 3):
            go.release()
            received = [reports.get(LONG) for _ in range(3)]
            assert sorted(report[0] for report in received) == ["received", "received", "sent"]
            assert all(report[1] == version for report in received)
            assert all(report[2] for report in received)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_killed_sender_is_named(strategy):
    """It dies in the midst of a version, after some of its buckets have arrived."""
    with two_ends(strategy, versions=2, sender=12) as (reports, go, (sending, *_)):
        go.release()
        assert {reports.get(LONG)[0] for _ in range(2)} == {"sent", "received"}
        go.release()
        what, pid, _ = reports.get(LONG)
        assert (what, pid) == ("stopped", sending.pid)
        os.kill(pid, signal.SIGKILL)
        what, error, text = reports.get(LONG)
        assert (what, error) == ("receiver failed", "WorkerDied")
        assert f"weight transfer ({strategy})" in text and "the connection to learner worker 9 broke" in text


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_sender_that_dies_before_a_version_is_named(strategy):
    """A policy waits for it, outside of its lock."""
    with two_ends(strategy, versions=2) as (reports, go, (sending, *_)):
        go.release()
        assert {reports.get(LONG)[0] for _ in range(2)} == {"sent", "received"}
        os.kill(sending.pid, signal.SIGKILL)
        what, error, text = reports.get(LONG)
        assert (what, error) == ("receiver failed", "WorkerDied") and "learner worker 9" in text


def test_a_killed_receiver_is_named_where_the_sender_waits_for_it():
    with two_ends("nccl", versions=1, receiver=3) as (reports, go, (_, receiving)):
        go.release()
        assert reports.get(LONG)[:2] == ("stopped", receiving.pid)
        os.kill(receiving.pid, signal.SIGKILL)
        what, error, text = reports.get(LONG)
        assert (what, error) == ("sender failed", "WorkerDied")
        assert "the connection to policy worker 0 broke, so its process has ended" in text


def test_a_killed_receiver_does_not_stop_a_sender_of_host_memory():
    with two_ends("host", versions=1, receiver=3) as (reports, go, (_, receiving)):
        go.release()
        assert {reports.get(LONG)[0] for _ in range(2)} == {"sent", "stopped"}
        os.kill(receiving.pid, signal.SIGKILL)
        receiving.join()
        assert receiving.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_stopped_end_is_named_after_the_deadline(strategy):
    """A process that is alive and does nothing."""
    with two_ends(strategy, versions=1, sender=12, deadline_s=1.0) as (reports, go, (sending, *_)):
        go.release()
        assert reports.get(LONG)[:2] == ("stopped", sending.pid)
        what, error, text = reports.get(LONG)
        assert (what, error) == ("receiver failed", "CallHung")
        assert "learner worker 9 did not answer within 1 s (runtime.deadline_s)" in text


def test_an_end_that_never_comes_is_named():
    listener, transfer = listening("nccl", WeightLayout.of_weights([("w", torch.zeros(3))], 64), 1, 0.5)
    with pytest.raises((CallHung, WorkerDied), match=r"weight transfer \(nccl\), connecting: policy worker 0|worker 0"):
        open_sender(transfer, CPU, listener)


def test_signals_of_old_versions_leave_the_store():
    listener, transfer = listening("host", WeightLayout.of_weights([("w", torch.zeros(3))], 64), 1, 10.0)
    link = TransferLink(transfer, 0, listener)
    other = open_store(transfer.address, 1, 2, None)
    for _ in range(3):
        link.begin_next_version()
        link.set_ready(0)
        link.set_ready(1)
    assert [other.check([f"{version}/{index}"]) for version in (1, 2, 3) for index in (0, 1)] == [False] * 4 + [
        True
    ] * 2

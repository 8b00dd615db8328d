"""Every error of Ray is decided: the worker has ended, cannot be reached, or neither."""

from __future__ import annotations

import pytest

from vla_rl.runtime.comm.backends.ray import explain_death, has_died, is_unreachable

exceptions = pytest.importorskip("ray").exceptions
DIED = {
    "RayActorError",
    "ActorDiedError",
    "ActorPlacementGroupRemoved",
    "ActorUnschedulableError",
    "LocalRayletDiedError",
    "NodeDiedError",
    "ObjectLostError",
    "ObjectFetchTimedOutError",
    "ObjectFreedError",
    "ObjectReconstructionFailedError",
    "OwnerDiedError",
    "ReferenceCountingAssertionError",
    "OutOfMemoryError",
    "WorkerCrashedError",
}
UNREACHABLE = {"ActorUnavailableError"}
NEITHER = {
    "RayError",
    "CrossLanguageError",
    "TaskCancelledError",
    "RayTaskError",
    "RaySystemError",
    "AuthenticationError",
    "UserCodeException",
    "ObjectStoreFullError",
    "OutOfDiskError",
    "RpcError",
    "GetTimeoutError",
    "PlasmaObjectNotAvailable",
    "AsyncioActorExit",
    "RuntimeEnvSetupError",
    "TaskPlacementGroupRemoved",
    "PendingCallsLimitExceeded",
    "TaskUnschedulableError",
    "ObjectRefStreamEndOfStreamError",
    "StreamingGeneratorReplayInconsistentError",
    "OufOfBandObjectRefSerializationException",
    "RayChannelError",
    "RayChannelTimeoutError",
    "RayCgraphCapacityExceeded",
    "RayDirectTransportError",
    "UnserializableException",
    "ActorAlreadyExistsError",
    "ActorHandleNotFoundError",
}
FOUND = {
    name: kind
    for name, kind in vars(exceptions).items()
    if isinstance(kind, type) and issubclass(kind, exceptions.RayError)
}


def test_every_error_is_decided():
    raised = {name: kind.__new__(kind) for name, kind in FOUND.items()}
    assert {name for name, error in raised.items() if has_died(error)} == DIED & set(FOUND)
    assert {name for name, error in raised.items() if is_unreachable(error)} == UNREACHABLE
    assert set(FOUND) <= DIED | UNREACHABLE | NEITHER, "a new error of Ray: say what it means for a worker"


def test_no_memory_is_said_in_one_line_with_what_to_lower():
    """The rest of Ray's text are 30 lines of statistics."""
    text = explain_death(exceptions.OutOfMemoryError("the node was 4.9GB used / 5GB limit\nOOM kill reason: ...\n"))
    assert text.startswith("the node was 4.9GB used / 5GB limit; ") and "\n" not in text
    assert "env.num_envs" in text
    assert explain_death(exceptions.WorkerCrashedError()) == str(exceptions.WorkerCrashedError())

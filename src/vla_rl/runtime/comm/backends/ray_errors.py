"""What an error of Ray says about the worker that was called."""

from __future__ import annotations


def is_unreachable(error: BaseException | None) -> bool:
    """Return whether a call was lost, and its worker may still be alive."""
    from ray import exceptions

    return isinstance(error, exceptions.ActorUnavailableError)


def has_died(error: BaseException | None) -> bool:
    """Return whether a worker has ended, or what it held is lost. All other errors say neither."""
    from ray import exceptions

    ends = (
        exceptions.ActorPlacementGroupRemoved,
        exceptions.ActorUnschedulableError,
        exceptions.LocalRayletDiedError,
        exceptions.NodeDiedError,
        exceptions.ObjectLostError,
        exceptions.OutOfMemoryError,  # Ray's memory monitor ended it
        exceptions.RayActorError,
        exceptions.WorkerCrashedError,
    )
    return isinstance(error, ends) and not is_unreachable(error)


def explain_death(error: BaseException) -> str:
    """Return why a worker ended; where memory ran out, one line with used, limit and what to lower."""
    from ray import exceptions

    if not isinstance(error, exceptions.OutOfMemoryError):
        return str(error)
    return (
        f"{str(error).splitlines()[0]}; end other programs on that node, or lower env.num_envs, rollout.episodes or "
        f"train.micro_batch"
    )

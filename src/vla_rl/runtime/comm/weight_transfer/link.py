"""Signals between the ends of a weight transfer, through torch's store, and the errors of an end that is gone."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from time import monotonic
from typing import Any

from vla_rl.core.errors import WorkerDied, first_line
from vla_rl.runtime.comm.backend import CallHung
from vla_rl.runtime.comm.process_group import open_store
from vla_rl.runtime.messages.weights import WeightTransfer


class TransferLink:
    """Connection of one end to the store, which the learner's process holds."""

    def __init__(self, transfer: WeightTransfer, rank: int, listener: socket.socket | None) -> None:
        self.transfer = transfer
        self.rank = rank
        self.world = 1 + len(transfer.policies)
        self.count = 0
        """Versions that were begun, counted alike by all ends."""
        self._keys: list[str] = []
        """Keys of the version that this end has set, or waited for."""
        with self.translate_errors("connecting"):
            self.store: Any = open_store(
                transfer.address, rank, self.world, listener, timeout=timedelta(seconds=transfer.deadline_s)
            )

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self.transfer.deadline_s)

    @contextmanager
    def translate_errors(self, activity: str) -> Iterator[None]:
        """Context in which an error of torch is raised as WorkerDied, or CallHung after the deadline."""
        started = monotonic()
        try:
            yield
        except RuntimeError as exc:  # base class of what torch raises for stores, gloo and NCCL
            transfer = self.transfer
            policies = ", ".join(map(str, transfer.policies))
            other = f"learner worker {transfer.learner}" if self.rank else f"policy worker {policies}"
            where = f"weight transfer ({transfer.strategy}), {activity}"
            reason = first_line(exc)
            if monotonic() - started >= 0.99 * transfer.deadline_s:
                raise CallHung(
                    f"{where}: {other} did not answer within {transfer.deadline_s:g} s (runtime.deadline_s): {reason}"
                ) from exc
            raise WorkerDied(f"{where}: the connection to {other} broke, so its process has ended: {reason}") from exc

    # ----------------------------------------------------------------------------------------------------- signals

    def begin_next_version(self) -> None:
        """Begin with the next version, and remove signals of an earlier one. All ends have finished the one before."""
        with self.translate_errors("sending weights"):
            for key in self._keys:
                self.store.delete_key(key)
        self._keys.clear()
        self.count += 1

    def set_ready(self, index: int) -> None:
        """Tell receivers that a bucket is there."""
        self._set_key(f"{self.count}/{index}")

    def wait_ready(self, index: int) -> None:
        self._wait_for_keys([f"{self.count}/{index}"], "receiving weights")

    def set_taken(self, index: int) -> None:
        """Tell the sender that this receiver no longer needs a bucket's memory."""
        self._set_key(f"{self.count}/{index}/{self.rank}")

    def wait_taken(self, index: int) -> None:
        """Wait until no receiver needs a bucket's memory."""
        keys = [f"{self.count}/{index}/{rank}" for rank in range(1, self.world)]
        self._wait_for_keys(keys, "waiting for policies")
        self._keys += keys

    def _set_key(self, key: str) -> None:
        with self.translate_errors("sending weights" if self.rank == 0 else "receiving weights"):
            self.store.set(key, "")
        if self.rank == 0:
            self._keys.append(key)

    def _wait_for_keys(self, keys: list[str], activity: str) -> None:
        with self.translate_errors(activity):
            self.store.wait(keys, self.timeout)

"""Requests of all clients, one batch after another through one thread, with the dynamic batching of rollouts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from time import perf_counter

import numpy as np
from attrs import define, field, frozen

from vla_rl.core.plan import Batching
from vla_rl.core.types import Array, Observation, UnexecutedActions
from vla_rl.serving.policy import Key, Policy

logger = logging.getLogger(__name__)


class ClientGone(Exception):
    """No client waits for the answer."""


@frozen
class Answer:
    actions: Array
    """float32 [C, A]"""
    clipped: bool
    seconds: float
    """Duration of the inference, which others may share."""


@frozen(eq=False)
class _PendingRequest:
    obs: Observation
    key: Key
    unexecuted: UnexecutedActions | None
    waits: Callable[[], bool]
    arrived: float
    answer: asyncio.Future[Answer]


@define(eq=False)
class Batcher:
    """Inference as soon as `max_batch` requests wait, one has waited `max_wait_s` seconds, or all clients wait."""

    policy: Policy
    batching: Batching
    clients: Callable[[], int]
    """Number of clients that may send requests."""
    _waiting: asyncio.Queue[_PendingRequest] = field(factory=asyncio.Queue, init=False)
    _thread: ThreadPoolExecutor = field(factory=lambda: ThreadPoolExecutor(1, "inference"), init=False)

    async def answer_request(
        self,
        obs: Observation,
        key: Key,
        unexecuted: UnexecutedActions | None,
        waits: Callable[[], bool] = lambda: True,
    ) -> Answer:
        """The answer for one row. Raises what the policy raised for it, and ClientGone.

        Args:
            waits: whether a client still waits for the answer; called before the inference.
        """
        loop = asyncio.get_running_loop()
        pending = _PendingRequest(obs, key, unexecuted, waits, loop.time(), loop.create_future())
        self._waiting.put_nowait(pending)
        return await pending.answer

    async def run_batches(self) -> None:
        """Answer until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            batch = await self._next_batch()
            awaited = [pending for pending in batch if pending.waits()]
            for pending in batch:
                if pending not in awaited:
                    pending.answer.set_exception(ClientGone())
            if not awaited:
                continue
            before = perf_counter()
            results = await loop.run_in_executor(self._thread, self._act_on_batch, awaited)
            seconds = perf_counter() - before
            for pending, result in zip(awaited, results, strict=True):
                if pending.answer.done():
                    continue
                if isinstance(result, Exception):
                    pending.answer.set_exception(result)
                else:
                    pending.answer.set_result(Answer(*result, seconds))

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _next_batch(self) -> list[_PendingRequest]:
        batch = [await self._waiting.get()]
        clock = asyncio.get_running_loop().time
        until = batch[0].arrived + (self.batching.max_wait_s or 0.0)
        while self.batching.max_batch is None or len(batch) < self.batching.max_batch:
            left = until - clock()
            if not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            elif left <= 0 or len(batch) >= self.clients():
                break
            else:
                with suppress(TimeoutError):
                    batch.append(await asyncio.wait_for(self._waiting.get(), left))
        return batch

    def _act_on_batch(self, batch: Sequence[_PendingRequest]) -> list[tuple[Array, bool] | Exception]:
        """Return each request's (actions, whether clipped) or exception: after a failure each is tried alone."""
        clipped = np.zeros(len(batch), bool)
        try:
            obs = Observation.concat([pending.obs for pending in batch])
            keys = [pending.key for pending in batch]
            previous = [pending.unexecuted for pending in batch]
            actions = self.policy.act_on(obs, keys, previous, clipped)
            return list(zip(actions, clipped.tolist(), strict=True))
        except Exception as exc:
            if len(batch) == 1:
                logger.debug("a request failed", exc_info=True)
                return [exc]
            return [result for pending in batch for result in self._act_on_batch([pending])]

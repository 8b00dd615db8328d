"""`vla-rl serve`: a policy in a thread of this process, which the command line waits for."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, NoReturn, Self

import attrs

from vla_rl.core.errors import UserError, did_you_mean
from vla_rl.core.installation import OWN_DIST
from vla_rl.core.interrupts import heard_signals
from vla_rl.core.requirements import install_command
from vla_rl.runtime.comm.status_line import showing_progress
from vla_rl.serving.access import Access, is_loopback, url_of
from vla_rl.serving.dialects import DIALECTS
from vla_rl.serving.policy import Policy, open_policy
from vla_rl.toolkit.models.acting.key_maps import read_key_map

if TYPE_CHECKING:
    from vla_rl.serving.server import PolicyServer, Settings


class Served:
    """A policy that is served by a thread of this process, until `close`, or the end of a `with` block."""

    def __init__(self, server: PolicyServer) -> None:
        self.server = server
        """Has counted: `answered`, `refused`."""
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failed: BaseException | None = None
        self._ended = Event()
        started = Event()
        self._thread = Thread(target=self._run_server, args=(started,), name="policy server", daemon=True)
        self._thread.start()
        started.wait()
        if self._failed is not None:
            raise self._failed
        self.url = url_of(server.settings.host, self.port)

    def wait(self) -> None:
        """Wait until the server ends. Raises what ended it."""
        self._ended.wait()  # Python 3.11 takes a thread for ended when Ctrl-C interrupts its `join`
        if self._failed is not None:
            raise self._failed

    def close(self) -> None:
        if self._loop is not None and self._stop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run_server(self, started: Event) -> None:
        def note_port(port: int) -> None:
            self.port = port
            started.set()

        async def serve_until_stopped() -> None:
            self._stop = asyncio.Event()
            self._loop = asyncio.get_running_loop()
            await self.server.serve_clients(self._stop, note_port)

        try:
            asyncio.run(serve_until_stopped())
        except BaseException as exc:
            self._failed = exc
        finally:
            self._ended.set()
            started.set()


def open_server(
    what: str | Path | Policy, settings: Settings, keys: str | None, resize: bool, **opening: Any
) -> Served:
    """Serve a policy, or that of a run or a checkpoint. Raises UserError, before the policy is opened, for an address
    that cannot be listened to.

    Args:
        keys: names in requests, of a preset or in a file; None: the dialect's.
        resize: scale images to the size of training.
        opening: arguments of `open_policy`.
    """
    from vla_rl.serving.server import PolicyServer, check_address

    named = None if keys is None else read_key_map(keys)
    Access.for_server(settings.host, settings.allow_hosts, settings.allow_origins)
    check_address(settings.host, settings.port)
    if not isinstance(what, Policy):
        with showing_progress():
            what = open_policy(what, **opening)
    if resize:
        named = attrs.evolve(named or DIALECTS[settings.dialect].default_keys(what.info), resize=True)
    return Served(PolicyServer(what, attrs.evolve(settings, keys=named)))


def serve_until_stopped(served: Served, given: Any) -> None:
    """Print where a policy is served, and serve it until a signal of `heard_signals`; then print what was done."""

    def raise_interrupt(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt

    logging.basicConfig(level=logging.DEBUG if given.debug else logging.INFO, format="%(asctime)s %(message)s")
    server, policy, stopping = served.server, served.server.policy, heard_signals()
    try:
        for number in stopping:
            signal.signal(number, raise_interrupt)
        if not is_loopback(given.host) and given.api_key_file is None:
            warning = f"warning: whoever reaches {served.url} can use this policy; see --api-key-file"
            print(warning, file=sys.stderr)
        name = policy.plugin if policy.step is None else f"{policy.plugin} of step {policy.step}"
        print(f"{name} on {policy.device}: {served.url} ({given.dialect})", flush=True)
        served.wait()
    except KeyboardInterrupt:
        for number in stopping:
            signal.signal(number, signal.SIG_IGN)  # what is recorded is written first
        served.close()
    policy.close()
    print(
        f"answered {server.answered} requests, refused {server.refused}; {policy.clipped} of {policy.acted} chunks "
        f"had numbers outside of the bounds and were clipped"
    )
    if server.recorder is not None:
        print(f"recorded {server.recorder.episodes} episodes in {given.record}")


def check_serving(dialect: str) -> None:
    """Raise UserError if packages are missing, or if the dialect is unknown."""
    if lacking := [name for name in ("websockets", "msgpack") if find_spec(name) is None]:
        raise UserError(f"serving needs {', '.join(lacking)}; try: {install_command(OWN_DIST, 'serve')}")
    if dialect not in DIALECTS:
        near = did_you_mean(dialect, DIALECTS)
        raise UserError(f"--dialect: there is no {dialect!r}{near}; there are: {', '.join(DIALECTS)}")

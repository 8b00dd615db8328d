"""`vla-rl serve`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import attrs
import typer

from vla_rl.core.errors import UserError, did_you_mean
from vla_rl.core.installation import OWN_DIST
from vla_rl.core.plan import Batching
from vla_rl.core.requirements import install_command


def main(
    what: Path,
    overrides: Sequence[str],
    *,
    host: str,
    port: int,
    dialect: str,
    keys: str | None,
    resize: bool,
    prompt: str | None,
    api_key_file: Path | None,
    greedy: bool,
    device: str | None,
    max_batch: int,
    max_wait_s: float,
    record: Path | None,
    allow_hosts: Sequence[str],
    allow_origins: Sequence[str],
    idle_s: float,
    debug: bool,
) -> int:
    """Serve until Ctrl-C or SIGTERM. Return the exit status."""
    check_serving(dialect)
    from vla_rl.runtime.comm.status_line import showing_progress
    from vla_rl.serving.access import Access, is_loopback, url_of
    from vla_rl.serving.dialects import DIALECTS
    from vla_rl.serving.policy import open_policy
    from vla_rl.serving.server import Settings, check_address, read_api_key, serve_policy
    from vla_rl.toolkit.models.key_maps import read_key_map

    logging.basicConfig(level=logging.DEBUG if debug else logging.INFO, format="%(asctime)s %(message)s")
    api_key = None if api_key_file is None else read_api_key(api_key_file)
    named = None if keys is None else read_key_map(keys)
    Access.for_server(host, allow_hosts, allow_origins)
    check_address(host, port)
    with showing_progress():
        policy = open_policy(what, device=device, greedy=greedy, overrides=overrides)
    if resize:
        named = attrs.evolve(named or DIALECTS[dialect].default_keys(policy.info), resize=True)
    settings = Settings(
        host=host,
        port=port,
        dialect=dialect,
        keys=named,
        prompt=prompt,
        api_key=api_key,
        batching=Batching(max_batch=max_batch, max_wait_s=max_wait_s),
        record=record,
        allow_hosts=allow_hosts,
        allow_origins=allow_origins,
        idle_s=idle_s,
    )

    def print_address(port: int) -> None:
        if not is_loopback(host) and api_key is None:
            typer.echo(
                f"warning: whoever reaches {url_of(host, port)} can use this policy; see --api-key-file", err=True
            )
        where = f"{url_of(host, port)} ({dialect})"
        name = policy.plugin if policy.step is None else f"{policy.plugin} of step {policy.step}"
        typer.echo(f"{name} on {policy.device}: {where}")

    server = serve_policy(policy, settings, print_address)
    policy.close()
    typer.echo(
        f"answered {server.answered} requests, refused {server.refused}; {policy.clipped} of {policy.acted} chunks "
        f"had numbers outside of the bounds and were clipped"
    )
    if server.recorder is not None:
        typer.echo(f"recorded {server.recorder.episodes} episodes in {record}")
    return 0


def check_serving(dialect: str) -> None:
    """Raise UserError if packages are missing, or if the dialect is unknown."""
    if lacking := [name for name in ("websockets", "msgpack") if find_spec(name) is None]:
        raise UserError(f"serving needs {', '.join(lacking)}; try: {install_command(OWN_DIST, 'serve')}")
    from vla_rl.serving.dialects import DIALECTS

    if dialect not in DIALECTS:
        near = did_you_mean(dialect, DIALECTS)
        raise UserError(f"--dialect: there is no {dialect!r}{near}; there are: {', '.join(DIALECTS)}")

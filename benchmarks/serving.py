"""What serving a policy costs in addition to its model, and what batching the requests of several clients brings.

    python benchmarks/serving.py [--requests 1000] [--seconds 10] [--json FILE]

Servers and clients are processes of one machine. Overhead: a client's round trip less the inference, for two images of
224 px and a double of one layer, in turns with a loop as openpi's own server has it (one event loop, which also
infers) with the same double. Batching: eight clients that ask again at once, inferred together and one at a time, of a
double that sleeps for 20 ms a batch and 1 ms a row, about as a GPU does, and of a tiny OpenVLA-OFT, which computes on
the CPU; of the latter also with 10 requests a second each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import msgpack
import numpy as np
from websockets.asyncio.server import serve
from websockets.sync.client import connect

from vla_rl.core.catalogue import build
from vla_rl.core.contexts import EngineContext, ModelContext
from vla_rl.core.plan import Batching
from vla_rl.core.spec.spec import parse_spec
from vla_rl.core.types import EnvInfo, TaskInfo
from vla_rl.serving.policy import Policy
from vla_rl.serving.server import PolicyServer, Settings
from vla_rl.toolkit.models.acting.openpi import pack_frame, unpack_frame

CLIENTS = 8
SLEEPS = {"type": "linear", "latency_s": 0.02, "latency_env_s": 0.001}
TINY = {"type": "openvla_oft", "preset": "tiny"}
WARM = 50
"""Requests before those that count."""


def policy(model: dict[str, Any], size: int) -> Policy:
    """With random weights, for two cameras of this many pixels."""
    info = EnvInfo(
        cameras={"front": (size, size), "wrist": (size, size)},
        state_dim=8,
        action_low=(-1.0,) * 7,
        action_high=(1.0,) * 7,
        tasks=(TaskInfo(name="push", instruction="push the plate", max_steps=100),),
    )
    spec = parse_spec(
        {
            "name": "serving",
            "plugins": ["vla_rl.testing.scripted"],
            "model": model,
            "env": {"type": "scripted", "num_envs": 2},
            "rollout": {"chunk": 8, "episodes": 2, "group_size": 2},
            "algorithm": {"type": "grpo"},
            "train": {"steps": 1, "lr": 1e-3, "micro_batch": 2},
        }
    )
    model = build("model", spec.model.type, spec.model.config, ModelContext(chunk=8, env=info), spec.plugins)
    context = EngineContext(chunk=8, env=info, make_model=lambda: model)
    engine = build("engine", spec.rollout.engine.type, spec.rollout.engine.config, context)
    return Policy(engine=engine, spec=spec, info=info, step=0, sha256="", device="cpu", greedy=True)


def request(size: int) -> dict[str, Any]:
    random = np.random.default_rng(0)
    return {
        "observation/front": random.integers(0, 256, (size, size, 3), dtype=np.uint8),
        "observation/wrist": random.integers(0, 256, (size, size, 3), dtype=np.uint8),
        "observation/state": random.normal(size=8),
        "prompt": "push the plate",
    }


def ours(model: dict[str, Any], size: int, max_batch: int, port: Any) -> None:
    """A server's process."""
    server = PolicyServer(
        policy(model, size), Settings(port=0, batching=Batching(max_batch=max_batch, max_wait_s=0.002))
    )
    asyncio.run(server.serve_clients(asyncio.Event(), port.put))


def plain(model: dict[str, Any], size: int, _: int, port: Any) -> None:
    """A server's process, which answers in its event loop and takes what it is sent as it is."""
    acts = policy(model, size)

    def array(data: dict[Any, Any]) -> Any:
        if b"__ndarray__" not in data:
            return data
        return np.ndarray(buffer=data[b"data"], dtype=np.dtype(data[b"dtype"]), shape=data[b"shape"])

    async def answer(connection: Any) -> None:
        await connection.send(pack_frame({}))
        async for frame in connection:
            seen, before = msgpack.unpackb(frame, object_hook=array), time.perf_counter()
            images = {camera: seen[f"observation/{camera}"] for camera in acts.info.cameras}
            actions = acts.act(images, seen["observation/state"], seen["prompt"])
            took = {"infer_ms": 1e3 * (time.perf_counter() - before)}
            await connection.send(pack_frame({"actions": actions, "policy_timing": took}))

    async def run() -> None:
        async with serve(answer, "127.0.0.1", 0, compression=None, max_size=None) as server:
            port.put(next(iter(server.sockets)).getsockname()[1])
            await asyncio.Event().wait()

    asyncio.run(run())


@contextmanager
def running(target: Callable[..., None], model: dict[str, Any], size: int, max_batch: int = 1) -> Iterator[str]:
    """The URL of a server in another process."""
    context = multiprocessing.get_context("spawn")
    port = context.Queue()
    process = context.Process(target=target, args=(model, size, max_batch, port), daemon=True)
    process.start()
    try:
        yield f"ws://127.0.0.1:{port.get(timeout=120)}"
    finally:
        process.kill()
        process.join()


class Client:
    def __init__(self, url: str) -> None:
        self.socket = connect(url, compression=None, max_size=None, proxy=None).__enter__()
        self.socket.recv()

    def infer(self, frame: bytes) -> tuple[float, float]:
        """Milliseconds of the round trip, and of the inference in it."""
        before = time.perf_counter()
        self.socket.send(frame)
        reply = self.socket.recv()
        took = 1e3 * (time.perf_counter() - before)
        assert isinstance(reply, bytes), reply
        return took, unpack_frame(reply)["policy_timing"]["infer_ms"]


def overheads(requests: int) -> list[list[float]]:
    """Milliseconds in addition to the inference, sorted: of our server, and of the plain loop."""
    frame, model = pack_frame(request(224)), {"type": "linear"}
    with running(ours, model, 224) as here, running(plain, model, 224) as there:
        clients, found = [Client(here), Client(there)], list[list[float]]()
        for _ in range(WARM + requests):
            found.append([took - inferred for took, inferred in (client.infer(frame) for client in clients)])
        return [sorted(of_one) for of_one in zip(*found[WARM:], strict=True)]


def throughput(model: dict[str, Any], max_batch: int, seconds: float, period: float = 0.0) -> tuple[float, list[float]]:
    """Answers a second that eight clients get, each of which asks as soon as it was answered, or once a period; and
    the round trips in milliseconds, sorted."""
    frame, trips, start = pack_frame(request(64)), list[float](), Barrier(CLIENTS + 1)
    with running(ours, model, 64, max_batch) as url:

        def ask(number: int) -> None:
            client = Client(url)
            for _ in range(5):
                client.infer(frame)
            start.wait()
            due = time.monotonic() + period * number / CLIENTS
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                time.sleep(max(0.0, due - time.monotonic()))
                due += period
                trips.append(client.infer(frame)[0])

        threads = [Thread(target=ask, args=(number,)) for number in range(CLIENTS)]
        for thread in threads:
            thread.start()
        start.wait()
        before = time.perf_counter()
        for thread in threads:
            thread.join()
        return len(trips) / (time.perf_counter() - before), sorted(trips)


def quantile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement of throughput")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    figures: dict[str, float] = {}
    for name, found in zip(("overhead", "plain_loop"), overheads(options.requests), strict=True):
        figures[f"{name}_ms_median"], figures[f"{name}_ms_p99"] = statistics.median(found), quantile(found, 0.99)
    for name, model in (("", SLEEPS), ("tiny_", TINY)):
        single, batched = (throughput(model, rows, options.seconds)[0] for rows in (1, CLIENTS))
        figures |= {
            f"{name}single_per_second": single,
            f"{name}batched_per_second": batched,
            f"{name}batched_over_single": batched / single,
        }
    paced, trips = throughput(TINY, CLIENTS, options.seconds, 0.1)
    figures |= {
        "paced_per_second": paced,
        "paced_ms_median": statistics.median(trips),
        "paced_ms_p99": quantile(trips, 0.99),
    }
    for name, value in figures.items():
        print(f"{name}: {value:.2f}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Cut the link between the machine that acts and the one that learns, and compare the run with one whose link held.

    python benchmarks/lost_link.py --seconds 60                     # a cut of a minute, with Ray's own patience
    python benchmarks/lost_link.py --seconds 60 --patience 600      # Ray waits for ten minutes

Two network namespaces are the two machines: driver, simulator and policy in one, the learner in the other, a Ray node
in each, and a virtual cable between them that is pulled in the update of the second step. Needs Linux, `ip`, `unshare`
and `nsenter`, and the right to make namespaces. The run is pinned (`max_lag: {pinned: ...}`), so that an episode that
is lost or repeated would change its figures.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from threading import Thread
from typing import Any

INSIDE = "VLA_RL_LOST_LINK"
HERE, THERE = "10.77.0.1", "10.77.0.2"
PORT = 6380


def spec_of(**changes: Any) -> dict[str, Any]:
    return {
        "name": "link",
        "seed": 3,
        "plugins": ["vla_rl.testing.scripted"],
        "model": {"type": "linear"},
        "env": {"type": "scripted", "num_envs": 4, "latency_s": 0.05},
        "rollout": {"chunk": 2, "episodes": 16, "group_size": 4},
        "algorithm": {"type": "gipo"},
        "train": {"steps": 6, "lr": 3e-2, "micro_batch": 8, "global_batch": 16, "epochs": 2},
        "eval": {"before": False},
        "hooks": [{"type": "jsonl"}],
        **changes,
    }


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss/total"] for line in lines if "loss/total" in line]


def shell(*command: str, **keys: Any) -> None:
    subprocess.run(command, check=True, **keys)


def two_machines() -> list[str]:
    """Make the other namespace and the cable. Return the prefix of commands there."""
    other = subprocess.Popen(["unshare", "-n", "sleep", "infinity"])
    time.sleep(0.5)
    there = ["nsenter", "-t", str(other.pid), "-n"]
    shell("ip", "link", "add", "here", "type", "veth", "peer", "name", "there", "netns", str(other.pid))
    for prefix, name, address in (([], "here", HERE), (there, "there", THERE)):
        shell(*prefix, "ip", "link", "set", "lo", "up")
        shell(*prefix, "ip", "addr", "add", f"{address}/24", "dev", name)
        shell(*prefix, "ip", "link", "set", name, "up")
    return there


def patient(seconds: int) -> dict[str, int]:
    """Return Ray's settings that let a node, and the connections to it, be silent for so long."""
    return {
        "health_check_failure_threshold": math.ceil(seconds / 3),  # one check in 3 s
        "grpc_keepalive_timeout_ms": 1000 * seconds,
        "grpc_client_keepalive_timeout_ms": 1000 * seconds,
    }


def start_ray(there: list[str], folder: str, patience: int | None) -> None:
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--num-cpus=1", "--object-store-memory=100000000"]
    quiet = {"stdout": subprocess.DEVNULL}
    head = [f"--node-ip-address={HERE}", "--node-name=robot", f"--port={PORT}", "--head", f"--temp-dir={folder}"]
    if patience is not None:
        head.append(f"--system-config={json.dumps(patient(patience))}")
    shell(*ray, *head, "--include-dashboard=false", **quiet)
    shell(*there, *ray, f"--node-ip-address={THERE}", "--node-name=gpu", f"--address={HERE}:{PORT}", **quiet)


def inside(seconds: float, patience: int | None, lag: int) -> None:
    from vla_rl.core.spec.spec import parse_spec
    from vla_rl.runtime.driver.training.learners import RunLearners
    from vla_rl.runtime.start import run

    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    there = two_machines()
    train = RunLearners.train
    seen: dict[str, float] = {}

    def cut(learners: RunLearners) -> None:
        before = len(learners.collector.trajectories)
        shell(*there, "ip", "link", "set", "there", "down")
        print("the link is cut", flush=True)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            now = len(learners.collector.trajectories) - before
            if now > seen.get("collected", 0):
                seen["collected"] = now
                seen["last after"] = seconds - (end - time.monotonic())
            time.sleep(0.05)
        shell(*there, "ip", "link", "set", "there", "up")
        seen["up"] = time.monotonic()
        print(f"the link is back; {seen.get('collected', 0):g} episodes were collected meanwhile", flush=True)

    def cutting(learners: RunLearners, prepared: Any, advantages: Any) -> dict[str, float]:
        if learners.fleet.version == 1 and "begun" not in seen:
            seen["begun"] = time.monotonic()
            thread = Thread(target=cut, args=(learners,))
            thread.start()
            time.sleep(0.2)
            metrics = train(learners, prepared, advantages)
            seen["updated after"] = time.monotonic() - seen["up"] if "up" in seen else -1.0
            thread.join()
            return metrics
        return train(learners, prepared, advantages)

    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        run(
            parse_spec(spec_of(runtime={"backend": "local"}, rollout={**spec_of()["rollout"], "lag": lag})),
            folder / "held",
        )
        start_ray(there, str(folder / "ray"), patience)
        RunLearners.train = cutting  # type: ignore[method-assign]
        spec = spec_of(
            runtime={"backend": "ray", "address": f"{HERE}:{PORT}"},
            placement={"type": "hybrid", "sim": "robot:cpu", "policy": "robot:0", "learner": "gpu:0"},
            asynchrony={"max_lag": {"pinned": lag}},
        )
        try:
            results = run(parse_spec(spec), folder / "cut")
            equal = losses(folder / "held") == losses(folder / "cut")
            print(
                f"cut for {seconds:g} s: {seen.get('collected', 0):g} episodes meanwhile, the last after "
                f"{seen.get('last after', 0):.1f} s; the update came {seen['updated after']:.1f} s after the link"
            )
            print(f"faults {results['faults']}, tickets {results['tickets']}; losses as with a link that held: {equal}")
        finally:
            shell(sys.executable, "-m", "ray.scripts.scripts", "stop", "--force", stdout=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the cut")
    parser.add_argument("--patience", type=int, help="seconds for which Ray waits for a silent node (default: Ray's)")
    parser.add_argument("--lag", type=int, default=3, help="asynchrony.max_lag")
    args = parser.parse_args()
    if os.environ.get(INSIDE) is None:
        namespaces = ["unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
        command = [*namespaces, sys.executable, *sys.argv]
        sys.exit(subprocess.run(command, env=os.environ | {INSIDE: "1"}, check=False).returncode)
    inside(args.seconds, args.patience, args.lag)


if __name__ == "__main__":
    main()

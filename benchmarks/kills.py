"""Kill a short training at random moments, resume it, and compare it with one that was not disturbed.

    python benchmarks/kills.py                                      # 20 moments of each signal on each backend
    python benchmarks/kills.py --moments 2 --backend ray --signal SIGKILL
    python benchmarks/kills.py --backend ray --signal SIGKILL WORKER --lag 2    # rollouts run ahead, weights are pinned
    python benchmarks/kills.py --replay --backend local --signal SIGKILL        # a replay buffer of 10,000 transitions

A run is killed up to ten times, resumed each time, and at last left to end. Then its metrics (without times) and its
weights must be those of the undisturbed run, bit by bit, and nothing may be left: no process, no file in the temporary
folder, no shared memory, nothing in the run's folder that the undisturbed one has not. SIGKILL goes to the driver;
SIGINT to its process group, as a terminal does it; SIGTERM in turn to the driver, to the group, and to every process
of the job, the driver being the last. WORKER is SIGKILL to one of the run's workers, whichever, once there is a
checkpoint; the run survives it, or continues from there, by itself. How every ticket ended has to be the same, too.
With `--replay` the trainer is off_policy: 25,600 transitions are collected, so that old files are deleted, and the
files that are left have to be those of the undisturbed run, of the same sizes. Exits with 1 where something is lost or
left.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
from attrs import Factory, define, field

SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}
WORKER = "WORKER"
AT_MOST = 10
"""Kills of one run."""
AT_THE_START = 0.25
"""Share of the kills that come before a run's first new training step."""
SPREAD = 1 / 3
"""Share of the undisturbed run's time after its first step within which the others come, so that a run is killed
several times."""
PATIENCE_S = 60.0
MARK = "VLA_RL_KILLS"
SPEC = """
name: kills
seed: 3
plugins: [vla_rl.testing.scripted]
model: {type: linear}
env: {type: scripted, num_envs: 8, latency_s: 0.02}
rollout: {chunk: 2, episodes: 16, group_size: 4}
algorithm: {type: grpo}
train: {steps: 40, lr: 3e-2, micro_batch: 8, global_batch: 16, epochs: 2, checkpoint_every: 3}
eval: {every: 10}
hooks: [{type: jsonl}]
runtime: {restarts: 1000}
"""
REPLAY = """
name: kills
seed: 3
plugins: [vla_rl.testing.scripted]
model:
  type: film_resnet
  network: {image_size: 32, channels: [8], keypoints: 2, words: 16, instruction: 4, hidden: [16],
            head: {type: gaussian}}
env: {type: scripted, num_envs: 64, length: 40, max_steps: 80, image: 64}
rollout: {chunk: 2, episodes: 64}
trainer: {type: off_policy, capacity: 10000, min_data: 500, updates_per_step: 0.01, batch: 32, hidden: [16]}
train: {steps: 20, lr: 1e-3, micro_batch: 64, checkpoint_every: 2}
eval: {before: false, episodes_per_task: 1}
hooks: [{type: jsonl}]
runtime: {restarts: 1000}
"""
AHEAD = """
asynchrony: {max_lag: {pinned: LAG}}
placement: {type: disaggregated}
"""


@define
class Outcome:
    """Outcome of all kills of one signal on one backend."""

    kills: int = 0
    exits: Counter[int] = field(factory=Counter)
    runs: int = 0
    slowest_exit: float = 0.0
    slowest_end: float = 0.0
    """Seconds from the signal until no process was left."""
    wrong: list[str] = field(factory=list)


@define
class Bench:
    backend: str
    home: Path
    mark: str = Factory(lambda: f"{os.getpid()}-{random.randrange(2**32)}")
    moments: random.Random = field(factory=random.Random)
    startup: float = 0.0
    """Seconds until the undisturbed run wrote the metrics of its first training step."""
    duration: float = 0.0
    """Seconds of the undisturbed run."""
    shared: set[str] = field(factory=set)
    """Files of shared memory that our processes had."""

    def start(self, folder: Path) -> subprocess.Popen[str]:
        """Resume what can be resumed; a run that was killed before its first checkpoint starts again."""
        resume = ["--resume"] if list(folder.glob("checkpoints/step_*")) else []
        if not resume:
            shutil.rmtree(folder, ignore_errors=True)
        command = [sys.executable, "-m", "vla_rl.cli.main", "run", str(self.home / "spec.yaml")]
        temporary = self.home / "t"
        temporary.mkdir(exist_ok=True)
        with (self.home / "output").open("a") as output:
            return subprocess.Popen(
                [*command, f"runtime.backend={self.backend}", "--folder", str(folder), *resume],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ
                | {MARK: self.mark, "TMPDIR": str(temporary), "RAY_TMPDIR": str(temporary)}
                | {"TORCHINDUCTOR_CACHE_DIR": str(self.home / "cache")},  # torch's, for all runs
                text=True,
            )

    def undisturbed(self) -> Path:
        folder, begun = self.home / "undisturbed", time.monotonic()
        process = self.start(folder)
        self.wait_for_a_step(process, folder, written=0)
        self.startup = time.monotonic() - begun
        assert process.wait() == 0, (self.home / "output").read_text()
        self.duration = time.monotonic() - begun
        return folder

    def wait_for_a_step(self, process: subprocess.Popen[str], folder: Path, written: int) -> None:
        """Wait until the run's metrics have more bytes than `written`, or until it ends."""
        while size(folder / "metrics.jsonl") <= written and process.poll() is None:
            time.sleep(0.02)

    def moment(self, process: subprocess.Popen[str], folder: Path, written: int) -> float:
        """Return the seconds from now until a kill. Most kills come after a training step that is new."""
        if self.moments.random() < AT_THE_START:
            return self.moments.uniform(0.0, self.startup)
        self.wait_for_a_step(process, folder, written)
        return self.moments.uniform(0.0, SPREAD * (self.duration - self.startup))

    def kill_often(self, name: str, count: int, expected: Path) -> Outcome:
        outcome = Outcome()
        while outcome.kills < count:
            folder = self.home / f"{name}-{outcome.runs}"
            for _ in range(min(AT_MOST, count - outcome.kills)):
                if self.killed_once(name, folder, outcome):
                    break
            self.compare(folder, expected, self.start(folder).wait(), outcome)
        return outcome

    def kill_workers(self, count: int, expected: Path) -> Outcome:
        """Kill workers of runs that continue, until this many were killed. Return the outcome."""
        outcome = Outcome()
        while outcome.kills < count:
            folder = self.home / f"{WORKER}-{outcome.runs}"
            process, left = self.start(folder), min(AT_MOST, count - outcome.kills)
            while not list(folder.glob("checkpoints/step_*")) and process.poll() is None:
                time.sleep(0.1)
            while left and process.poll() is None:
                time.sleep(self.moments.uniform(0.0, self.duration / 2))
                workers = [other for other in self.alive() if "ray::" in " ".join(other.cmdline())]
                if workers and process.poll() is None:
                    self.moments.choice(sorted(workers, key=lambda other: other.pid)).kill()
                    outcome.kills, left = outcome.kills + 1, left - 1
            outcome.exits[process.wait()] += 1
            self.compare(folder, expected, process.returncode, outcome)
        return outcome

    def compare(self, folder: Path, expected: Path, status: int, outcome: Outcome) -> None:
        self.wait_for_the_end(outcome)
        outcome.runs += 1
        found = differences(expected, folder) if status == 0 else [f"it exits with {status}"]
        outcome.wrong += [f"{folder.name}: {what}" for what in found]
        outcome.wrong += [f"left in the temporary folder: {left}" for left in (self.home / "t").iterdir()]
        outcome.wrong += [f"left in shared memory: {left}" for left in self.shared if Path(left).exists()]

    def killed_once(self, name: str, folder: Path, outcome: Outcome) -> bool:
        """Start or resume, and kill. -> whether the run had ended by then, which does not count."""
        written = size(folder / "metrics.jsonl")
        process = self.start(folder)
        with suppress(subprocess.TimeoutExpired):
            process.wait(self.moment(process, folder, written))
            return True
        self.shared |= shared_memory(self.alive())
        sent = time.monotonic()
        outcome.kills += 1
        self.send(name, process, outcome.kills)
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            outcome.wrong.append(f"{folder.name}: still runs {PATIENCE_S:g} s after {name}")
            process.kill()
        outcome.exits[process.wait()] += 1
        outcome.slowest_exit = max(outcome.slowest_exit, time.monotonic() - sent)
        self.wait_for_the_end(outcome)
        outcome.slowest_end = max(outcome.slowest_end, time.monotonic() - sent)
        return process.returncode == 0

    def send(self, name: str, process: subprocess.Popen[str], turn: int) -> None:
        number = SIGNALS[name]
        with suppress(ProcessLookupError):
            if name == "SIGINT" or (name == "SIGTERM" and turn % 3 == 1):
                os.killpg(process.pid, number)
                return
            if name == "SIGTERM" and turn % 3 == 2:
                for other in self.alive():
                    if other.pid != process.pid:
                        with suppress(psutil.Error):
                            other.send_signal(number)
                time.sleep(self.moments.uniform(0.0, 2.0))
            process.send_signal(number)

    def alive(self) -> Iterator[psutil.Process]:
        """Processes of our runs, by the variable that they inherit."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    yield process

    def wait_for_the_end(self, outcome: Outcome) -> None:
        """Until no process is left; those that stay are wrong, and killed."""
        begun = time.monotonic()
        while left := list(self.alive()):
            if time.monotonic() - begun > PATIENCE_S:
                outcome.wrong += [f"process {process.pid} left" for process in left]
                for process in left:
                    process.kill()
            time.sleep(0.1)


def size(file: Path) -> int:
    """Return the bytes of a file; 0 if it does not exist."""
    return file.stat().st_size if file.exists() else 0


def differences(expected: Path, folder: Path) -> list[str]:
    """In metrics, weights and names of files."""
    found = [] if metrics(folder) == metrics(expected) else ["its metrics differ"]
    if weights(folder) != weights(expected):
        found.append("its weights differ")
    if tickets(folder) != tickets(expected):
        found.append(f"its tickets ended as {tickets(folder)}, not as {tickets(expected)}")
    if replay(folder) != replay(expected):
        found.append(f"its replay buffer has files {replay(folder)}, not {replay(expected)}")
    return found + [f"left in its folder: {name}" for name in sorted(names(folder) - names(expected))]


def metrics(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    ahead = ("rollout/env_steps", "rollout/ready_tickets", "rollout/running_tickets")
    measured = ("time/", "throughput/", *ahead)
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(measured)} for line in lines]


def tickets(folder: Path) -> dict[str, int]:
    ended: dict[str, int] = json.loads((folder / "results.json").read_text())["tickets"]
    return ended


def weights(folder: Path) -> dict[str, str]:
    model = folder / "checkpoints" / "last" / "model"
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(model.iterdir())}


def replay(folder: Path) -> dict[str, int]:
    """Return the sizes of the replay buffer's files."""
    files = sorted((folder / "replay").rglob("*.bin"))
    return {str(file.relative_to(folder)): file.stat().st_size for file in files}


def names(folder: Path) -> set[str]:
    """Return the names of the files in a run's folder, apart from copies of its spec."""
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if not re.match(r"spec.*\.yaml", file.name)}


def shared_memory(processes: Iterable[psutil.Process]) -> set[str]:
    """Files of shared memory that these have mapped."""
    found: set[str] = set()
    for process in processes:
        with suppress(OSError):
            found |= set(re.findall(r"/dev/shm/\S+", Path(f"/proc/{process.pid}/maps").read_text()))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=20, help="of each signal on each backend")
    parser.add_argument("--backend", choices=("local", "ray"), nargs="*", default=["local", "ray"])
    parser.add_argument("--signal", choices=(*SIGNALS, WORKER), nargs="*", default=list(SIGNALS))
    parser.add_argument("--lag", type=int, default=0, help="training steps that rollouts run ahead; with ray only")
    parser.add_argument("--replay", action="store_true", help="the trainer off_policy instead of a policy gradient")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(f"{'backend':8}{'signal':9}{'moments':>8}{'runs':>6}  {'exit status':28}{'exit':>8}{'end':>8}  lost or left")
    wrong = 0
    for backend in options.backend:
        home = Path(tempfile.mkdtemp(prefix="k-"))  # short: paths of sockets end at 107 bytes
        spec = REPLAY if options.replay else SPEC
        (home / "spec.yaml").write_text(spec + (AHEAD.replace("LAG", str(options.lag)) if options.lag else ""))
        bench = Bench(backend, home, moments=random.Random(options.seed))
        expected = bench.undisturbed()
        if options.replay:
            sizes = replay(expected)
            print(f"the replay buffer's files: {', '.join(sizes)}, {sum(sizes.values()) / 1e6:.0f} MB")
        for name in options.signal:
            kill = bench.kill_workers if name == WORKER else partial(bench.kill_often, name)
            outcome = kill(options.moments, expected)
            exits = ", ".join(f"{count} x {status}" for status, count in sorted(outcome.exits.items()))
            times = f"{outcome.slowest_exit:6.1f} s{outcome.slowest_end:6.1f} s"
            print(f"{backend:8}{name:9}{outcome.kills:8}{outcome.runs:6}  {exits:28}{times}  ", end="")
            print("; ".join(outcome.wrong) or "nothing", flush=True)
            wrong += len(outcome.wrong)
        if wrong:
            print(f"kept: {home}")
        else:
            shutil.rmtree(home)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""Connection of this process to Ray: its own Ray, which only this machine can reach, or a cluster's."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
from attrs import define, field

from vla_rl.core.errors import UserError, WorkerDied, first_line
from vla_rl.core.paths import explain_path_errors
from vla_rl.runtime.comm.backends.reservation import LEAST_SHARED, SHARED, choose_store
from vla_rl.toolkit.process_limits import FEW_PROCESSES, count_cpus, count_free_processes
from vla_rl.toolkit.processes import delay_signals, find_descendants, kill_process

PREFIX = "vla-rl-ray-"


class PrivateFolder:
    """Folder that this process locks while it lives. The lock tells others that the folder is in use."""

    def __init__(self, parent: Path) -> None:
        """Create a folder in `parent`, and remove those there whose process was killed."""
        for folder in parent.glob(f"{PREFIX}*"):
            _remove_if_left(folder)
        path, lock = _create_locked_folder(parent)
        self.path = path
        self._lock = lock

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _create_locked_folder(parent: Path) -> tuple[Path, int]:
    """Return a new folder, and the descriptor that holds its lock. The folder itself is locked, not a file in it: a
    process that is killed while it removes the folder would leave one without that file, and no process could tell any
    more whether it is in use."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        with suppress(FileNotFoundError):  # another process took it for one that was left, before it was locked
            lock = _open_folder(path)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                return path, lock
            os.close(lock)


def _remove_if_left(folder: Path) -> None:
    with suppress(OSError):  # another user's folder, or one that a live process has locked
        lock = _open_folder(folder)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


def _open_folder(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


logger = logging.getLogger(__name__)

GIB = 2**30
END_S = 10.0
"""Seconds that the system gets to end Ray's processes after they were killed."""
QUOTED, COLUMNS = 4, 160
"""Number of lines that are quoted of the beginning and of the end of what a process wrote, and their length: a crash of
native code names its cause in the first, Python in the last."""
LOOPBACK = "127.0.0.1"
SYSTEM = {"worker_niceness": 0, "prestart_worker_first_driver": False, "task_events_report_interval_ms": 0}
"""Ray's settings that differ from its defaults. With niceness 15 (Ray's default) any other work on the machine starves
the workers; Ray would start a worker for every core in advance, which our actors do not use; and it would keep a record
of each of the last 100,000 calls: 10 MiB a minute of an asynchronous run."""
MODE, TOKEN, TOKEN_FILE = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
ADDRESS, TEMPORARY = "RAY_ADDRESS", "RAY_TMPDIR"
REACH_S = 5.0
"""Seconds that a cluster gets to answer."""
VITAL = ("raylet", "gcs_server")
"""Ray's processes without which a run cannot continue."""


@define
class OwnRay:
    """A Ray on this machine for this process alone. It listens on the loopback only and serves whoever has its token,
    which is in the memory of its processes only. It keeps its files where other users cannot read them. It ignores
    SIGTERM: it ends with this process, or by `stop`."""

    vital: dict[str, psutil.Process] = field(factory=dict)
    """Name -> process whose end ends the run."""
    token: dict[str, str] = field(factory=dict)
    """Environment variables that were set for it."""
    folder: PrivateFolder | None = None
    """Folder of its sockets and logs. Ray's default folder is readable by all users of the machine."""
    shared: int = 0
    """Bytes of shared memory that its object store takes at most; 0: the object store is files of its folder."""
    launched_at: int = 0
    """Length of the raylet's log when the workers that start now were launched."""

    def start(self, **options: Any) -> None:
        """Start Ray, with a second try: on a busy machine it may start too late. Raises UserError where both fail."""
        try:
            self._try_start(**options)
        except UserError:
            raise
        except Exception as exc:  # Ray raises many kinds: RuntimeError, ConnectionError, Exception itself
            logger.warning("Ray did not start (%s), and is tried once more: %s", _describe_load(), first_line(exc))
            try:
                self._try_start(**options)
            except UserError:
                raise
            except Exception as again:
                raise UserError(
                    f"Ray did not start, tried twice ({_describe_load()}): {first_line(again)}\n"
                    "  try again when the machine is less busy, or take one process (runtime.backend: local)"
                ) from again

    def _try_start(self, **options: Any) -> None:
        import ray

        # quoted, as Ray hands it to a shell
        options["runtime_env"] = {"py_executable": shlex.quote(sys.executable)} | options.get("runtime_env", {})
        job: Any = ray.job_config.JobConfig()
        # otherwise Ray puts the working directory first in the workers' sys.path, where its files hide others' modules
        job._runtime_env_has_working_dir = lambda: True  # noqa: SLF001 - Ray offers no public way
        options["_system_config"] = {name: value for name, value in SYSTEM.items() if f"RAY_{name}" not in os.environ}
        options.setdefault("num_cpus", count_cpus())  # Ray counts those that this process may not use, too
        parent = Path(os.environ.get(TEMPORARY, "/tmp"))  # noqa: S108 - paths of sockets are short
        with explain_path_errors(f"the variable {TEMPORARY}, for Ray's files,", parent):
            self.folder = PrivateFolder(parent)
        if (processes := count_free_processes()) is not None and processes < FEW_PROCESSES:
            logger.warning("only %d more processes and threads may start here: see vla-rl doctor", processes)
        store = choose_store(self.folder.path)
        self.shared = 0 if "_plasma_directory" in store else store.get("object_store_memory", 0)
        self._make_token()
        try:
            with _listen_on_loopback(), _commands_quoted(), _signals_kept():
                ray.init(
                    address="local",
                    include_dashboard=False,
                    job_config=job,
                    _temp_dir=str(self.folder.path / "ray"),
                    **store,
                    **options,
                )
        except (ConnectionError, TimeoutError):  # subclasses of OSError, but they say nothing of the folder
            self.stop()
            raise
        except OSError as exc:
            self.stop()
            raise UserError(f"Ray cannot be started in {self.folder.path} ({TEMPORARY}): {exc}") from exc
        except BaseException:
            self.stop()
            raise
        self.vital = {process.name(): process for process in _started_processes() if process.name() in VITAL}
        where = ray.util.get_node_ip_address()
        if where != LOOPBACK:
            logger.warning(
                "this version of Ray listens on %s, not on the loopback only; see docs/explanation/security.md", where
            )
        warn_without_token("the Ray of this run")

    def check_store(self, size: int) -> None:
        """Raise UserError where messages of this many bytes fit neither into the object store nor onto the disk that
        takes the rest. Log a warning where they travel through files."""
        assert self.folder is not None
        parent = self.folder.path.parent
        disk = shutil.disk_usage(parent).free
        what = f"up to {size / GIB:.1f} GiB of samples move to the learners in a step, and Ray"
        shared = f"{self.shared / GIB:.1f} GiB in {SHARED}"
        if size > self.shared + disk:
            raise UserError(
                f"{what} has room for {shared} and for {disk / GIB:.1f} GiB in {parent}; lower rollout.episodes or the "
                f"pixels of cameras, set {TEMPORARY} to a folder with more room, or place policies in the learners' "
                f"workers (placement.type: collocated)"
            )
        if size > max(self.shared, LEAST_SHARED):
            slower = f"the rest in files in {parent}, which is slower"
            logger.warning("%s keeps %s, %s; enlarge it (docker run --shm-size)", what, shared, slower)

    def ended_processes(self) -> list[str]:
        """Return the names of vital processes that have ended."""
        return [name for name, process in self.vital.items() if not _is_alive(process)]

    @property
    def _log_folder(self) -> Path:
        assert self.folder is not None
        return self.folder.path / "ray" / "session_latest" / "logs"

    def _read_raylet_log(self) -> bytes:
        """Return the raylet's log, which names the processes of workers; empty if it goes to stderr."""
        log = self._log_folder / "raylet.out"
        return log.read_bytes() if log.is_file() else b""

    def note_launch(self) -> None:
        """Take note that workers are started from now on."""
        self.launched_at = len(self._read_raylet_log())

    def check_starting_workers(self) -> None:
        """Raise WorkerDied when the process of a worker has ended before it had an actor. Ray reports nothing then, and
        starts processes for that actor again and again. One that Ray ended, as it was slow to start, is left to Ray."""
        logs, log = self._log_folder, self._read_raylet_log()[self.launched_at :]
        slow = re.findall(rb"worker process\((\d+)\) have not registered", log)
        for number in re.findall(rb"Started worker process .*?pid (\d+)", log):
            if number in slow or psutil.pid_exists(int(number)):
                continue
            output = _read_lines(*logs.glob(f"worker-*-{int(number)}.err"))
            if not any(line.startswith(":actor_name:") for line in output):
                wrote = [line for line in output if not line.startswith(":")] or _read_lines(logs / "raylet.err")
                if len(wrote) > 2 * QUOTED:
                    wrote[QUOTED:-QUOTED] = ["..."]
                raise WorkerDied(
                    "a worker's process ended while it started, and wrote"
                    + ("\n  ".join([":", *(line[:COLUMNS] for line in wrote)]) if wrote else " nothing; was it killed?")
                )

    def stop(self) -> None:
        """End Ray with all its processes, and remove its folder."""
        import ray

        children = _started_processes()
        started = [process for child in children for process in (child, *find_descendants(child.pid))]
        for process in children:
            if process not in self.vital.values():  # Ray would send SIGTERM, which they ignore, and wait
                kill_process(process)
        ray.shutdown()
        for process in started:
            kill_process(process)
        psutil.wait_procs(started, timeout=END_S)
        folder = self.folder
        self.folder = None
        if folder is not None:
            folder.remove()
        self._forget_token()

    def _make_token(self) -> None:
        """Ask for a token in every connection, and make one, unless the user has set these variables."""
        self.token = {} if os.environ.get(MODE) else {MODE: "token"}
        if not (os.environ.get(TOKEN) or os.environ.get(TOKEN_FILE)):
            self.token[TOKEN] = secrets.token_hex(32)
        os.environ.update(self.token)
        read_token_again()

    def _forget_token(self) -> None:
        for name in self.token:
            os.environ.pop(name, None)
        read_token_again()


def _describe_load() -> str:
    return f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


def join_cluster(address: str, **options: Any) -> None:
    """Connect to a running cluster. Raises UserError if it is out of reach, or has another token, Python or Ray."""
    import ray

    named = os.environ.get(ADDRESS) if address == "auto" else None
    where = f"runtime.address={address!r}" + (f" ({ADDRESS}={named})" if named else "")
    try:
        services = import_module("ray._private.services")
        # None: RAY_ADDRESS asks for a Ray of this process
        _check_reachable((services.canonicalize_bootstrap_address(address) or "") if address == "auto" else address)
        with _signals_kept():
            ray.init(address=address, **options)
    except (OSError, ValueError, ray.exceptions.RayError) as exc:
        raise UserError(f"no Ray cluster could be reached at {where}: {exc}") from exc
    except RuntimeError as exc:
        if "Version mismatch" not in str(exc):
            raise
        ray.shutdown()
        raise UserError(
            f"the Ray cluster at {where} has other versions than this process: {' '.join(str(exc).split())}"
        ) from exc
    warn_without_token(f"the Ray cluster at {address}")


def warn_without_token(which: str) -> None:
    """Log a warning where Ray accepts calls from everybody."""
    raylet = import_module("ray._raylet")
    if raylet.get_authentication_mode() == raylet.AuthenticationMode.DISABLED:
        logger.warning(
            "%s asks for no token: whoever reaches its ports runs code in its processes "
            "(%s; docs/explanation/security.md)",
            which,
            f"{MODE}={os.environ.get(MODE, '')}",
        )


@contextmanager
def _listen_on_loopback() -> Iterator[None]:
    """Make Ray listen on the loopback only. Ray replaces 127.0.0.1 by an address that others can reach, but not where
    it expects no clusters, as on macOS."""
    from ray._private import ray_constants

    before, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def _commands_quoted() -> Iterator[None]:
    """Make Ray quote the commands of its workers as a shell does: its raylet reads them so, and Ray quotes them as
    Windows does, which differs for an apostrophe and a backslash."""
    before, subprocess.list2cmdline = subprocess.list2cmdline, shlex.join  # type: ignore[assignment]
    try:
        yield
    finally:
        subprocess.list2cmdline = before


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Start Ray with SIGTERM and SIGUSR1 blocked (Ray itself blocks Ctrl-C), and keep our own SIGTERM handler."""
    handler = signal.getsignal(signal.SIGTERM)
    utils: Any = import_module("ray._private.utils")
    ours = handler not in (None, signal.SIG_DFL) and threading.current_thread() is threading.main_thread()
    theirs = utils.set_sigterm_handler
    if ours:  # otherwise a signal that another thread receives meanwhile would end this process by Ray's handler
        utils.set_sigterm_handler = lambda handler: None
    with delay_signals(frozenset({signal.SIGTERM, signal.SIGUSR1})):
        try:
            yield
        finally:
            utils.set_sigterm_handler = theirs
            if ours:
                signal.signal(signal.SIGTERM, handler)


def read_token_again() -> None:
    """Make Ray read its environment variables again; it has read them when it was imported."""
    raylet = import_module("ray._raylet")
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


def _started_processes() -> list[psutil.Process]:
    """Return Ray's processes that this process has started."""
    processes = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if any(
                part.startswith("/") and "/ray/" in part for part in child.cmdline()
            ):  # the code of `python -c` contains paths too
                processes.append(child)
    return processes


def _read_lines(*files: Path) -> list[str]:
    return [line for file in files for line in file.read_text(encoding="utf-8", errors="replace").splitlines()]


def _is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _check_reachable(address: str) -> None:
    """Raises OSError when nothing listens at host:port, or for a wrong token. Ray would try for minutes."""
    import ray

    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        raise ValueError("neither host:port nor auto")
    socket.create_connection((host, int(port)), timeout=REACH_S).close()
    if not address.startswith("ray://"):
        no_cluster = "0" * 56  # otherwise the client asks for the cluster's id, again and again where it is refused
        client = import_module("ray._raylet").GcsClient(address=address, cluster_id=no_cluster)
        try:
            client.internal_kv_get(b"", None, timeout=REACH_S)
        except ray.exceptions.RayError as exc:  # the token is looked at first, then the id
            if "InvalidAuthToken" in str(exc):
                raise ConnectionError(
                    f"it asks for a token; set {MODE}=token, and {TOKEN} or {TOKEN_FILE} to the cluster's"
                ) from exc

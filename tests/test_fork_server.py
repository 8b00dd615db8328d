"""A program that the fork server runs is to its caller what it would be in an interpreter started for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from fork_server import ForkServer

COMMON = ("sys.argv", "sys.path", "os.getcwd()", "__name__", "signal.getsignal(signal.SIGINT)", "sys.stdin.read()")
TELL = f"import os, signal, sys\nprint({', '.join(COMMON)}, sorted(os.environ.items()), sep='\\n')\n"


def started_alone(*arguments: str | Path, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, **options)


@pytest.mark.parametrize("way", ["-m", "-c", "script"])
def test_a_program_sees_what_it_would_see_in_its_own_interpreter(fork_server, tmp_path, way):
    (tmp_path / "teller.py").write_text(TELL)
    program = {"-m": ("-m", "teller"), "-c": ("-c", TELL), "script": (tmp_path / "teller.py",)}[way]
    folders = os.pathsep.join(["/of/mine", str(tmp_path), sys.path[-1]])
    given = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": folders, "MINE": "1"}}
    forked = fork_server.run_python(*program, "one", "two", **given)
    alone = started_alone(*program, "one", "two", stdin=subprocess.DEVNULL, **given)
    assert forked.stdout.splitlines() == alone.stdout.splitlines(), forked.stderr
    assert (forked.returncode, forked.stderr) == (alone.returncode, alone.stderr) == (0, "")


@pytest.mark.parametrize(
    "code",
    [
        "raise SystemExit",
        "raise SystemExit(7)",
        "raise SystemExit('no')",
        "import atexit; atexit.register(print, 'at exit'); print('printed', end='')",
        "import os; os._exit(3)",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import threading; threading.Timer(0.1, print, ['of a thread']).start()",
    ],
)
def test_it_ends_as_its_own_interpreter_does(fork_server, code):
    forked, alone = fork_server.run_python("-c", code), started_alone("-c", code)
    assert (forked.returncode, forked.stdout, forked.stderr) == (alone.returncode, alone.stdout, alone.stderr)


def test_an_exception_that_is_not_caught_is_a_traceback(fork_server):
    forked, alone = fork_server.run_python("-c", "\n1 / 0"), started_alone("-c", "\n1 / 0")
    assert forked.returncode == alone.returncode == 1
    assert forked.stderr.count("Traceback") == 1 and 'File "<string>", line 2' in forked.stderr
    assert forked.stderr.splitlines()[-1] == alone.stderr.splitlines()[-1]


def test_streams_signals_and_waiting(fork_server):
    code = "import sys; print(sys.stdin.readline(), end='', flush=True); print('no', file=sys.stderr); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with fork_server.start_python("-c", code, start_new_session=True, **pipes) as process:
        process.stdin.write("hello\n")
        process.stdin.flush()
        assert process.stdout.readline() == "hello\n"
        assert process.poll() is None and os.getsid(process.pid) == process.pid
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=30)
    assert output.startswith("no\n") and "KeyboardInterrupt" in output and errors is None
    assert process.returncode == process.poll() == process.wait()
    assert process.returncode in (1, -signal.SIGINT)  # with and without torch._dynamo, in any interpreter
    process.kill()  # of one that has ended: does nothing


def test_processes_do_not_wait_for_each_other(fork_server):
    sleeps = "import time; time.sleep(600)"
    first, second = (fork_server.start_python("-c", sleeps) for _ in range(2))
    second.kill()
    assert second.wait(30) == -signal.SIGKILL and first.poll() is None
    first.terminate()
    assert first.wait(30) == -signal.SIGTERM


SPAWNS = """
import multiprocessing

def double(number):
    return 2 * number

if __name__ == "__main__":
    for method in ("spawn", "forkserver", "fork"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(method, pool.map(double, [1, 2]), flush=True)
"""


def test_it_may_start_processes(fork_server, tmp_path):
    (tmp_path / "spawns.py").write_text(SPAWNS)
    done = fork_server.run_python(tmp_path / "spawns.py")
    assert done.stdout.split("\n")[:-1] == [f"{way} [2, 4]" for way in ("spawn", "forkserver", "fork")], done.stderr


def test_programs_change_nothing_for_each_other(fork_server):
    fork_server.run_python("-c", "import os, sys, vla_rl; os.environ['LEFT'] = '1'; vla_rl.left = sys.path.clear()")
    code = "import os, sys, vla_rl; print('LEFT' in os.environ, hasattr(vla_rl, 'left'), len(sys.path) > 1)"
    assert fork_server.run_python("-c", code, check=True).stdout == "False False True\n"


def test_it_has_what_a_run_imports_and_nothing_that_reads_the_environment(fork_server):
    code = "import sys, tempfile; print(tempfile.tempdir, *sys.modules)"
    temporary, *loaded = fork_server.run_python("-c", code, check=True).stdout.split()
    assert {"torch", "vla_rl.runtime.start", "vla_rl.testing.scripted"} <= set(loaded)
    assert not {"huggingface_hub", "transformers", "mujoco", "ray", "vla_rl.cli.main"} & set(loaded)
    assert temporary == "None", "TMPDIR was read"


OWNER = """
import sys
from fork_server import ForkServer
server = ForkServer(())
child = server.start_python("-c", "import time; time.sleep(600)")
print(server._process.pid, child.pid, flush=True)
sys.stdin.read()
"""


def test_the_server_ends_with_a_killed_owner_and_leaves_what_was_started():
    folder = str(Path(sys.modules[ForkServer.__module__].__file__).parent)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", OWNER], env=environment, **pipes) as owner:
        server, child = (psutil.Process(int(pid)) for pid in owner.stdout.readline().split())
        try:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # as to all processes of a job
                server.send_signal(number)
            owner.kill()
            assert not psutil.wait_procs([server], timeout=30)[1]
            assert child.is_running()
        finally:
            child.kill()


def test_a_server_that_has_ended_says_so():
    server = ForkServer(())
    server._process.kill()
    server._process.wait()
    with pytest.raises(RuntimeError, match="the fork server of the tests has ended"):
        server.start_python("-c", "1")
    server.close()

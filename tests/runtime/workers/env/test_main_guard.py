"""Rows in processes import the script that starts them, so it needs a `__main__` guard, and the error says so."""

from __future__ import annotations

from pathlib import Path

import fragile
import pytest
from scripted_runs import scripted_spec

PLUGINS = ["vla_rl.testing.scripted", "vla_rl.testing.slot_placement", str(Path(fragile.__file__))]
SPEC = scripted_spec(
    plugins=PLUGINS,
    env={"type": "fragile", "num_envs": 2},
    rollout={"episodes": 4, "group_size": 2},
    train={"steps": 1, "micro_batch": 4, "global_batch": 4},
    eval={"before": False, "episodes_per_task": 1},
    hooks=[],
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lines", "line"),
    [
        (["def main():", "    vla_rl.run(SPEC, 'run')", "main()"], 5),
        (["if __name__ == '__main__':", "    vla_rl.run(SPEC, 'run')"], None),
    ],
)
def test_a_script_without_the_guard_gets_where_it_belongs(tmp_path, fork_server, lines, line):
    script = tmp_path / "train.py"
    script.write_text("\n".join(["import vla_rl", f"SPEC = {SPEC!r}", *lines]))
    done = fork_server.run_python(script, cwd=tmp_path)
    if line is None:
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "run" / "results.json").exists()
        return
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert f'put the call at {script}:{line} below `if __name__ == "__main__":`' in done.stderr
    assert not (tmp_path / "run" / "checkpoints").exists()

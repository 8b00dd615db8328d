from __future__ import annotations

import json
import os
import subprocess
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest

from fork_server import ForkServer
from vla_rl.cli.new_plugin import VARIANTS, new_plugin
from vla_rl.core.catalogue import KINDS
from vla_rl.core.errors import UserError


@pytest.mark.parametrize("kind", [*KINDS, *VARIANTS])
def test_every_kind_of_project_passes_its_own_test(kind: str, tmp_path: Path, fork_server: ForkServer) -> None:
    project = new_plugin(kind, f"my-{kind}", tmp_path / "project")
    env = os.environ | {"PYTHONPATH": str(project / "src"), "OMP_NUM_THREADS": "1"}
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests")
    done = fork_server.run_python(*command, cwd=project, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout


@pytest.mark.parametrize("kind", [*KINDS, *VARIANTS])
def test_the_entry_point_names_the_plugin(kind: str, tmp_path: Path) -> None:
    project = new_plugin(kind, "two-words", tmp_path / "project")
    metadata = tomllib.loads((project / "pyproject.toml").read_text())
    assert metadata["project"]["name"] == "two-words"
    assert metadata["project"]["entry-points"] == {
        KINDS[VARIANTS.get(kind, kind)].group: {"two_words": "two_words:plugin"}
    }
    readme = (project / "README.md").read_text()
    assert "type: two_words" in readme and "not a section" not in readme
    text = "".join(path.read_text() for path in project.rglob("*") if path.is_file())
    assert "$" not in text
    assert "class TwoWordsConfig" in text


def test_generated_code_is_tidy_and_imports_no_torch(tmp_path: Path, bare_fork_server) -> None:
    projects = [new_plugin(kind, "tidy", tmp_path / kind) for kind in (*KINDS, *VARIANTS)]
    for check in (["check", "--select", "E,F,B,UP"], ["format", "--check"]):
        command = ["ruff", *check, "--isolated", "--line-length", "120", *projects]
        done = subprocess.run(command, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    code = "import sys"
    for project in projects:
        code += f"\nsys.path[0] = {str(project / 'src')!r}; import tidy; assert tidy.plugin.summary; del sys.modules['tidy']"
        code += f"\nassert 'torch' not in sys.modules and tidy.__file__.startswith(sys.path[0]), {project.name!r}"
    bare_fork_server.run_python("-c", code, check=True)


def test_bad_requests_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no kind of plugin 'evn'; did you mean 'env'"):
        new_plugin("evn", "x", tmp_path / "x")
    with pytest.raises(UserError, match="'1st env' cannot name a plugin"):
        new_plugin("env", "1st env", tmp_path / "x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(UserError, match="exists and is not empty"):
        new_plugin("env", "x", tmp_path / "full")
    with pytest.raises(UserError, match="'trailing-' cannot name a plugin: use lower-case letters"):
        new_plugin("env", "trailing-", tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("name", "who"),
    [
        ("torch", r"the installed distribution torch \d.*, which `pip install` would replace"),
        ("numpy", "the installed distribution numpy"),
        ("typing-extensions", "the installed distribution typing_extensions"),
        ("vla-rl", "the installed distribution vla-rl"),
        ("yaml", r"a module that is there already \(.*yaml.__init__.py\)"),
        ("class", "a word of Python"),
        ("match", "a word of Python"),
        ("null", "a word of YAML"),
        ("json", "a module of Python's standard library"),
        ("print", "a name of Python's own"),
        ("tabletop", r"the env plugin of vla-rl \d"),
        ("grpo", r"the algorithm plugin of vla-rl \d"),
    ],
)
def test_a_name_that_something_has_is_refused(name: str, who: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"'{name}' cannot name a plugin: it is {who}.*such as my_"):
        new_plugin("env", name, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_name_of_a_package_that_an_extra_installs_is_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(
        "vla_rl.cli.new_plugin.metadata.requires", lambda dist: ["simulator-of-an-extra>=3; extra == 'all'"]
    )
    with pytest.raises(UserError, match="it is a package that vla-rl or one of its extras installs"):
        new_plugin("env", "simulator-of-an-extra", tmp_path / "x")


@pytest.mark.parametrize(
    ("kind", "name", "class_name"),
    [
        ("env", "sim-env", "SimEnv"),
        ("algorithm", "loss", "Loss"),
        ("hook", "run", "Run"),
        ("data", "data-context", "DataContext"),
    ],
)
def test_a_class_of_the_name_of_an_import_is_refused(kind: str, name: str, class_name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"its class would be {class_name}, as one of vla_rl"):
        new_plugin(kind, name, tmp_path / "x")
    assert not (tmp_path / "x").exists()
    for other in KINDS:
        if other not in ("env", "algorithm", "hook", "data"):
            new_plugin(other, name.replace("-", "_") + "_two", tmp_path / f"{other}-{name}")


def test_the_tests_of_a_project_bring_pytest(tmp_path: Path) -> None:
    project = new_plugin("hook", "herald", tmp_path / "project")
    metadata = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    assert any(requirement.startswith("pytest") for requirement in metadata["optional-dependencies"]["test"])
    assert "pip install -e '.[test]'" in (project / "README.md").read_text()


# ------------------------------------------------------------------------------- all of them, installed and run together

SPEC = """
name: generated
model: {type: my_model}
env: {type: my_env, num_envs: 4}
rollout: {chunk: 2, episodes: 8, engine: {type: my_engine}}
algorithm: {type: my_algorithm}
placement: {type: my_placement}
train: {steps: 1, lr: 1.0e-3, micro_batch: 16}
eval: {episodes_per_task: 4}
imitation: {data: {type: my_data, file: demonstrations.npz}, steps: 20, lr: 1.0e-3, batch: 16}
hooks: [{type: jsonl}, {type: my_hook}]
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a project of each kind, and `python`, of an environment that has them all."""
    home = tmp_path_factory.mktemp("generated")
    projects = [new_plugin(kind, f"my_{kind}", home / f"my_{kind}") for kind in KINDS]
    venv.create(home / "venv", symlinks=True)
    site = next((home / "venv" / "lib").glob("python*/site-packages"))
    (site / "outer.pth").write_text(f"import site; site.addsitedir({sysconfig.get_paths()['purelib']!r})\n")
    (home / "python").symlink_to(home / "venv" / "bin" / "python")
    options = ("--no-deps", "--no-index", "--no-build-isolation", "-q")
    done = call(home, "-m", "pip", "install", *options, *map(str, projects))
    assert done.returncode == 0, done.stderr
    (home / "spec.yaml").write_text(SPEC)
    return home


def call(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONNOUSERSITE": "1"}
    command = [home / "venv" / "bin" / "python", *arguments]
    return subprocess.run(command, cwd=home, env=env, text=True, capture_output=True, timeout=280, check=False)


def vla_rl(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return call(home, "-m", "vla_rl.cli.main", *arguments)


@pytest.mark.slow
def test_generated_data_without_its_file_says_what_to_do(clone: Path) -> None:
    done = vla_rl(clone, "sft", "spec.yaml", "imitation.data.file=none.npz", "runtime.backend=local")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "data 'my_data': there is no file" in done.stderr
    assert "python -m my_data.record ENV none.npz" in done.stderr


@pytest.mark.slow
def test_generated_data_clone_the_generated_simulator(clone: Path) -> None:
    recorded = call(clone, "-m", "my_data.record", "my_env", "demonstrations.npz")
    assert "32 episodes" in recorded.stdout, recorded.stderr
    done = vla_rl(clone, "sft", "spec.yaml", "runtime.backend=local")
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((clone / "runs" / "generated-sft" / "results.json").read_text())["success"]["n"] == 4


@pytest.mark.slow
@pytest.mark.ray
def test_everything_generated_runs_together_with_its_defaults(clone: Path) -> None:
    """The placement's three workers share whatever number of cores there is."""
    done = vla_rl(clone, "run", "spec.yaml", "runtime.deadline_s=120")
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in (clone / "runs" / "generated" / "metrics.jsonl").read_text().splitlines()]
    (step,) = [line for line in lines if "loss/policy" in line]
    assert step["loss/total"] == pytest.approx(step["loss/policy"], abs=1e-5)

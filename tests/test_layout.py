"""The shape of the code base: imports point inwards, light parts are light."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from fork_server import ForkServer
from import_graph import find_circles
from vla_rl.core.catalogue import KINDS

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
TESTS = ROOT / "tests"
FILES = sorted((SOURCE / "vla_rl").rglob("*.py"))
HEAVY = (
    "torch",
    "ray",
    "transformers",
    "peft",
    "gymnasium",
    "libero",
    "robosuite",
    "mujoco",
    "sapien",
    "mani_skill",
    "metaworld",
    "tensorboard",
    "imageio",
)
MODULES = {".".join(file.relative_to(SOURCE).with_suffix("").parts) for file in FILES}
LIGHT = [file for file in FILES if file.name in ("__init__.py", "config.py") and "plugins" in file.parts]


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text("utf-8"))


@cache
def nodes_of(file: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree_of(file)))


@cache
def imports(file: Path) -> set[str]:
    """Modules that a file imports, anywhere in it and also for type checking."""
    found = set()
    for node in nodes_of(file):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import"
            module = node.module or ""
            names = {f"{module}.{alias.name}" for alias in node.names} & MODULES
            found |= names or {module}
    return found


TARGET = re.compile(r"(vla_rl(?:\.\w+)+):\w+")


@cache
def edges_of(file: Path) -> set[str]:
    """Modules of the package that a file imports, or names as the target of a declaration (`module:attribute`)."""
    strings = (node.value for node in nodes_of(file) if isinstance(node, ast.Constant))
    named = (TARGET.fullmatch(value) for value in strings if isinstance(value, str))
    return (imports(file) | {match[1] for match in named if match}) & NAMES


ROOMS = {
    "core": set(),
    "toolkit": {"core"},
    "runtime": {"core", "toolkit"},
    "testing": {"core", "toolkit"},
    "serving": {"core", "toolkit", "runtime"},
    "cli": {"core", "toolkit", "runtime", "serving", "testing"},
    "plugins": {"core", "toolkit"},
}
"""Room -> the others that it may import."""
PLUGINS = {entry.value.partition(":")[0] for kind in KINDS.values() for entry in entry_points(group=kind.group)}
"""Where the entry points of this distribution lead."""


@cache
def name_of(file: Path) -> str:
    return ".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


NAMES = {name_of(file) for file in FILES}


def room_of(module: str) -> str:
    """`core`; of the package itself, and of what is not part of it, nothing."""
    parts = module.split(".")
    return parts[1] if parts[0] == "vla_rl" and len(parts) > 1 and parts[1] in ROOMS else ""


@cache
def plugin_of(module: str) -> str:
    """The plugin's folder that a module is in: the longest package that an entry point names."""
    return max((p for p in FOLDERS if module == p or module.startswith(p + ".")), key=len, default="")


FOLDERS = {name for name in PLUGINS if name.startswith("vla_rl.")}
BUILT_ON = {"vla_rl.plugins.envs.gym_hil": "vla_rl.plugins.envs.gymnasium"}
"""Plugin -> another one that it imports: gym_hil's envs are those of gymnasium, in wrappers."""


def test_imports_point_inwards():
    wrong = {}
    for file in FILES:
        module = name_of(file)
        room, own = room_of(module), plugin_of(module)
        upward = [name for name in imports(file) if room and room_of(name) not in ("", room, *ROOMS[room])]
        allowed = {"", own, BUILT_ON.get(own)}
        others = [name for name in imports(file) if room == "plugins" and plugin_of(name) not in allowed]
        if upward or others:
            wrong[module] = {"layers above": upward, "other plugins": others}
    assert not wrong


def test_every_plugin_is_in_a_folder_of_an_entry_point():
    """Plugins outside such folders would escape the rule on imports between plugins."""
    loose = [name for name in map(name_of, FILES) if room_of(name) == "plugins" and name.count(".") > 2]
    assert not [name for name in loose if not plugin_of(name)]


RUNTIME = {
    "messages": set(),
    "placement": set(),
    "run_folder": set(),
    "scheduling": {"messages", "placement"},
    "planning": {"messages", "placement", "run_folder", "scheduling"},
    "checks": {"messages", "placement", "planning"},
    "comm": {"messages", "placement"},
    "comm.backends": {"comm", "messages", "placement"},
    "driver": {"comm", "messages", "placement", "scheduling", "planning", "checks", "run_folder", "gpu_memory"},
    "workers.learner.parallel": {"messages"},
    "workers.learner": {"comm", "messages", "placement", "run_folder", "workers.learner.parallel"},
    "workers.env": {"comm", "messages", "placement"},
    "workers.policy": {"comm", "messages", "placement", "scheduling"},
    "workers": {
        *("comm", "messages", "placement", "scheduling", "checks"),
        *("workers.env", "workers.policy", "workers.learner"),
    },
    "imagination": {"comm", "messages", "driver", "checks"},
    "imagination.worker": {"imagination", "comm", "messages", "workers", "workers.env"},
    "gpu_memory": {"placement", "planning", "checks", "workers", "workers.learner.parallel"},
}
"""Folder of the runtime -> the others that it may import. Driver and workers speak through `comm` alone; `gpu_memory`
builds a model as workers do, to count its bytes. `start.py`, which puts all together, stands outside the folders."""


def folder_of(module: str) -> str:
    """Return the folder of a module of the runtime, "" for a module outside of all folders."""
    inside = module.removeprefix("vla_rl.runtime").removeprefix(".")
    return max((name for name in RUNTIME if inside == name or inside.startswith(name + ".")), key=len, default="")


def test_driver_and_workers_meet_in_messages():
    wrong = {}
    for file in FILES:
        module = name_of(file)
        if room_of(module) != "runtime":
            continue
        folder = folder_of(module)
        assert folder or module in ("vla_rl.runtime", "vla_rl.runtime.start"), f"{module} is in no folder of the rule"
        other = {folder_of(name) for name in imports(file) if room_of(name) == "runtime"} - {folder, ""}
        if folder and other - RUNTIME[folder]:
            wrong[module] = sorted(other - RUNTIME[folder])
    assert not wrong


def test_no_folder_imports_what_imports_it():
    """Not through others either. The package itself, which loads its public names lazily, is not a folder."""
    packages = {name_of(file) for file in FILES if file.name == "__init__.py"}
    edges: dict[str, set[str]] = {name: set() for name in packages - {"vla_rl"}}
    for file in FILES:
        module = name_of(file)
        folder = module if module in packages else module.rpartition(".")[0]
        others = {name if name in packages else name.rpartition(".")[0] for name in imports(file)}
        if folder in edges:
            edges[folder] |= (others & edges.keys()) - {folder}
    assert not find_circles(edges)


def test_no_import_circles():
    """Late imports and imports for type checking count. The package itself, which loads its public names lazily, is
    left out."""
    edges = {name_of(file): edges_of(file) - {name_of(file)} for file in FILES}
    assert not find_circles(edges)


def test_a_plugin_declares_names():
    """The module of an entry point imports the class of its declaration, and at most constants of its folder."""
    for file in FILES:
        loaded = imports(file) - {"__future__", "vla_rl.core.declarations"}
        if name_of(file) not in FOLDERS or not loaded:
            continue
        for name in loaded:
            assert name.startswith(name_of(file) + "."), f"{file}: {name}"
            assert not imports(SOURCE / (name.replace(".", "/") + ".py")), f"{name} is more than constants"


def test_no_module_hides_another():
    """A file and a folder of one name: Python takes the folder."""
    assert not [file for file in FILES if file.with_suffix("").is_dir()]


def test_tests_mirror_the_package():
    """Every folder of tests is one of the package, of `examples/` or of `tools/`; and pytest knows a file by its name alone."""
    own = {
        "whole_runs",
        "reference",
        "robotwin_double",
        "lerobot_double",
    }  # runs of all of it, numbers of others, mocks
    folders = {file.parent.relative_to(TESTS) for file in TESTS.rglob("test_*.py")}
    missing = [f for f in folders if f.name not in own and not any((r / f).is_dir() for r in (SOURCE / "vla_rl", ROOT))]
    assert not missing, f"no folder of the package is called {sorted(map(str, missing))}"
    names = Counter(f.name for f in TESTS.rglob("*.py") if f.name != "conftest.py" and not own & set(f.parts))
    assert not [name for name, count in names.items() if count > 1]


def test_array_is_defined_in_core_types_alone():
    assigned = [
        name_of(file)
        for file in FILES
        for node in nodes_of(file)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in ("Array", "ArrayOrTensor")
    ]
    assert assigned == ["vla_rl.core.types"] * 2


def heavy_modules(server: ForkServer, code: str) -> set[str]:
    """Heavy packages that are loaded after running the code in a fresh interpreter."""
    check = f"import sys\n{code}\nprint(*({set(HEAVY)!r} & set(sys.modules)), file=sys.stderr)"
    return set(server.run_python("-c", check, timeout=60, check=True).stderr.split())


@pytest.mark.parametrize(
    "code",
    [
        "import vla_rl",
        "\n".join(f"import {name_of(file)}" for file in FILES if room_of(name_of(file)) == "core"),
        "import vla_rl.testing.fixtures",
        "from typer.testing import CliRunner as R; from vla_rl.cli.main import app; assert not R().invoke(app, ['--help']).exit_code",
        "from typer.testing import CliRunner as R; from vla_rl.cli.main import app; assert not R().invoke(app, ['plugins']).exit_code",
        "\n".join(f"import {name_of(file)}" for file in LIGHT),
    ],
    ids=["package", "core", "pytest plugin", "help", "plugins", "light parts"],
)
def test_nothing_heavy_is_imported(code, bare_fork_server: ForkServer):
    assert heavy_modules(bare_fork_server, code) == set()


def test_core_knows_no_plugin():
    """Names of plugins occur in core as defaults of a spec only."""
    names = {"tabletop", "libero", "maniskill", "metaworld", "robotwin", "grpo", "ppo"}
    names |= {"openvla", "openvla_oft", "pi0", "pi05", "smolvla", "gr00t", "film_resnet"}
    for file in (SOURCE / "vla_rl" / "core").rglob("*.py"):
        for node in nodes_of(file):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in names:
                raise AssertionError(f"{file}:{node.lineno}: {node.value!r}")


def test_text_files_have_an_encoding() -> None:
    """UTF-8 whatever the locale is: `LC_ALL=C` is usual in containers and on clusters."""
    wrong = []
    for file in FILES:
        calls = [node for node in nodes_of(file) if isinstance(node, ast.Call)]
        lacking = [c for c in calls if _reads_text(c) and all(keyword.arg != "encoding" for keyword in c.keywords)]
        wrong += [f"{file.relative_to(SOURCE)}:{call.lineno}" for call in lacking]
    assert not wrong, f"no encoding: {', '.join(wrong)}"


def _reads_text(call: ast.Call) -> bool:
    """Whether a file, or what a process prints, is read or written as text; an encoding may be the last position."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if name in ("read_text", "write_text"):
        return len(call.args) < (1 if name == "read_text" else 2)
    if name == "open":
        modes = call.args[1:2] if isinstance(call.func, ast.Name) else call.args[:1]
        is_mode = all(isinstance(mode, ast.Constant) for mode in modes)
        return is_mode and not any("b" in str(mode.value) for mode in modes if isinstance(mode, ast.Constant))
    return any(keyword.arg in ("text", "universal_newlines") for keyword in call.keywords)


def test_state_changes_one_statement_at_a_time():
    """No `self.a, self.b = ...`, in which a change of state is easily overlooked."""
    several = [
        f"{name_of(file)}:{target.lineno}"
        for file in FILES
        for node in nodes_of(file)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Tuple)
        and any(isinstance(part, ast.Attribute) and ast.unparse(part.value) == "self" for part in target.elts)
    ]
    assert not several


def test_every_exhaustive_test_exists() -> None:
    """A line of exhaustive.txt that names no test would leave nothing out."""
    lines = [line for line in (TESTS / "exhaustive.txt").read_text().splitlines() if not line.startswith("#")]
    left_out = {line.partition("  #")[0] for line in lines}
    for line in lines:
        nodeid, _, reason = line.partition("  #")
        file, _, name = nodeid.partition("::")
        function = name.partition("[")[0]
        assert f"def {function}(" in (ROOT / file).read_text(), nodeid
        assert reason.strip(), f"{nodeid}: name the test that covers it"
        assert f"{file}::{function}{reason.strip()}" not in left_out, f"{nodeid}: {reason} is left out too"

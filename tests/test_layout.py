"""The shape of the code base: imports point inwards, light parts are light, files stay small."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
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
LIGHT = [file for file in FILES if file.name == "__init__.py" and "plugins" in file.parts]


def imports(file: Path) -> set[str]:
    """Modules that a file imports, anywhere in it and also for type checking."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import"
            found.add(node.module or "")
    return found


def plugin_of(module: str) -> str | None:
    """`vla_rl.plugins.envs.libero` of any module in that folder."""
    parts = module.split(".")
    return ".".join(parts[:4]) if parts[:2] == ["vla_rl", "plugins"] and len(parts) > 3 else None


def name_of(file: Path) -> str:
    return ".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_imports_point_inwards(file):
    module = name_of(file)
    if module.startswith("vla_rl.core"):
        wrong = [name for name in imports(file) if name.startswith("vla_rl.plugins")]
    else:
        wrong = [name for name in imports(file) if plugin_of(name) not in (None, plugin_of(module))]
    assert not wrong, f"{module} imports {wrong}"


def heavy_modules(code: str) -> set[str]:
    """Heavy packages that are loaded after running the code in a fresh interpreter."""
    check = f"import sys\n{code}\nprint(*({set(HEAVY)!r} & set(sys.modules)), file=sys.stderr)"
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60, check=True)
    return set(result.stderr.split())


@pytest.mark.parametrize(
    "code",
    [
        "import vla_rl",
        "import vla_rl.core.spec.spec, vla_rl.core.manager",
        "import vla_rl.testing.fixtures",
        "from typer.testing import CliRunner as R; from vla_rl.cli.main import app; assert not R().invoke(app, ['--help']).exit_code",
        "from typer.testing import CliRunner as R; from vla_rl.cli.main import app; assert not R().invoke(app, ['plugins']).exit_code",
        "\n".join(f"import {name_of(file)}" for file in LIGHT),
    ],
    ids=["package", "spec", "pytest plugin", "help", "plugins", "light parts"],
)
def test_nothing_heavy_is_imported(code):
    assert heavy_modules(code) == set()


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_files_are_small(file):
    lines = len(file.read_text().splitlines())
    budgets = {"hookspecs.py": 280, "loop.py": 120}
    limit = budgets.get(file.name, 60 if file in LIGHT else 400)
    assert lines <= limit, f"{lines} lines; split it by subject"


def test_core_knows_no_plugin():
    """Names of plugins occur in core as defaults of a spec only."""
    names = {"tabletop", "libero", "maniskill", "metaworld", "robotwin", "grpo", "ppo", "openvla", "openvla_oft", "pi0"}
    for file in (SOURCE / "vla_rl" / "core").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in names:
                raise AssertionError(f"{file}:{node.lineno}: {node.value!r}")

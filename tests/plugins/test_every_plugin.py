"""Every plugin that the distribution offers keeps to the contract of its kind; a new one is checked by being there."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from fork_server import ForkServer
from vla_rl.core.catalogue import KINDS, installed_plugins, load, load_declaration
from vla_rl.core.installation import OWN_DIST
from vla_rl.core.manager import broadcast
from vla_rl.core.requirements import missing_requirements
from vla_rl.testing import check_algorithm, check_env, check_model, check_placement, check_world_model
from vla_rl.testing.synthetic import env_info

DOCS = Path(__file__).parents[2] / "docs"
HEAVY = ("torch", "ray", "transformers", "peft", "tokenizers", "mujoco", "sapien", "tensorboard", "imageio_ffmpeg")
REQUIRED: dict[str, dict[str, Any]] = {
    "gr00t": {"preset": "tiny"},
    "openvla": {"preset": "fast"},
    "openvla_oft": {"preset": "fast"},
    "pi0": {"preset": "tiny"},
    "pi05": {"preset": "tiny"},
    "smolvla": {"preset": "tiny"},
    "srpo": {"encoder": "tiny"},
}
"""Keys without default, where a check needs some."""
SLOW_SIMULATORS = {"gym_hil", "gymnasium", "lerobot_robot", "libero", "maniskill", "metaworld", "robotwin"}
"""Checked by separate tests, with the settings they need."""


def own(kind: str) -> list[str]:
    return [name for name, offers in installed_plugins(kind).items() if any(item.dist == OWN_DIST for item in offers)]


def ready(kind: str, name: str) -> tuple[Any, Any]:
    """The plugin and a config; skips, with the command, where its dependencies are not installed."""
    plugin = load(kind, name)
    missing = missing_requirements(OWN_DIST, plugin.extra)
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: pip install -e '.[{plugin.extra}]'")
    return plugin, plugin.config(**REQUIRED.get(name, {}))


@pytest.mark.parametrize("name", [name for name in own("env") if name not in SLOW_SIMULATORS])
def test_env(name: str) -> None:
    check_env(*ready("env", name))


@pytest.mark.parametrize("name", own("env"))
def test_an_expert_is_declared(name: str) -> None:
    """A trainer that asks an expert refuses simulators whose plugin declares none."""
    plugin = load("env", name)
    folder = Path(sys.modules[plugin.build.__module__].__file__ or "").parent
    implements = any("def expert_chunk" in file.read_text("utf-8") for file in folder.rglob("*.py"))
    assert plugin.expert == implements


@pytest.mark.parametrize("name", [name for name in own("algorithm") if name != "transitions"])  # it has no loss
def test_algorithm(name: str) -> None:
    check_algorithm(*ready("algorithm", name))


@pytest.mark.parametrize("name", own("placement"))
def test_placement(name: str) -> None:
    check_placement(*ready("placement", name))


@pytest.mark.parametrize("name", own("model"))
def test_model(name: str) -> None:
    plugin, config = ready("model", name)
    check_model(plugin, config, values="chunk", reload=lambda folder: plugin.config(checkpoint=str(folder)))


def test_world_model() -> None:
    """`edm`; `oracle` needs recorded windows: tests/runtime/imagination/worker/test_imagined_env.py."""
    plugin, small = load("world_model", "edm"), {"channels": (16, 16), "depths": (1, 1), "condition": 32, "fold": 4}
    config = plugin.config(**{**plugin.presets["tiny"], **small})
    check_world_model(plugin, config, env=env_info(pixels=16))


@pytest.mark.parametrize("name", own("hook"))
def test_hook(name: str) -> None:
    plugin, config = ready("hook", name)
    assert broadcast({name: plugin.build(config)})


ALL = [(kind, name) for kind in KINDS for name in own(kind)]


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_targets_exist(kind: str, name: str) -> None:
    """What a declaration names can be imported, or needs a package that its extra installs, and is there."""
    declaration = load_declaration(kind, name)
    for attribute, target in vars(declaration).items():
        if not (isinstance(target, str) and ":" in target and attribute not in ("summary", "instruction_suffix")):
            continue
        missing: str | None = None
        try:
            assert callable(getattr(declaration, attribute))
        except ModuleNotFoundError as exc:
            missing = exc.name or "?"
        if missing is not None:
            assert not missing.startswith("vla_rl"), target
            module, _, defined = target.partition(":")
            spec = importlib.util.find_spec(module)
            assert spec is not None and spec.origin is not None
            source = ast.parse(Path(spec.origin).read_text("utf-8"))
            assert defined in {getattr(node, "name", "") for node in source.body}, target


LOAD_ALL = f"""
import sys
from vla_rl.core.catalogue import load
before = set()
for kind, name in {ALL!r}:
    load(kind, name)
    print(kind, name, *sys.modules.keys() - before)
    before = set(sys.modules)
"""


@pytest.fixture(scope="module")
def loaded_modules(bare_fork_server: ForkServer) -> dict[tuple[str, str], set[str]]:
    """(kind, name) -> the modules that its light part was the first to import, of all in one interpreter."""
    done = bare_fork_server.run_python("-c", LOAD_ALL, check=True)
    return {(kind, name): set(modules) for kind, name, *modules in map(str.split, done.stdout.splitlines())}


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_the_light_part_is_light_and_there_is_a_page(
    kind: str, name: str, loaded_modules: dict[tuple[str, str], set[str]]
) -> None:
    assert not set(HEAVY) & loaded_modules[kind, name]
    (item,) = [item for item in installed_plugins(kind)[name] if item.dist == OWN_DIST]
    module = item.target.partition(":")[0].removeprefix("vla_rl.").replace(".", "/")
    folder = Path(sys.modules["vla_rl"].__file__ or "").parent / module
    pages = {"env": DOCS / "simulators" / f"{name}.md", "model": DOCS / "models" / f"{folder.name}.md"}
    pages |= {
        "engine": DOCS / "reference" / "engines.md",
        "data": DOCS / "how-to" / "clone-demonstrations.md",
        "world_model": DOCS / "reference" / "world-models.md",
        "trainer": DOCS / "reference" / "trainers.md",
        "reward_model": DOCS / "how-to" / "reward-models.md",
    }
    assert pages.get(kind, folder / "README.md").is_file() or (folder / "README.md").is_file()
    assert load(kind, name).summary

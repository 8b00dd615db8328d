"""The catalogue: real distributions in a temporary folder on `sys.path`, real modules, no mocks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from vla_rl.core.catalogue import build, hook_modules, installed_plugins, load, load_declaration
from vla_rl.core.declarations import PlacementPlugin
from vla_rl.core.errors import PluginError
from vla_rl.core.hookspecs import Placement
from vla_rl.core.plan import Cluster, Job, Plan
from vla_rl.core.requirements import missing_requirements

GOOD = """
import attrs
from vla_rl import Placement, PlacementPlugin
from vla_rl.core.plan import Plan, Slot

@attrs.frozen(kw_only=True)
class Config:
    cpus: float = 1.0

class One(Placement):
    def plan(self, cluster, job):
        return Plan(slots=(Slot(roles=("sim", "policy", "learner")),))

plugin = PlacementPlugin(config=Config, build=lambda config: One(), summary="one worker")
"""


NAMED = GOOD.partition("plugin = ")[0]


@pytest.fixture
def offer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Install a distribution: metadata and one module, found through `sys.path` as pip's are."""

    def install(dist: str, name: str, source: str, *, requires: str = "", attribute: str = "plugin") -> None:
        module = dist.replace("-", "_") + "_module"
        site = tmp_path / dist
        info = site / f"{dist.replace('-', '_')}-0.3.dist-info"
        info.mkdir(parents=True)
        (site / f"{module}.py").write_text(source)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 0.3\n{requires}")
        (info / "entry_points.txt").write_text(f"[vla_rl.placement]\n{name} = {module}:{attribute}\n")
        monkeypatch.syspath_prepend(str(site))
        monkeypatch.delitem(sys.modules, module, raising=False)

    return install


def test_listing_imports_nothing(offer):
    offer("acme-one", "one", "raise RuntimeError('imported')")
    assert [(i.dist, i.version, i.target) for i in installed_plugins("placement")["one"]] == [
        ("acme-one", "0.3", "acme_one_module:plugin")
    ]


def test_build_gives_a_component(offer):
    offer("acme-one", "one", GOOD)
    plugin = load("placement", "one")
    component = build("placement", "one", plugin.config())
    assert isinstance(component, Placement)
    assert component.plan(Cluster(cpus=1, gpus=0, memory=1), Job(num_envs=1, group_size=1, env="toy")).stages == 1


def test_unknown_name_lists_the_available_ones(offer):
    offer("acme-one", "only_one", GOOD)
    with pytest.raises(
        PluginError, match=r"no placement named 'only_won'; did you mean 'only_one'\?\n  installed .*one"
    ):
        load("placement", "only_won")
    with pytest.raises(PluginError, match="no kind of plugin 'envs'; did you mean 'env'"):
        installed_plugins("envs")


def test_two_distributions_with_one_name_are_both_named(offer):
    offer("acme-one", "one", GOOD)
    offer("beta-one", "one", GOOD)
    with pytest.raises(PluginError, match="'one' is offered by beta-one 0.3 .* acme-one 0.3"):
        load("placement", "one")


def test_only_listed_third_parties_are_seen(offer, monkeypatch):
    offer("acme-one", "one", GOOD)
    offer("beta-one", "two", GOOD)
    monkeypatch.setenv("VLA_RL_PLUGINS", "acme_one")
    assert "one" in installed_plugins("placement")
    assert "two" not in installed_plugins("placement")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "1 / 0",
            r"placement 'one' from acme-one 0.3 \(acme_one_module:plugin\) cannot be imported: .*:1: ZeroDivisionError",
        ),
        ("\nimport sys; sys.exit(3)", "acme_one_module.py:2: SystemExit: 3; it must not end the process"),
        ("import acme_one_module.part", r"cannot be imported: .*acme_one_module.py:1: ModuleNotFoundError"),
        ("plugin = 3", "acme_one_module:plugin is 3; name an instance of vla_rl.PlacementPlugin there$"),
        (
            "from vla_rl import PlacementPlugin\nplugin = PlacementPlugin(config=int, build=int, summary='')",
            "not an attrs class",
        ),
        (
            "from vla_rl import EnvPlugin\nplugin = EnvPlugin(config=int, build=int, summary='')",
            "is an instance of EnvPlugin; name an instance of vla_rl.PlacementPlugin there, or register this one as env$",
        ),
        (
            f"{NAMED}plugin = PlacementPlugin(config='acme_one_module:Confg', build='acme_one_module:One', summary='')",
            "config of PlacementPlugin names 'acme_one_module:Confg', and module .* has no 'Confg'; did you mean 'Config'",
        ),
        (
            f"{NAMED}plugin = PlacementPlugin(config='vroom.config:Config', build='acme_one_module:One', summary='')",
            r"needs 'vroom', which is not installed; try: pip install 'acme-one\[fast\]'",
        ),
        ("import vroom", r"needs 'vroom', which is not installed; try: pip install 'acme-one\[fast\]'"),
        ("import zoom.sub", "needs 'zoom.*try: pip install acme-one$"),
    ],
)
def test_what_cannot_be_loaded_names_plugin_and_distribution(offer, source, message):
    offer("acme-one", "one", source, requires='Provides-Extra: fast\nRequires-Dist: Vroom>=2; extra == "fast"\n')
    with pytest.raises(PluginError, match=message):
        load("placement", "one")


def test_targets_are_imported_where_they_are_first_used(offer):
    source = "from vla_rl import PlacementPlugin\nplugin = PlacementPlugin(\n"
    targets = "config='acme_one_rest:Config', build='acme_one_rest:One', check='acme_one_rest:check', summary='named')"
    offer("acme-one", "one", source + targets)
    site = Path(sys.path[0])
    (site / "acme_one_rest.py").write_text(
        NAMED.replace("class One(Placement):", "class One(Placement):\n    def __init__(self, config):\n        pass\n")
    )
    declaration = load_declaration("placement", "one")
    assert declaration.summary == "named" and "acme_one_rest" not in sys.modules
    config = load("placement", "one").config
    assert config is sys.modules["acme_one_rest"].Config
    assert type(build("placement", "one", config())).__name__ == "One"
    with pytest.raises(PluginError, match="check of PlacementPlugin names 'acme_one_rest:check'"):
        _ = declaration.check


def test_missing_dependency_at_build_gives_the_command_of_the_extra(offer):
    source = GOOD.replace("lambda config: One()", "lambda config: __import__('zoom')")
    offer("acme-one", "one", source.replace('summary="one worker"', 'summary="", extra="zoom"'))
    with pytest.raises(PluginError, match=r"needs 'zoom', which is not installed; try: pip install 'acme-one\[zoom\]'"):
        build("placement", "one", None)


def test_errors_of_a_builder_keep_their_type_and_name_the_plugin(offer):
    offer("acme-one", "one", GOOD.replace("One()", "1 / 0"))
    with pytest.raises(ZeroDivisionError) as caught:
        build("placement", "one", None)
    assert caught.value.__notes__ == ["in plugin 'one', building the placement"]


def test_a_builder_that_ends_the_process_is_an_error(offer):
    offer("acme-one", "one", GOOD.replace("One()", "exit(3)"))
    with pytest.raises(PluginError, match="building it ended the process: .*acme_one_module.py:.*SystemExit: 3"):
        build("placement", "one", None)


def test_a_component_of_another_kind_is_refused(offer):
    offer("acme-one", "one", GOOD.replace("One()", "config"))
    with pytest.raises(PluginError, match="build returned Config, which does not subclass Placement"):
        build("placement", "one", load("placement", "one").config())


def test_a_name_of_another_kind_says_of_which():
    with pytest.raises(PluginError, match="no model named 'remote'; 'remote' is a plugin of kind engine"):
        load("model", "remote")


def test_a_module_adds_plugins_without_being_installed(tmp_path):
    file = tmp_path / "toy.py"
    file.write_text(GOOD + "\nvla_rl_plugins = {'placement': {'toy': plugin}}\n")
    plugin = load("placement", "toy", [str(file)])
    assert isinstance(plugin, PlacementPlugin)
    assert load("placement", "toy", [str(file)]) is plugin, "a file is imported once"
    assert isinstance(build("placement", "toy", plugin.config(), None, [str(file)]).plan(None, None), Plan)
    assert [name for name, _ in hook_modules([str(file)])] == [str(file)]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "no file .*toy.py"),
        ("\n1 / 0", "cannot be imported: .*toy.py:2: ZeroDivisionError: division by zero"),
        ("import json\njson.loads('{')", "cannot be imported: .*toy.py:2: JSONDecodeError"),
        ("\ndef f(:", "cannot be imported: .*toy.py:2: SyntaxError: invalid syntax"),
        ("import sys\nsys.exit(3)", "cannot be imported: .*toy.py:2: SystemExit: 3; it must not end the process"),
        ("import sys\nsys.exit()", "cannot be imported: .*toy.py:2: SystemExit: ; it must not end the process"),
        ("import zoom", "needs 'zoom', which is not installed"),
        (
            "import torch\ntorch.set_default_dtype(torch.float64)",
            "module .*toy.py' sets torch's default dtype to torch.float64, for simulators and models of others, too",
        ),
        ("vla_rl_plugins = {'envs': {}}", "has 'envs'; did you mean 'env'.; kinds are model, engine"),
        ("vla_rl_plugins = 42", "vla_rl_plugins of module .*toy.py is 42; it must be a dict"),
        (
            "vla_rl_plugins = {'env': ['t2']}",
            r"vla_rl_plugins of module .*toy.py, 'env': is \['t2'\]; it must be a dict",
        ),
        ("vla_rl_plugins = {'env': {'t2': 42}}", "'env': 't2' is 42; name an instance of vla_rl.EnvPlugin there"),
        ("vla_rl_plugins = {'env': {3: 4}}", "'env': 3 is not a plugin name; names are strings"),
        (
            "from vla_rl import EnvPlugin\nEnvPlugin(config=int, build=3, summary='')",
            "toy.py:2: TypeError: build=3 of EnvPlugin is neither a class or function nor the name of one; give its name",
        ),
        (
            "from vla_rl import EnvPlugin\nEnvPlugin(config=int, build='toy.build', summary='')",
            "toy.py:2: TypeError: build='toy.build' of EnvPlugin is neither .*'package.module:attribute'",
        ),
        (
            "from vla_rl import TrainerPlugin\nTrainerPlugin(config=int, build=int, summary='')",
            "toy.py:2: TypeError: .*'trains_on'",
        ),
    ],
)
def test_a_module_that_cannot_serve_is_an_error(tmp_path, source, message):
    file = tmp_path / "toy.py"
    if source is not None:
        file.write_text(source)
    with pytest.raises(PluginError, match=message):
        load("placement", "toy", [str(file)])


def test_an_unknown_module_says_how_to_be_found():
    with pytest.raises(PluginError, match="no module named 'not_there.plugins'; give the path"):
        load("env", "toy", ["not_there.plugins"])


def test_missing_requirements_follow_the_extra(offer):
    offer("acme-one", "one", GOOD, requires='Requires-Dist: attrs>=1\nRequires-Dist: vroom>=2; extra == "fast"\n')
    assert missing_requirements("acme-one", None) == []
    assert missing_requirements("acme-one", "fast") == ["vroom>=2"]


def test_the_catalogue_is_light(bare_fork_server):
    code = (
        "import sys, vla_rl.core.catalogue as p; p.installed_plugins('env'); print({'torch', 'ray'} & set(sys.modules))"
    )
    result = bare_fork_server.run_python("-c", code, check=True)
    assert result.stdout.strip() == "set()"

"""Tests that reach a file of the repository, and in how many steps."""

from __future__ import annotations

import pytest

from import_graph import ImportGraph, find_circles

FILES = {
    "pyproject.toml": """
        [project.entry-points."vla_rl.envs"]
        table = "vla_rl.plugins.table:plugin"
        """,
    "src/vla_rl/__init__.py": """
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            from vla_rl.core.spec import load_spec
        """,
    "src/vla_rl/core/spec.py": "",
    "src/vla_rl/core/loop.py": "from vla_rl.core import spec",
    "src/vla_rl/core/late.py": "def f():\n    from vla_rl.core.loop import g",
    "src/vla_rl/core/typed.py": "import typing\nif typing.TYPE_CHECKING:\n    from vla_rl.core.loop import Loop",
    "src/vla_rl/core/data.json": "{}",
    "src/vla_rl/core/table_reader.py": "FILE = FOLDER / 'data.json'",
    "src/vla_rl/plugins/table/__init__.py": "plugin = Plugin(build='vla_rl.plugins.table.env:make_envs')",
    "src/vla_rl/plugins/table/env.py": "COMMAND = f'{__package__}.process'",
    "src/vla_rl/plugins/table/process.py": "",
    "tools/draw.py": "import vla_rl.core.late",
    "examples/one.yaml": "env: {type: table}",
    "tests/core/test_loop.py": "from vla_rl.core.loop import g",
    "tests/core/test_a_loop.py": "from vla_rl.core.loop import g",
    "tests/core/test_late.py": "import vla_rl.core.late",
    "tests/core/test_typed.py": "import vla_rl.core.typed",
    "tests/core/test_lazy.py": "import vla_rl\nvla_rl.load_spec",
    "tests/core/test_reader.py": "import vla_rl.core.table_reader",
    "tests/core/helper.py": "import vla_rl.core.typed",
    "tests/core/conftest.py": "import helper\n@pytest.fixture\ndef train(): ...",
    "tests/core/test_fixture.py": "def test_it(train): ...\ndef test_too(): ...",
    "tests/plugins/test_table.py": "SPEC = {'env': {'type': 'table'}}",
    "tests/plugins/test_example.py": "SPEC = ROOT / 'examples' / 'one.yaml'",
    "tests/plugins/test_text.py": "SPEC = '''\nenv: {type: table}\n'''",
    "tests/tools/test_draw.py": "SCRIPT = ROOT / 'tools' / 'draw.py'",
    "tests/test_pages.py": "PAGES = ROOT.glob('docs/**/*.md')",
    "tests/test_one_page.py": "PAGE = ROOT / 'docs' / 'one.md'",
    "tests/test_words.py": "FILES = (ROOT / 'src').rglob('*.py')",
}


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> ImportGraph:
    root = tmp_path_factory.mktemp("repository")
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text.replace("\n        ", "\n"))
    return ImportGraph(root, deleted=["src/vla_rl/core/helper_of_old.py"])


@pytest.mark.parametrize(
    ("changed", "steps"),
    [
        ("src/vla_rl/core/late.py", {"core/test_late.py": 1, "test_words.py": 1, "tools/test_draw.py": 2}),
        ("src/vla_rl/core/typed.py", {"core/test_typed.py": 1, "test_words.py": 1, "core/test_fixture.py": 3}),
        (
            "src/vla_rl/plugins/table/env.py",
            {
                "plugins/test_table.py": 2,
                "plugins/test_text.py": 2,
                "plugins/test_example.py": 3,
                "test_words.py": 1,
            },
        ),
        (
            "src/vla_rl/plugins/table/process.py",
            {"plugins/test_table.py": 3, "plugins/test_text.py": 3, "plugins/test_example.py": 4, "test_words.py": 1},
        ),
        ("examples/one.yaml", {"plugins/test_example.py": 1}),
        ("tools/draw.py", {"tools/test_draw.py": 1}),
        ("docs/one.md", {"test_pages.py": 1, "test_one_page.py": 1}),
        ("docs/more/two.md", {"test_pages.py": 1}),
        ("src/vla_rl/core/data.json", {"core/test_reader.py": 2, "test_words.py": 1}),
        ("tests/core/test_late.py", {"core/test_late.py": 0}),
        ("tests/core/helper.py", {"core/test_fixture.py": 2}),
        ("src/vla_rl/core/spec.py", {"core/test_lazy.py": 1, "core/test_loop.py": 2, "core/test_late.py": 3}),
    ],
)
def test_tests_reach_a_file_in_a_number_of_steps(graph: ImportGraph, changed: str, steps: dict[str, int]) -> None:
    reached = {test.removeprefix("tests/"): number for test, number in graph.reach_tests([changed]).items()}
    if changed == "src/vla_rl/core/spec.py":
        reached = {test: reached[test] for test in steps}
    assert reached == steps


def test_the_mirroring_test_comes_first_and_distant_ones_last(graph: ImportGraph) -> None:
    order = list(graph.reach_tests(["src/vla_rl/core/loop.py"]))
    assert order[:3] == ["tests/core/test_loop.py", "tests/core/test_a_loop.py", "tests/test_words.py"]
    assert order[-1] == "tests/tools/test_draw.py"
    assert "tests/core/test_typed.py" not in order  # it imports the loop for type checkers alone


def test_tests_that_only_read_a_file_can_be_left_out(graph: ImportGraph) -> None:
    assert list(graph.reach_tests(["src/vla_rl/core/late.py"], reading=False)) == [
        "tests/core/test_late.py",
        "tests/tools/test_draw.py",
    ]


def test_a_conftest_reaches_all_tests_of_its_folder(graph: ImportGraph) -> None:
    reached = graph.reach_tests(["tests/core/conftest.py"])
    assert set(reached) == {test for test in graph.tests if test.startswith("tests/core/")}


def test_a_deleted_module_reaches_what_still_imports_it(graph: ImportGraph) -> None:
    file = graph.root / "tests" / "core" / "test_old.py"
    file.write_text("import vla_rl.core.helper_of_old")
    try:
        known = ImportGraph(graph.root, deleted=["src/vla_rl/core/helper_of_old.py"])
    finally:
        file.unlink()
    assert known.reach_tests(["src/vla_rl/core/helper_of_old.py"], reading=False) == {"tests/core/test_old.py": 1}


def test_the_nearest_tests_of_a_file_are_its_readers_and_those_in_the_fewest_steps(graph: ImportGraph) -> None:
    nearest = graph.find_nearest("src/vla_rl/plugins/table/env.py")
    assert set(nearest) == {"tests/test_words.py", "tests/plugins/test_table.py", "tests/plugins/test_text.py"}
    assert graph.find_nearest("docs/one.md") == ["tests/test_one_page.py", "tests/test_pages.py"]


def test_circles_are_found():
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": {"e"}, "f": {"d"}}
    assert find_circles(edges) == [["a", "b", "c"], ["e"]]

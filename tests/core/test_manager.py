"""Wrapped components and broadcasts: a real component, real wrappers, and what goes wrong with them."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from vla_rl.core.catalogue import KINDS
from vla_rl.core.errors import PluginError
from vla_rl.core.hookspecs import Algorithm, RunEvents, VLAModel, hookimpl
from vla_rl.core.manager import ALL_HOOKS, broadcast, check_module, hook_names, wrap


class Twice(Algorithm):
    """`advantages` doubles its argument; everything else is as simple."""

    needs = frozenset({"groups"})

    @property
    def costly(self) -> int:
        raise AssertionError("evaluated")

    def advantages(self, rollout: Any) -> Any:
        return 2 * rollout

    def loss(self, batch: Any) -> Any:  # leaves `scores` out
        return batch


def module(**functions: Any) -> ModuleType:
    made = ModuleType("toy_module")
    vars(made).update(functions)
    return made


def test_every_hook_belongs_to_one_kind():
    assert len(ALL_HOOKS) == sum(len(hook_names(kind.base)) for kind in KINDS.values())


def test_a_seat_is_its_component():
    algorithm = wrap("algorithm", Twice(), "twice")
    assert algorithm.advantages(21) == 42
    assert algorithm.advantages(rollout=21) == 42
    assert algorithm.loss("scores", "batch") == "batch"
    assert algorithm.loss(batch="b", scores="s") == "b"
    assert algorithm.needs == {"groups"}
    assert algorithm.features(()) is None
    with pytest.raises(AttributeError):
        _ = algorithm.nothing


@pytest.mark.parametrize(("args", "kwargs"), [((), {}), ((1, 2), {}), ((1,), {"rollout": 1}), ((), {"other": 1})])
@pytest.mark.parametrize("wrapped", [False, True])
def test_wrong_arguments_are_a_type_error(args, kwargs, wrapped):
    wrappers = {"timer": module(advantages=passing)} if wrapped else {}
    with pytest.raises(TypeError, match=r"advantages\(rollout\) got"):
        wrap("algorithm", Twice(), "twice", wrappers).advantages(*args, **kwargs)


@hookimpl(wrapper=True)
def passing():
    return (yield)


def adding(number: int, calls: list[int]) -> Any:
    @hookimpl(wrapper=True)
    def advantages(rollout):
        calls.append(number)
        return (yield) + number + rollout

    return module(advantages=advantages)


def test_wrappers_go_around_the_first_outermost():
    calls: list[int] = []
    algorithm = wrap("algorithm", Twice(), "twice", {"a": adding(100, calls), "b": adding(1000, calls)})
    assert algorithm.advantages(1) == 2 + (1000 + 1) + (100 + 1)
    assert calls[:2] == [100, 1000]


def test_a_wrapper_of_another_kind_is_left_alone():
    def frames(step):
        return 3

    hooks = module(chunk_step=passing, frames_wanted=hookimpl(frames))
    assert wrap("algorithm", Twice(), "twice", {"hooks": hooks}).advantages(1) == 2


class Broken(Twice):
    def advantages(self, rollout):
        raise ValueError("boom")


@pytest.mark.parametrize("wrappers", [{}, {"timer": module(advantages=passing)}])
def test_an_exception_names_the_component(wrappers):
    with pytest.raises(ValueError, match="boom") as caught:
        wrap("algorithm", Broken(), "toy", wrappers).advantages(1)
    assert caught.value.__notes__ == ["in plugin 'toy', hook 'advantages'"]


@pytest.mark.parametrize("late", [False, True])
def test_an_exception_names_the_wrapper_that_raised_it(late):
    @hookimpl(wrapper=True)
    def advantages():
        if not late:
            raise ValueError("mine")
        yield
        raise ValueError("mine")

    wrappers = {"outer": module(advantages=passing), "inner": module(advantages=advantages)}
    with pytest.raises(ValueError, match="mine") as caught:
        wrap("algorithm", Twice(), "toy", wrappers).advantages(1)
    assert caught.value.__notes__ == ["in plugin 'inner', hook 'advantages'"]


def test_a_wrapper_may_handle_an_exception():
    @hookimpl(wrapper=True)
    def advantages():
        try:
            return (yield)
        except ValueError:
            return "handled"

    assert wrap("algorithm", Broken(), "toy", {"net": module(advantages=advantages)}).advantages(1) == "handled"


def test_a_wrapper_yields_once():
    @hookimpl(wrapper=True)
    def never():
        if False:
            yield

    @hookimpl(wrapper=True)
    def twice():
        yield
        yield

    with pytest.raises(PluginError, match="wrapper 'w' of hook 'advantages' returned without a `yield`"):
        wrap("algorithm", Twice(), "toy", {"w": module(advantages=never)}).advantages(1)
    with pytest.raises(PluginError, match="wrapper 'w' of hook 'advantages' has a second `yield`"):
        wrap("algorithm", Twice(), "toy", {"w": module(advantages=twice)}).advantages(1)


def with_method(**methods: Any) -> Algorithm:
    return type("Odd", (Twice,), methods)()


def test_a_signature_that_does_not_fit_is_refused_with_its_place():
    where = rf"plugin 'odd', hook 'advantages' \({__file__}:\d+\): "
    for method, message in [
        (
            lambda self, rolout: 0,
            where + r"unknown argument 'rolout'; did you mean 'rollout'\?; it is advantages\(rollout",
        ),
        (lambda self, rollout=None: 0, where + "arguments must have no defaults"),
        (lambda self, *args: 0, where + r"name the arguments, of \(rollout\)"),
        (lambda self, *, rollout: 0, where + "name the arguments"),
    ]:
        with pytest.raises(PluginError, match=message):
            wrap("algorithm", with_method(advantages=method), "odd")
    with pytest.raises(PluginError, match="loss must be a method, not int"):
        wrap("algorithm", with_method(loss=3), "odd")
    with pytest.raises(PluginError, match="select must be a method, not property"):
        wrap("algorithm", with_method(select=property(lambda self: 0)), "odd")


@pytest.mark.parametrize(
    ("name", "function", "message"),
    [
        ("advantage", hookimpl(wrapper=True)(lambda: (yield)), "unknown hook; did you mean 'advantages'?"),
        ("advantages", hookimpl(lambda rollout: rollout), "only wrappers go around a component"),
        ("advantages", hookimpl(wrapper=True)(lambda rollout: rollout), "must `yield` once"),
        ("advantages", hookimpl(hookwrapper=True)(lambda: (yield)), "instead of hookwrapper=True"),
    ],
)
def test_a_wrapper_that_is_none_is_refused(name, function, message):
    with pytest.raises(PluginError) as caught:
        wrap("algorithm", Twice(), "toy", {"bad": module(**{name: function})})
    assert message in str(caught.value)
    assert "plugin 'bad'" in str(caught.value)


def test_no_result_is_an_error_where_the_contract_has_one():
    with pytest.raises(PluginError, match="plugin 'odd', hook 'advantages' returned None; it must return Advantages"):
        wrap("algorithm", with_method(advantages=lambda self: None), "odd").advantages(1)


def test_no_result_is_true_where_the_contract_says_bool():
    class Model(VLAModel):
        sample_chunk = chunk_log_probs = imitation_loss = lambda self: None

        def save(self, folder):
            folder.append("saved")

    folder: list[str] = []
    assert wrap("model", Model(), "m").save(folder) is True
    assert folder == ["saved"]


def test_trace_prints_every_call(monkeypatch, capsys):
    monkeypatch.setenv("VLA_RL_TRACE", "1")
    assert wrap("algorithm", Twice(), "twice").advantages(3) == 6
    line = capsys.readouterr().err
    assert line.startswith("[vla-rl] algorithm 'twice' advantages(rollout=3) -> 6 ")


class Listener(RunEvents):
    def __init__(self, heard: list[Any], name: str, frames: int = 0):
        self.heard, self.name, self.frames = heard, name, frames

    def on_checkpoint(self, step):
        self.heard.append((self.name, step))

    def frames_wanted(self, step):
        return self.frames


def test_everyone_hears_in_order_and_the_largest_wish_wins():
    heard: list[Any] = []
    heard_in_module = hookimpl(lambda step: heard.append(("module", step)))
    events = broadcast(
        [
            ("a", Listener(heard, "a")),
            ("a", Listener(heard, "b", frames=4)),
            ("m", module(on_checkpoint=heard_in_module, helper=3)),
        ]
    )
    events.on_checkpoint(None, 7, None)
    assert heard == [("a", 7), ("b", 7), ("module", 7)]
    assert events.frames_wanted(0) == 4
    assert broadcast([]).frames_wanted(0) == 0


def test_a_listener_that_raises_is_named():
    class Deaf(RunEvents):
        def on_run_end(self, results):
            raise OSError("full")

    with pytest.raises(OSError, match="full") as caught:
        broadcast([("video", Deaf()), ("video", Listener([], "x"))]).on_run_end(None, {})
    assert caught.value.__notes__ == ["in plugin 'video', hook 'on_run_end'"]


def test_a_misspelt_event_is_refused():
    class Misspelt(RunEvents):
        def on_udpate_end(self, step):
            raise AssertionError

    with pytest.raises(PluginError, match=r"'on_udpate_end' .*no such event; did you mean 'on_update_end'"):
        broadcast([("odd", Misspelt())])


def test_one_object_registers_once():
    listener = Listener([], "a")
    with pytest.raises(PluginError, match="plugin 'a' is registered twice"):
        broadcast([("a", listener), ("b", listener)])


def test_a_bare_call_costs_microseconds():
    import timeit

    algorithm = wrap("algorithm", Twice(), "twice")
    assert min(timeit.repeat(lambda: algorithm.advantages(1), number=1000, repeat=5)) < 0.1, "100 us a call is a bug"


MODULE = """
from vla_rl import hookimpl

@hookimpl
def on_update_end(step): ...

@hookimpl(wrapper=True)
def advantages(rollout):
    return (yield)

def helper(): ...
"""


def written(text: str) -> ModuleType:
    made = ModuleType("toy_module")
    exec(compile(text, "toy.py", "exec"), vars(made))
    for value in vars(made).values():
        if hasattr(value, "__code__") and value.__code__.co_filename == "toy.py":
            value.__module__ = "toy_module"
    return made


def test_a_module_of_good_hooks_passes():
    check_module("toy", written(MODULE))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("def on_update_end", "def on_updat_end", "toy.py:4.: unknown hook; did you mean 'on_update_end'"),
        ("(step)", "(stp)", "hook 'on_update_end' .toy.py:4.: unknown argument 'stp'; did you mean 'step'"),
        ("advantages(rollout)", "advantages(rolout)", "hook 'advantages' .toy.py:7.: unknown argument 'rolout'"),
        ("@hookimpl\n", "", "hook 'on_update_end' .toy.py:4.: it is called by nobody; put @hookimpl before it"),
    ],
)
def test_a_module_whose_hooks_would_not_be_called_is_refused(old, new, message):
    with pytest.raises(PluginError, match=message):
        check_module("toy", written(MODULE.replace(old, new)))

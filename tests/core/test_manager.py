"""Wrapped components and broadcasts: a real component, real wrappers, and what goes wrong with them."""

from __future__ import annotations

import copy
import json
from types import ModuleType
from typing import Any

import pytest

from vla_rl.core.catalogue import KINDS, Kind
from vla_rl.core.declarations import Declaration, EnvPlugin
from vla_rl.core.errors import HookFailed, PluginError, UserError, WorkerDied
from vla_rl.core.hookspecs import Algorithm, PolicyEngine, RunEvents, SimEnv, VLAModel, hookspec
from vla_rl.core.interrupts import StopAtOnce
from vla_rl.core.manager import broadcast, check_module, hook_names, hookimpl, unwrap_component, wrap
from vla_rl.core.types import Requirements


class Twice(Algorithm):
    """`advantages` doubles its argument; everything else is as simple."""

    needs = Requirements(groups=True)

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


def test_a_seat_is_its_component():
    algorithm = wrap("algorithm", Twice(), "twice")
    assert algorithm.advantages(21) == 42
    assert algorithm.advantages(rollout=21) == 42
    assert algorithm.loss("scores", "batch") == "batch"
    assert algorithm.loss(batch="b", scores="s") == "b"
    assert algorithm.needs == Requirements(groups=True)
    assert algorithm.features(()) is None
    with pytest.raises(AttributeError):
        _ = algorithm.nothing


def test_arguments_are_changed_before_wrappers_and_methods_see_them():
    seen = []

    @hookimpl(wraps="algorithm")
    def loss(scores, batch):
        seen.append((scores, batch))
        return (yield)

    functions = {"batch": str.upper}
    for wrappers in ({}, {"watch": module(loss=loss)}):
        algorithm = wrap("algorithm", Twice(), "twice", wrappers, functions)
        assert algorithm.loss("scores", "batch") == algorithm.loss(batch="batch", scores="scores") == "BATCH"
        assert algorithm.advantages(21) == 42
        with pytest.raises(TypeError, match=r"loss\(scores, batch\) got"):
            algorithm.loss("scores")
    assert seen == [("scores", "BATCH")] * 2


@pytest.mark.parametrize(("args", "kwargs"), [((), {}), ((1, 2), {}), ((1,), {"rollout": 1}), ((), {"other": 1})])
@pytest.mark.parametrize("wrapped", [False, True])
def test_wrong_arguments_are_a_type_error(args, kwargs, wrapped):
    wrappers = {"timer": module(advantages=passing)} if wrapped else {}
    with pytest.raises(TypeError, match=r"advantages\(rollout\) got"):
        wrap("algorithm", Twice(), "twice", wrappers).advantages(*args, **kwargs)


def around():
    return (yield)


passing = hookimpl(wraps="algorithm")(around)


def adding(number: int, calls: list[int]) -> Any:
    @hookimpl(wraps="algorithm")
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

    hooks = module(chunk_step=hookimpl(wraps="env")(around), frames_wanted=hookimpl(frames))
    assert wrap("algorithm", Twice(), "twice", {"hooks": hooks}).advantages(1) == 2


class World:
    """A kind of plugin that shares the names of two methods with simulators and models."""

    @hookspec(firstresult=True)
    def reset(self, frames: Any) -> Any:
        raise UserError("World has no reset")

    @hookspec(firstresult=True)
    def weights(self) -> Any:
        raise UserError("World has no weights")


class Dream(World):
    def reset(self, frames):
        return ["dream", *frames]


class Still(SimEnv):
    """Env whose `reset` has other arguments than the hook."""

    reset_states = chunk_step = lambda self: None

    def reset(self, env_ids, seed):
        return ["still", env_ids, seed]


@pytest.fixture
def world(monkeypatch):
    monkeypatch.setitem(KINDS, "world", Kind("world", "vla_rl.worlds", Declaration, f"{__name__}:World"))


def test_two_kinds_may_have_a_hook_of_one_name(world):
    @hookimpl(wraps="world")
    def reset(frames):
        return [*(yield), len(frames)]

    hooks = module(reset=reset)
    check_module("hooks", hooks)
    assert wrap("world", Dream(), "dream", {"hooks": hooks}).reset((1, 2)) == ["dream", 1, 2, 2]
    assert wrap("env", Still(), "still", {"hooks": hooks}).reset("envs", "ids", "seed") == ["still", "envs", "seed"]


def test_errors_name_the_kind(world):
    with pytest.raises(UserError, match="World has no weights") as caught:
        wrap("world", Dream(), "dream").weights()
    assert caught.value.__notes__ == ["in plugin 'dream', hook 'weights' of world"]

    @hookimpl(wraps="world")
    def reset(env_ids):
        yield

    with pytest.raises(
        PluginError, match=r"hook 'reset' of world \(.*: unknown argument 'env_ids'; it is reset\(frames\)"
    ):
        check_module("hooks", module(reset=reset))


def test_whose_method_a_function_goes_around_is_said(world):
    both = r"unknown hook; to go around that method, say @hookimpl\(wraps='env'\) or @hookimpl\(wraps='world'\)"
    with pytest.raises(PluginError, match=r"hook 'reset' \(" + ".*" + both):
        check_module("hooks", module(reset=hookimpl(lambda: (yield))))
    with pytest.raises(PluginError, match=r"hook 'reset' of model \(" + ".*" + both):
        check_module("hooks", module(reset=hookimpl(wraps="model")(lambda: (yield))))
    with pytest.raises(
        PluginError, match=r"no kind of plugin is called 'wrold'; there are: model, engine, env, .*, world"
    ):
        check_module("hooks", module(reset=hookimpl(wraps="wrold")(lambda: (yield))))


class Older:
    """A kind of plugin with an argument and a hook that the next minor version drops."""

    @hookspec(firstresult=True, warn_on_impl_args={"pixels": FutureWarning("`pixels` goes in 0.3; use `frames`")})
    def reset(self, frames: Any, pixels: Any) -> Any:
        return None

    @hookspec(firstresult=True, warn_on_impl=FutureWarning("`pause` goes in 0.3; `close` replaces it"))
    def pause(self) -> None:
        return None


class WithFrames(Older):
    def reset(self, frames):
        return frames


class WithPixels(Older):
    def reset(self, frames, pixels):
        return (frames, pixels)


class Pausing(WithFrames):
    def pause(self):
        return None


@hookimpl(wraps="older")
def reset_around(pixels):
    return [*(yield), pixels]


@pytest.mark.parametrize(
    ("component", "wrappers", "message", "line"),
    [
        (WithPixels(), {}, "`pixels` goes in 0.3; use `frames`", WithPixels.reset),
        (WithFrames(), {"hooks": {"reset": reset_around}}, "`pixels` goes in 0.3; use `frames`", reset_around),
        (Pausing(), {}, "`pause` goes in 0.3; `close` replaces it", Pausing.pause),
        (WithFrames(), {}, None, None),
    ],
)
def test_an_author_is_warned_of_a_deprecated_argument_or_hook(monkeypatch, recwarn, component, wrappers, message, line):
    """At the line of the implementation; the contract's own methods, which every component inherits, warn of nothing."""
    monkeypatch.setitem(KINDS, "older", Kind("older", "vla_rl.older", EnvPlugin, f"{__name__}:Older"))
    modules = {name: module(**functions) for name, functions in wrappers.items()}
    assert wrap("older", component, "old", modules).reset((1, 2), 3)
    places = [(str(w.message), w.category, w.filename, w.lineno) for w in recwarn]
    expected = [] if line is None else [(message, FutureWarning, __file__, line.__code__.co_firstlineno)]
    assert places == expected


class Broken(Twice):
    def advantages(self, rollout):
        raise ValueError("boom")


@pytest.mark.parametrize("wrappers", [{}, {"timer": module(advantages=passing)}])
def test_an_exception_names_the_component(wrappers):
    with pytest.raises(ValueError, match="boom") as caught:
        wrap("algorithm", Broken(), "toy", wrappers).advantages(1)
    assert caught.value.__notes__ == ["in plugin 'toy', hook 'advantages' of algorithm"]


@pytest.mark.parametrize("late", [False, True])
def test_an_exception_names_the_wrapper_that_raised_it(late):
    @hookimpl(wraps="algorithm")
    def advantages():
        if not late:
            raise ValueError("mine")
        yield
        raise ValueError("mine")

    wrappers = {"outer": module(advantages=passing), "inner": module(advantages=advantages)}
    with pytest.raises(ValueError, match="mine") as caught:
        wrap("algorithm", Twice(), "toy", wrappers).advantages(1)
    assert caught.value.__notes__ == ["in plugin 'inner', hook 'advantages' of algorithm"]


def test_a_wrapper_may_handle_an_exception():
    @hookimpl(wraps="algorithm")
    def advantages():
        try:
            return (yield)
        except ValueError:
            return "handled"

    assert wrap("algorithm", Broken(), "toy", {"net": module(advantages=advantages)}).advantages(1) == "handled"


def test_a_wrapper_yields_once():
    @hookimpl(wraps="algorithm")
    def never():
        if False:
            yield

    @hookimpl(wraps="algorithm")
    def twice():
        yield
        yield

    with pytest.raises(PluginError, match="wrapper 'w', hook 'advantages' of algorithm returned without a `yield`"):
        wrap("algorithm", Twice(), "toy", {"w": module(advantages=never)}).advantages(1)
    with pytest.raises(PluginError, match="wrapper 'w', hook 'advantages' of algorithm has a second `yield`"):
        wrap("algorithm", Twice(), "toy", {"w": module(advantages=twice)}).advantages(1)


def with_method(**methods: Any) -> Algorithm:
    return type("Odd", (Twice,), methods)()


def test_a_signature_that_does_not_fit_is_refused_with_its_place():
    where = rf"plugin 'odd', hook 'advantages' of algorithm \({__file__}:\d+\): "
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
        ("advantage", hookimpl(wraps="algorithm")(lambda: (yield)), "unknown hook; did you mean 'advantages'?"),
        ("advantages", hookimpl(wraps="algorithm")(lambda rollout: rollout), "must `yield` once"),
    ],
)
def test_a_wrapper_that_is_none_is_refused(name, function, message):
    with pytest.raises(PluginError) as caught:
        wrap("algorithm", Twice(), "toy", {"bad": module(**{name: function})})
    assert message in str(caught.value)
    assert "plugin 'bad'" in str(caught.value)


def test_no_result_is_an_error_where_the_contract_has_one():
    where = rf"plugin 'odd', hook 'advantages' of algorithm \({__file__}:\d+\)"
    with pytest.raises(PluginError, match=f"{where} returned None; it must return Advantages"):
        wrap("algorithm", with_method(advantages=lambda self: None), "odd").advantages(1)
    with pytest.raises(PluginError, match=f"{where} returned a tuple of 2; it must return Advantages"):
        wrap("algorithm", with_method(advantages=lambda self: (1, 2)), "odd").advantages(1)


def test_gymnasiums_tuples_are_told_apart():
    env = type("Gym", (Still,), {"reset": lambda self: ("observation", {}), "chunk_step": lambda self: (0,) * 5})()
    with pytest.raises(PluginError, match=r"reset' of env \(.*:\d+\) returned a tuple of 2; .*gymnasium's `reset`"):
        wrap("env", env, "gym").reset(1, 2, 3)
    with pytest.raises(PluginError, match=r"returned a tuple of 5; it must return ChunkResult .*gymnasium's `step`"):
        wrap("env", env, "gym").chunk_step(1, 2, 3)


@pytest.mark.parametrize("returned", [None, (1, 2)])
def test_a_wrapper_that_loses_the_result_is_named(returned):
    @hookimpl(wraps="algorithm")
    def advantages():
        yield
        return returned

    with pytest.raises(PluginError) as caught:
        wrap("algorithm", Twice(), "toy", {"w": module(advantages=advantages)}).advantages(1)
    text = str(caught.value)
    assert f"wrapper 'w', hook 'advantages' of algorithm ({__file__}:" in text
    assert "it must return Advantages: take the result with `result = yield`, and end with `return result`" in text


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_method_without_result_is_called_once(wrapped):
    class Model(VLAModel):
        sample_chunk = chunk_log_probs = imitation_loss = lambda self: None

        def save(self, folder):
            folder.append("saved")

    folder: list[str] = []
    wrappers = {"timer": module(save=hookimpl(wraps="model")(around))} if wrapped else {}
    assert wrap("model", Model(), "m", wrappers).save(folder) is None
    assert folder == ["saved"]


class Pointer(PolicyEngine):
    def act(self, obs):
        return f"chunk for {obs}"


def test_an_engine_is_wrapped_by_hooks_of_its_kind_alone():
    @hookimpl(wraps="engine")
    def act():
        return f"wrapped {(yield)}"

    @hookimpl(wraps="model")
    def values():
        raise AssertionError("an engine is not a model")
        yield

    hooks = module(act=act, values=values)
    wrapped = wrap("engine", Pointer(), "pointer", {"hooks": hooks})
    assert wrapped.act("obs", None, True) == "wrapped chunk for obs"
    assert unwrap_component(wrapped).act("obs") == "chunk for obs"
    with pytest.raises(UserError, match="gives no values"):
        wrapped.values(None)
    with pytest.raises(UserError, match="takes no weights"):
        wrapped.load([])


def test_hooks_of_a_contract_include_inherited_ones():
    assert hook_names(PolicyEngine)[:2] == ("act", "values")
    assert hook_names(Pointer)[:2] == ("values", "load")
    assert {"imitation_loss", "save"} <= set(hook_names(VLAModel))


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


def test_a_wish_that_is_not_a_number_names_the_hook():
    class Films:
        def frames_wanted(self, step):
            return "all"

    with pytest.raises(PluginError, match="hook 'films': frames_wanted returned no whole number"):
        broadcast([("films", Films())]).frames_wanted(0)


def test_a_listener_that_raises_is_named():
    class Deaf(RunEvents):
        def on_run_end(self, results):
            raise OSError("full")

    with pytest.raises(OSError, match="full") as caught:
        broadcast([("video", Deaf()), ("video", Listener([], "x"))]).on_run_end(None, {})
    assert caught.value.__notes__ == ["in plugin 'video', hook 'on_run_end'"]


def test_a_listener_that_fails_is_reported_and_the_others_hear_the_event():
    heard: list[Any] = []
    told: list[HookFailed] = []

    class Deaf(RunEvents):
        def on_checkpoint(self, step):
            raise OSError("full")

    events = broadcast([("a", Deaf()), ("b", Listener(heard, "b"))], told.append)
    events.on_checkpoint(None, 7, None)
    assert heard == [("b", 7)]
    assert len(told) == 1
    assert str(told[0]).startswith(f"hook 'a' failed in on_checkpoint ({__file__}:")
    assert str(told[0]).endswith("OSError: full")
    assert isinstance(told[0].__cause__, OSError)


def test_ctrl_c_in_one_on_close_does_not_keep_another_listener_open():
    closed: list[Any] = []

    class Slow(RunEvents):
        def on_close(self):
            raise StopAtOnce

    class Quick(RunEvents):
        def on_close(self, error):
            closed.append(error)

    error = OSError("full")
    broadcast([("slow", Slow()), ("quick", Quick())], closed.append).on_close(None, error)
    assert closed == [error]


@pytest.mark.parametrize("interrupt", [StopAtOnce, KeyboardInterrupt, WorkerDied])
def test_an_interrupt_by_the_user_or_a_death_is_not_a_failure_of_the_listener_that_it_meets(interrupt):
    class Slow(RunEvents):
        def on_checkpoint(self, step):
            raise interrupt

    with pytest.raises(interrupt):
        broadcast([("a", Slow())], [].append).on_checkpoint(None, 7, None)


def test_what_listeners_share_is_read_only_and_a_dict_otherwise():
    class Spoiler(RunEvents):
        def on_update_end(self, metrics):
            assert json.loads(json.dumps(metrics)) == {**metrics} == copy.deepcopy(metrics) == {"a": 1.0}
            assert metrics | {"b": 2.0} == {"a": 1.0, "b": 2.0}
            for change in (metrics.clear, metrics.popitem, lambda: metrics.update(a=2.0), lambda: metrics.pop("a")):
                with pytest.raises(TypeError, match="make a copy"):
                    change()
            metrics["a"] = 2.0

    metrics = {"a": 1.0}
    with pytest.raises(TypeError, match="read-only"):
        broadcast([("a", Spoiler())]).on_update_end(None, 1, metrics)
    assert metrics == {"a": 1.0}


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

@hookimpl(wraps="algorithm")
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
        (
            "advantages(rollout)",
            "advantages(rolout)",
            "hook 'advantages' of algorithm .toy.py:7.: unknown argument 'rolout'",
        ),
        ("@hookimpl\n", "", "hook 'on_update_end' .toy.py:4.: nothing calls it; put @hookimpl before it"),
    ],
)
def test_a_module_whose_hooks_would_not_be_called_is_refused(old, new, message):
    with pytest.raises(PluginError, match=message):
        check_module("toy", written(MODULE.replace(old, new)))

"""Component wrappers: check components at registration, call them through pluggy hooks, and name them in exceptions.

`wrap` returns a component as its own contract: `env.chunk_step(actions, active, stop)` calls the pluggy hook
`chunk_step`, so `@hookimpl(wraps="env")` functions run around it. `broadcast` does the same for listeners. Each kind of
plugin has its own hooks, so two kinds may have a hook of the same name.

Environment: `VLA_RL_TRACE=1` prints every hook call to stderr.
"""

from __future__ import annotations

import functools
import inspect
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import index
from types import FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, TypeVar, cast, overload

import pluggy

from vla_rl.core import types
from vla_rl.core.catalogue import KINDS
from vla_rl.core.errors import HookFailed, PluginError, UserError, WorkerDied, did_you_mean
from vla_rl.core.events import ReadOnly, Run
from vla_rl.core.hookspecs import RunEvents
from vla_rl.core.interrupts import StopAtOnce

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
Named = Mapping[str, object] | Iterable[tuple[str, object]]

_NOTE = "in plugin "
_mark = pluggy.HookimplMarker("vla_rl")


@overload
def hookimpl(function: F) -> F: ...
@overload
def hookimpl(*, wraps: str) -> Callable[[F], F]: ...
def hookimpl(function: Any = None, *, wraps: str | None = None) -> Any:
    """Mark a function as a listener to the event of its name. With `wraps`, a kind of plugin ("env", "model" ...), mark
    it as a wrapper of the kind's method: it yields once, where the method runs, and returns the result."""
    if function is None:
        return functools.partial(hookimpl, wraps=wraps)
    marked = _mark(function, wrapper=wraps is not None)
    marked.vla_rl_impl["kind"] = wraps or "hook"
    return marked


def hook_names(contract: type) -> tuple[str, ...]:
    """Return the hooks of a contract, inherited ones first, in the order of their declaration."""
    declared = {name: value for base in reversed(contract.__mro__) for name, value in vars(base).items()}
    return tuple(name for name, value in declared.items() if hasattr(value, "vla_rl_spec"))


def with_capabilities(kind: str) -> type:
    """Return a class with all hooks of a kind: those of its contract, and of the capabilities of its components."""
    known = KINDS[kind]
    return type(known.contract_class.__name__, (known.contract_class, *known.capability_classes), {})


def unwrap_component(component: object) -> Any:
    """Return the component itself, where `wrap` returned a proxy of it."""
    return component._component if isinstance(component, _Wrapped) else component  # noqa: SLF001 - of this module


class Manager(pluggy.PluginManager):
    """A plugin manager for one kind. A component's methods implement hooks by their names, without a decorator; modules
    and wrappers mark theirs with `@hookimpl`. A mismatch with the contract is refused with file and line."""

    def __init__(self, kind: str, failed: Callable[[HookFailed], None] | None = None) -> None:
        """Create the manager. `failed` is called with an implementation's error, instead of raising it."""
        super().__init__("vla_rl")
        self.failed = failed
        self.kind = kind
        self.contract = with_capabilities(kind)
        self.add_hookspecs(self.contract)
        methods = {name: inspect.signature(getattr(self.contract, name)) for name in hook_names(self.contract)}
        self.arguments = {name: tuple(method.parameters)[1:] for name, method in methods.items()}
        self._component = False
        self._plugin_name = ""

    def register(self, plugin: object, name: str | None = None, component: bool = False) -> str | None:
        """Register a component (methods count by name) or an object with `@hookimpl` functions. Raise PluginError for a
        second registration, an unknown hook, or an implementation whose signature does not match."""
        self._component = component
        self._plugin_name = name or type(plugin).__name__
        if self.has_plugin(self._plugin_name) or self.is_registered(plugin):
            raise PluginError(f"plugin {self._plugin_name!r} is registered twice")
        if component:
            self._check_capabilities(plugin)
        try:
            result = super().register(plugin, self._plugin_name)
        except pluggy.PluginValidationError as exc:
            raise PluginError(f"plugin {self._plugin_name!r}: {exc}") from exc
        for caller in self.get_hookcallers(plugin) or ():
            for impl in caller.get_hookimpls():
                if impl.plugin is plugin:
                    source = f"{self._plugin_name!r}, {self.describe_hook(caller.name)}"
                    expected = "None" if self.kind == "hook" else self.result_of(caller.name)
                    guarded = (_guarded_wrapper if impl.wrapper else _guard_function)(impl.function, source, expected)
                    if self.failed is not None:
                        guarded = _report_failures(guarded, self._plugin_name, caller.name, self.failed)
                    cast(Any, impl).function = guarded
        return result

    def parse_hookimpl_opts(self, plugin: object, name: str) -> Any:
        """Return pluggy's options if an attribute implements a hook, else None. Properties are never evaluated."""
        if name.startswith("__"):
            return None
        static = inspect.getattr_static(plugin, name, None)
        function = static.__func__ if isinstance(static, staticmethod | classmethod | MethodType) else static
        options = getattr(function, "vla_rl_impl", None) if isinstance(function, FunctionType) else None
        if options is None and self._component:
            if name in self.arguments:
                options = {"kind": self.kind}
            elif name.startswith("on_") and "on_run_end" in self.arguments and isinstance(function, FunctionType):
                self._refuse_hook(name, function, f"no such event{did_you_mean(name, self.arguments)}")
        if options is None:
            return None
        if not isinstance(function, FunctionType):
            raise PluginError(f"plugin {self._plugin_name!r}: {name} must be a method, not {type(static).__name__}")
        kind = options["kind"]
        if kind not in KINDS:
            self._refuse_hook(name, function, f"no kind of plugin is called {kind!r}; there are: {', '.join(KINDS)}")
        if kind != self.kind:
            return None
        if name not in self.arguments:
            self._refuse_hook(name, function, f"unknown hook{self._suggest_hook(name)}")
        self._check_signature(name, function, getattr(plugin, name), options)
        return dict(options)

    def _check_capabilities(self, component: object) -> None:
        """Raise PluginError for a method of a capability that the component does not inherit, and for an attribute
        that one of its capabilities lacks. Python itself sees to methods that are missing."""
        who = f"plugin {self._plugin_name!r}: {type(component).__name__}"
        for capability in KINDS[self.kind].capability_classes:
            if isinstance(component, capability):
                lacking = [name for name in inspect.get_annotations(capability) if not hasattr(component, name)]
                if lacking:
                    raise PluginError(
                        f"{who} inherits vla_rl.{capability.__name__} and has no attribute {', '.join(lacking)}; set it"
                    )
                continue
            methods = [name for name, value in vars(capability).items() if hasattr(value, "vla_rl_spec")]
            stray_methods = [name for name in methods if inspect.getattr_static(component, name, None) is not None]
            if stray_methods:
                raise PluginError(
                    f"{who} has {', '.join(stray_methods)} and does not inherit vla_rl.{capability.__name__}, so no "
                    f"one would call it; inherit that class, whose methods are {', '.join(methods)}, or choose another "
                    f"name"
                )

    def _verify_hook(self, hook: pluggy.HookCaller, hookimpl: pluggy.HookImpl) -> None:
        # A component inherits the contract's own optional methods. They count as implementations, but their author is
        # not the one to be warned of a deprecated hook or argument.
        if not hasattr(hookimpl.function, "vla_rl_spec"):
            super()._verify_hook(hook, hookimpl)

    def describe_hook(self, hook: str) -> str:
        """Format a hook for messages. Hooks of components carry their kind, as another kind may have an equal one."""
        return f"hook {hook!r}" + ("" if self.kind == "hook" else f" of {self.kind}")

    def result_of(self, hook: str) -> str:
        """Return the contract's return annotation of a hook."""
        return str(inspect.signature(getattr(self.contract, hook)).return_annotation)

    def _suggest_hook(self, hook: str) -> str:
        """Suggest what to do about a hook name that this kind does not have."""
        decorators = [f"@hookimpl(wraps={kind!r})" for kind in KINDS if hook in hook_names(with_capabilities(kind))]
        return (
            f"; to go around that method, say {' or '.join(decorators)}"
            if decorators
            else did_you_mean(hook, self.arguments)
        )

    def _check_signature(
        self, hook: str, function: FunctionType, bound: Callable[..., Any], options: Mapping[str, Any]
    ) -> None:
        parameters = list(inspect.signature(bound).parameters.values())
        argument_names = self.arguments[hook]
        unknown = [p.name for p in parameters if p.name not in argument_names]
        if any(p.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD for p in parameters):
            self._refuse_hook(hook, function, f"name the arguments, of ({', '.join(argument_names)}); no * and no /")
        if unknown:
            near = did_you_mean(unknown[0], argument_names)
            self._refuse_hook(
                hook, function, f"unknown argument {unknown[0]!r}{near}; it is {hook}({', '.join(argument_names)})"
            )
        if any(p.default is not inspect.Parameter.empty for p in parameters):
            self._refuse_hook(hook, function, "arguments must have no defaults; core always passes them")
        if options.get("wrapper") and not inspect.isgeneratorfunction(function):
            self._refuse_hook(hook, function, "a wrapper must `yield` once (and return the result)")

    def _refuse_hook(self, hook: str, function: FunctionType, problem: str) -> None:
        _refuse_function(f"plugin {self._plugin_name!r}, {self.describe_hook(hook)}", function, problem)


class _Wrapped:
    """Proxy of a component: hooks are calls through the manager, all other attributes are the component's."""

    def __init__(self, component: object, calls: Mapping[str, Callable[..., Any]]) -> None:
        self.__dict__.update(calls)
        self.__dict__["_component"] = component

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # `isinstance` asks what the component is
        return type(self._component)

    def __getattr__(self, name: str) -> Any:
        if name == "_component" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._component, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._component, name, value)

    def __repr__(self) -> str:
        return f"wrapped {self._component!r}"


def wrap(
    kind: str,
    component: T,
    name: str,
    wrappers: Named = (),
    arguments: Mapping[str, Callable[[Any], Any]] = MappingProxyType({}),
) -> T:
    """Return the component as its contract, in `wrappers` (of `@hookimpl(wraps=kind)` functions, outermost first).
    Raise PluginError for other signatures, or later for None or a tuple where the contract has an object.

    Args:
        arguments: name of an argument -> function of its value, whose result methods and wrappers get instead.
    """
    manager = Manager(kind)
    manager.register(component, name, component=True)
    for wrapper_name, wrapper in reversed(_with_unique_names(wrappers)):
        manager.register(wrapper, wrapper_name)
    trace = _trace_calls(manager, f"{kind} {name!r}")
    hooks = {caller.name for caller in manager.get_hookcallers(component) or ()}
    calls = {hook: _build_call(manager, hook, trace) for hook in manager.arguments if hook in hooks}
    if arguments:
        names = manager.arguments
        calls = {hook: _with_arguments(call, hook, names[hook], arguments) for hook, call in calls.items()}
    return cast(T, _Wrapped(component, calls))


def check_module(name: str, module: ModuleType) -> None:
    """Raise PluginError unless the module's `@hookimpl` functions match the hooks that they name, of whatever kind. A
    function that has an event's name but no `@hookimpl` is refused too: nothing would call it."""
    for kind in KINDS:
        Manager(kind).register(module, name)
    for event in hook_names(RunEvents):
        function = vars(module).get(event)
        if (
            isinstance(function, FunctionType)
            and function.__module__ == module.__name__
            and not hasattr(function, "vla_rl_impl")
        ):
            _refuse_function(
                f"plugin {name!r}, hook {event!r}",
                function,
                "nothing calls it; put @hookimpl before it, or give it another name",
            )


def _largest_answer(answers: Iterable[Any], listeners: Iterable[tuple[str, object]]) -> int:
    """Return the largest answer of `frames_wanted`. Raises PluginError for one that is not a number."""
    try:
        return max((index(answer) for answer in answers), default=0)
    except TypeError as exc:
        names = [name for name, listener in listeners if hasattr(listener, "frames_wanted")]
        raise PluginError(
            f"hook {' or '.join(map(repr, names))}: frames_wanted returned no whole number ({exc}); return of how many "
            f"evaluation episodes it wants the frames, 0 for none"
        ) from exc


def broadcast(listeners: Named, failed: Callable[[HookFailed], None] | None = None) -> RunEvents:
    """Return one `RunEvents` that passes every event to each listener, in their order. An exception of a listener
    carries a note with its name. With `failed`, that is called with the exception instead, and the other listeners
    still receive the event. Objects implement events by method name, modules by `@hookimpl`. `frames_wanted` returns
    the largest answer. Listeners receive dicts as read-only copies."""
    manager = Manager("hook", failed)
    pairs = list(_with_unique_names(listeners))
    for name, listener in reversed(pairs):
        manager.register(listener, name, component=not isinstance(listener, ModuleType))
    _trace_calls(manager, "event")
    calls = {hook: _through_pluggy(manager, hook) for hook in manager.arguments}
    wishes = calls["frames_wanted"]
    calls["frames_wanted"] = lambda *args, **kwargs: _largest_answer(wishes(*args, **kwargs), pairs)
    return cast(RunEvents, _Wrapped(manager, calls))


@contextmanager
def open_listeners(events: RunEvents, run: Run) -> Iterator[None]:
    """Call `on_run_start`, and `on_close` however the block ends."""
    try:
        events.on_run_start(run)
        yield
    except BaseException as exc:
        events.on_close(run, exc)
        raise
    events.on_close(run, None)


# ------------------------------------------------------------------------------------------------ internal


def _refuse_function(source: str, function: FunctionType, problem: str) -> None:
    code = function.__code__
    raise PluginError(f"{source} ({code.co_filename}:{code.co_firstlineno}): {problem}")


def _with_unique_names(named: Named) -> list[tuple[str, object]]:
    """Return (name, plugin) pairs with unique names: a second `video` becomes `video#2`."""
    pairs: list[tuple[str, object]] = []
    counts: dict[str, int] = {}
    for name, plugin in named.items() if isinstance(named, Mapping) else named:
        counts[name] = counts.get(name, 0) + 1
        pairs.append((name if counts[name] == 1 else f"{name}#{counts[name]}", plugin))
    return pairs


def _build_call(manager: Manager, hook: str, trace: bool) -> Callable[..., Any]:
    """Return the callable of one hook of a wrapped component. It calls the method directly if nothing wraps it."""
    impls = getattr(manager.hook, hook).get_hookimpls()
    component = impls[0]  # wrappers come after
    if len(impls) > 1 or trace:
        return _through_pluggy(manager, hook)
    names = manager.arguments[hook]
    function = component.function
    chosen = None if component.argnames == names else tuple(names.index(argument) for argument in component.argnames)

    def call_directly(*args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != len(names):
            args = tuple(_bind_arguments(hook, names, args, kwargs).values())
        return function(*args) if chosen is None else function(*[args[i] for i in chosen])

    return call_directly


def _through_pluggy(manager: Manager, hook: str) -> Callable[..., Any]:
    names, caller, shared = manager.arguments[hook], getattr(manager.hook, hook), manager.kind == "hook"

    def call_hook(*args: Any, **kwargs: Any) -> Any:
        arguments = _bind_arguments(hook, names, args, kwargs)
        if shared:
            arguments = {name: ReadOnly(value) if type(value) is dict else value for name, value in arguments.items()}
        return caller(**arguments)

    return call_hook


def _with_arguments(
    call: Callable[..., Any], hook: str, names: tuple[str, ...], functions: Mapping[str, Callable[[Any], Any]]
) -> Callable[..., Any]:
    """Return the callable of a hook that applies functions to its arguments first."""

    def call_with_changes(*args: Any, **kwargs: Any) -> Any:
        values = _bind_arguments(hook, names, args, kwargs)
        return call(*(functions[name](value) if name in functions else value for name, value in values.items()))

    return call_with_changes


def _bind_arguments(
    hook: str, names: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    arguments = dict(zip(names, args, strict=False)) | dict(kwargs)
    if len(args) + len(kwargs) != len(names) or arguments.keys() != set(names):
        raise TypeError(f"{hook}({', '.join(names)}) got {len(args)} positional arguments and {sorted(kwargs)}")
    return {name: arguments[name] for name in names}


def _source_location(function: Callable[..., Any]) -> str:
    """Return the source location of a function, " (FILE:LINE)", or an empty text if unknown."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"


def _formatted_result(result: object) -> str:
    """Describe a wrong return value for messages."""
    return f"a tuple of {len(result)}" if isinstance(result, tuple) else "None"


def _result_hint(result: object, expected: str) -> str:
    if not isinstance(result, tuple) or expected not in ("Observation", "ChunkResult"):
        return ""
    method = "reset" if expected == "Observation" else "step"
    return f" (gymnasium's `{method}` returns a tuple; vla-rl's objects have names: from vla_rl import {expected})"


def _note_source(exc: BaseException, source: str) -> None:
    if not any(note.startswith(_NOTE) for note in getattr(exc, "__notes__", ())):
        exc.add_note(_NOTE + source)


def _guard_function(function: Callable[..., Any], source: str, expected: str) -> Callable[..., Any]:
    """Note the place in exceptions; refuse None and tuples where the contract (`expected`, annotation) has objects."""
    kind = getattr(types, expected, None)
    is_object = "None" not in expected and "Any" not in expected

    @functools.wraps(function)
    def call_guarded(*args: Any) -> Any:
        try:
            result = function(*args)
        except BaseException as exc:
            _note_source(exc, source)
            raise
        if is_object and (result is None or (kind is not None and isinstance(result, tuple))):
            raise PluginError(
                f"plugin {source}{_source_location(function)} returned {_formatted_result(result)}; it must return "
                f"{expected}{_result_hint(result, expected)}"
            )
        return result

    return call_guarded


def _report_failures(
    function: Callable[..., Any], name: str, hook: str, failed: Callable[[HookFailed], None]
) -> Callable[..., Any]:
    """Wrap a listener so that `failed` gets its exceptions, but for a user's interrupt and the death of a worker."""

    @functools.wraps(function)
    def call_listener(*args: Any) -> Any:
        try:
            return function(*args)
        except BaseException as exc:
            if isinstance(exc, StopAtOnce | WorkerDied) and hook == "on_close":
                return None  # what this listener waits for is left out; the others close, too
            ctrl_c_raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # Python's default
            if isinstance(exc, StopAtOnce | WorkerDied) or (isinstance(exc, KeyboardInterrupt) and ctrl_c_raises):
                raise
            error = HookFailed(_describe_failure(inspect.unwrap(function), name, hook, exc))
            error.__cause__ = exc
            failed(error)
            return None

    return call_listener


def _describe_failure(function: Callable[..., Any], name: str, hook: str, exc: BaseException) -> str:
    """Describe a listener's exception, with the last line of the listener's own code in the traceback."""
    if isinstance(exc, UserError):
        return f"hook {name!r}, {hook}: {exc}"
    code = function.__code__
    folder = os.path.dirname(code.co_filename)  # noqa: PTH120 - as it is, not resolved
    lines = traceback.extract_tb(exc.__traceback__)
    listener_lines = [(line.filename, line.lineno) for line in lines if os.path.dirname(line.filename) == folder]  # noqa: PTH120
    file, number = listener_lines[-1] if listener_lines else (code.co_filename, code.co_firstlineno)
    description = f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__
    return f"hook {name!r} failed in {hook} ({file}:{number}): {description}"


def _guarded_wrapper(function: Callable[..., Any], source: str, expected: str) -> Callable[..., Any]:
    """Guard a wrapper: add a note to exceptions that it raises itself (not those that pass through it), and refuse a
    wrapper that loses the result. `expected` is the contract's return annotation of the method."""
    kind = getattr(types, expected, None)

    @functools.wraps(function)
    def run_guarded(*args: Any) -> Generator[None, Any, Any]:
        inner = function(*args)
        result: Any = None
        try:
            try:
                next(inner)
            except StopIteration:
                raise PluginError(f"wrapper {source} returned without a `yield`") from None
            try:
                result = yield
            except BaseException as exc:
                inner.throw(exc)
            else:
                inner.send(result)
        except StopIteration as stop:
            result_lost = stop.value is None and result is not None and "None" not in expected
            if result_lost or (kind is not None and isinstance(stop.value, tuple)):
                raise PluginError(
                    f"wrapper {source}{_source_location(function)} returned {_formatted_result(stop.value)}, not what "
                    f"it went around; it must return {expected}: take the result with `result = yield`, and end with "
                    "`return result`"
                ) from None
            return stop.value
        except BaseException as exc:
            _note_source(exc, source)
            raise
        inner.close()
        raise PluginError(f"wrapper {source} has a second `yield`")

    return run_guarded


def _trace_calls(manager: Manager, manager_name: str) -> bool:
    if os.environ.get("VLA_RL_TRACE", "0") in ("", "0"):
        return False
    started: list[float] = []

    def print_call(outcome: Any, hook: str, impls: Any, kwargs: Mapping[str, Any]) -> None:
        took = 1e3 * (time.perf_counter() - started.pop())
        result = type(outcome.exception).__name__ if outcome.exception else _describe_value(outcome.get_result())
        arguments = ", ".join(f"{key}={_describe_value(value)}" for key, value in kwargs.items())
        print(f"[vla-rl] {manager_name} {hook}({arguments}) -> {result} {took:.2f} ms", file=sys.stderr)

    manager.add_hookcall_monitoring(lambda *call: started.append(time.perf_counter()), print_call)
    return True


def _describe_value(value: object) -> str:
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"{str(getattr(value, 'dtype', '')).removeprefix('torch.')}{list(shape)}"
    return repr(value) if isinstance(value, bool | int | float | str | None) else type(value).__name__

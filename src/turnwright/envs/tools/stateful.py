"""Stateful tools, their lifetimes, the tools of one episode, and what the row of a task sets of
them.

`StatefulTool` is what a user writes, `stateful_source` reads a class of tools, and `ToolSet.open`
opens the tools of an episode. `RowArguments` is the column `tools_kwargs` of a row.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any, Literal, Protocol, runtime_checkable

from turnwright.envs.row_messages import read_tools
from turnwright.envs.scripted_play import maybe_await
from turnwright.envs.threads import run_in_thread
from turnwright.envs.tools.results import (
    Content,
    ResultLimit,
    ToolResult,
    join_content,
    read_content,
    read_result,
)
from turnwright.envs.tools.tool import Tool, Tools, as_tool, takes_self
from turnwright.envs.tools.tool_schema import ToolSchemaError, row_parameters, tool_signature
from turnwright.envs.user_code import as_number, call_user, failure_kind
from turnwright.errors import (
    TaskError,
    ToolFailure,
    TurnwrightError,
    class_name,
    suggest_or_list,
    words,
)
from turnwright.types import FailureKind, Message, Task

Lifetime = Literal["trajectory", "call"]

RESERVED_METHODS = ("create", "calc_reward", "release")
"""Lifetime methods, which the model cannot call."""

PHASES = ("create", "execute", "calc_reward", "release")
"""Methods for which a row can have arguments."""


class StatefulTool:
    """Tool with state: `create`, `execute`, `calc_reward`, `release`. Pass the class; each lifetime
    has its own instance.

    All four may be async; sync ones run in a thread. The schema comes from the hints and docstring
    of `execute`.

    Example::

        class Counter(StatefulTool):
            def create(self, start: int = 0):
                self.n = start
            def execute(self, step: int) -> str:
                '''Count on.'''
                self.n += step
                return str(self.n)
            def calc_reward(self):
                return float(self.n == 10)
    """

    name: str | None = None
    """Tool name; by default the class name in snake case."""
    schema: Mapping[str, Any] | None = None
    """OpenAI schema instead of one from the hints and docstring of `execute`."""
    from_row: Sequence[str] = ()
    """Parameters of `execute` set by the row (`execute_kwargs`) and hidden from the model."""
    lifetime: Lifetime = "trajectory"
    """`trajectory`: one instance per episode.

    `call`: created and released around each call; `calc_reward` is never called.
    """

    execute: Callable[..., Any]

    def create(self, **create_kwargs: Any) -> Any:
        """Begin the lifetime; the return value, if any, is sent to the model."""

    def calc_reward(self, **calc_reward_kwargs: Any) -> Any:
        """Return a reward to add at the end of the episode.

        None: not computed, so the episode has no reward.
        """
        return 0.0

    def release(self, **release_kwargs: Any) -> Any:
        """Release all resources. Called once per instance, also when `create` failed."""


@dataclass(frozen=True, slots=True)
class RowArguments:
    """Column `tools_kwargs` of a row:
    ``{tool: {"create_kwargs": {...}, "execute_kwargs": {...}, ...}}``."""

    task: str = ""
    given: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)

    def for_method(
        self, name: str, phase: str, target: Callable[..., Any] | Tool
    ) -> dict[str, Any]:
        """Return the row's arguments for a method, or for the `from_row` parameters of a tool (the
        model sets all others)."""
        given = (self.given.get(name) or {}).get(f"{phase}_kwargs") or {}
        if isinstance(target, Tool):
            if not given and not target.from_row:
                return {}
            _, needed, _ = row_parameters(target.function)
            named = target.from_row
            takes_any = False
        else:
            named, needed, takes_any = row_parameters(target)

        where = f"task {self.task}: tools_kwargs[{name!r}][{phase + '_kwargs'!r}]"
        arguments: dict[str, Any] = {}
        for key, value in given.items():
            if key in named or (takes_any and value is not None):
                arguments[key] = value
            elif value is None:  # Arrow columns have all keys in all rows
                continue
            elif isinstance(target, Tool):
                is_models = key in (target.signature.parameters.get("properties") or {})
                problem = "is the model's to give" if is_models else "is no parameter of it"
                raise TaskError(
                    f"{where}: {key!r} {problem}; name parameters of the row in from_row"
                )
            else:
                near = suggest_or_list(key, named) or "it takes none"
                raise TaskError(f"{where}: {key!r} is not taken; {near}")
        for key in named:
            if key not in arguments and key in needed:
                raise TaskError(f"{where} lacks {key!r}, which the tool needs of the row")
        return arguments


def arguments_of(task: Task) -> RowArguments:
    """Read the `tools_kwargs` column of a task's row, or of its `extra_info`."""
    column = task.info.get("tools_kwargs")
    extra_info = task.info.get("extra_info")
    if column is None and isinstance(extra_info, Mapping):
        column = extra_info.get("tools_kwargs")
    if column is None:
        return RowArguments(task.id)

    form = (
        f"task {task.id}: tools_kwargs is {{tool: {{'create_kwargs': {{...}}, "
        "'execute_kwargs': {...}, ...}}"
    )
    if not isinstance(column, Mapping):
        raise TaskError(f"{form}, not {type(column).__name__}")
    keys = [f"{phase}_kwargs" for phase in PHASES]
    given: dict[str, dict[str, Any]] = {}
    for name, phases in column.items():
        if phases is None:
            continue
        has_mappings = isinstance(phases, Mapping) and all(
            isinstance(kwargs, (Mapping, type(None))) for kwargs in phases.values()
        )
        if not has_mappings:
            raise TaskError(f"{form}; that of {name!r} is {phases!r:.60}")
        for key in phases:
            if key not in keys:
                raise TaskError(f"{form}; {name!r} has {key!r}; {suggest_or_list(str(key), keys)}")
        given[name] = {key: kwargs for key, kwargs in phases.items() if kwargs}
    return RowArguments(task.id, given)


def tool_names_of(task: Task) -> tuple[str, ...] | None:
    """Read the tools named in a row's column `tools` (names or schemas, also as JSON text); None
    for all tools."""
    column = task.info.get("tools")
    if column is None:
        return None
    names: dict[str, None] = {}  # in order, each once
    for item in read_tools(column, f"task {task.id}"):
        name = _name(item)
        if name is None:
            raise TaskError(
                f"task {task.id}: the column tools is a list of names of tools, not "
                f"{column!r:.80}; or of their schemas"
            )
        names[name] = None
    return tuple(names)


def check_names(wanted: Iterable[str], known: Iterable[str], task: Task, column: str) -> None:
    """Check tool names of a row; raise `TaskError` for one that is not among the `known`."""
    known = list(known)
    for name in wanted:
        if name not in known:
            near = suggest_or_list(name, known) or "there is none"
            raise TaskError(
                f"task {task.id}: {column} names {name!r}, which is no tool of this environment; "
                f"{near}"
            )


def _name(item: Any) -> str | None:
    """Return the name in an item of the column `tools`, a name or a schema; None without one."""
    if isinstance(item, str):
        return item
    body = item.get("function", item) if isinstance(item, Mapping) else None
    name = body.get("name") if isinstance(body, Mapping) else None
    return name if isinstance(name, str) else None


class ToolInstance(Protocol):
    """Tools of one source in one episode."""

    @property
    def name(self) -> str:
        """Name in errors."""

    async def create(self) -> Content:
        """Begin the lifetime; return content for the model."""

    @property
    def tools(self) -> Sequence[Tool]:
        """Tools; available after `create`."""

    async def reward(self) -> float | None:
        """Return the reward to add to the episode's; None: not computed."""

    async def release(self) -> None:
        """Release all resources; repeated calls have no effect."""


@runtime_checkable
class ToolSource(Protocol):
    """Item of `tool_env(tools=[...])` that makes an instance for each episode."""

    @property
    def name(self) -> str:
        """Name in errors and in `tools_kwargs`."""

    @property
    def names(self) -> tuple[str, ...] | None:
        """Tool names; None if unknown before a session is open."""

    def open(self, row: RowArguments, instances: list[ToolInstance]) -> ToolInstance:
        """Make the instance of one episode; instances begun later are added to `instances`, all
        released at the end."""


@dataclass(frozen=True, slots=True)
class StatefulToolSource:
    """Class instantiated per episode or call: a `StatefulTool`, or a class whose public methods are
    tools."""

    make: Callable[..., Any]
    name: str
    templates: Mapping[str, Tool]
    """Unbound tools by method name."""
    hooks: tuple[str, ...] = ()
    """Lifetime methods of the class: `create`, `calc_reward`, `release`."""
    lifetime: Lifetime = "trajectory"

    @property
    def names(self) -> tuple[str, ...]:
        """Tool names."""
        return tuple(tool.name for tool in self.templates.values())

    def open(self, row: RowArguments, instances: list[ToolInstance]) -> ToolInstance:
        """Make the instance of one episode."""
        instance = _TrajectoryInstance(self, row)
        # The row's arguments are checked here, before the model can call anything.
        for tool in self.templates.values():
            row.for_method(tool.name, "execute", tool)
        for hook in RESERVED_METHODS:
            instance.hook_kwargs(hook)
        if self.lifetime == "call":
            return _CallInstances(self, row, instances=instances)
        return instance


def stateful_source(item: Any, lifetime: Lifetime | None = None) -> StatefulToolSource:
    """Make a tool source of a class, or of a `functools.partial` of one; `lifetime` overrides that
    of the class."""
    owner = _class_of(item)
    lifetime = lifetime or getattr(owner, "lifetime", "trajectory")
    if lifetime not in ("trajectory", "call"):
        raise ToolSchemaError(
            f'{owner.__name__}: lifetime = {lifetime!r}; write "trajectory" or "call"'
        )
    if issubclass(owner, StatefulTool):
        return _source_of_stateful_tool(item, owner, lifetime)
    return _source_of_methods(item, owner, lifetime)


def _source_of_stateful_tool(
    item: Any, owner: type[StatefulTool], lifetime: Lifetime
) -> StatefulToolSource:
    """Return the source of a `StatefulTool`, whose tool is `execute`."""
    method = getattr(owner, "execute", None)
    if method is None:
        raise ToolSchemaError(
            f"{owner.__name__} has no execute; a StatefulTool has one, with hints and a docstring"
        )
    name = owner.name or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", owner.__name__).lower()
    from_row = (owner.from_row,) if isinstance(owner.from_row, str) else tuple(owner.from_row)
    signature = tool_signature(method, name=name, schema=owner.schema, from_row=from_row)
    execute = Tool(method, signature, from_row, source=_path_of(owner))

    # A method that is not overridden does nothing.
    hooks = tuple(
        key for key in RESERVED_METHODS if getattr(owner, key) is not getattr(StatefulTool, key)
    )
    return StatefulToolSource(item, name, {"execute": execute}, hooks, lifetime)


def _source_of_methods(item: Any, owner: type, lifetime: Lifetime) -> StatefulToolSource:
    """Return the source of a class whose public methods are tools; those with `@tool` alone where
    it has any."""
    ends = ("calc_reward", "release")  # `create` is a method like any other
    methods: dict[str, Any] = {}  # in definition order, those of base classes first
    for base in reversed(owner.__mro__[:-1]):
        for key, value in vars(base).items():
            is_method = isinstance(value, (Tool, staticmethod, classmethod)) or inspect.isfunction(
                value
            )
            if is_method and not key.startswith("_") and key not in ends:
                methods[key] = value
    marked = {key: value for key, value in methods.items() if isinstance(value, Tool)}

    templates = {}
    for key, value in (marked or methods).items():
        if isinstance(value, Tool):
            template = value
        else:
            is_bound = isinstance(value, (staticmethod, classmethod))
            method = getattr(owner, key) if is_bound else value
            template = Tool(method, tool_signature(method))
        templates[key] = replace(template, source=_path_of(owner))
    if not templates:
        raise ToolSchemaError(
            f"{owner.__name__} has no public method that could be a tool; give functions, or add "
            "one"
        )
    hooks = tuple(key for key in ends if callable(getattr(owner, key, None)))
    return StatefulToolSource(item, owner.__name__, templates, hooks, lifetime)


def _path_of(owner: type) -> str:
    """Return where a class is defined, for errors."""
    return f"{owner.__module__}.{owner.__qualname__}"


def _takes_nothing() -> None: ...


def _class_of(item: Any) -> Any:
    """Return the class of a `functools.partial`, else the item."""
    return item.func if isinstance(item, functools.partial) else item


@dataclass(slots=True)
class _TrajectoryInstance:
    """One instance of a `StatefulToolSource`, from `create` to `release`."""

    source: StatefulToolSource
    row: RowArguments
    _object: Any = None
    _begun: bool = False
    _released: bool = False
    _making: bool = False
    """Whether a thread is creating the object."""
    _late: bool = False
    """`release` was called meanwhile: that thread releases the object when it returns."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    tools: tuple[Tool, ...] = ()
    """Tools bound to the object and to the row's arguments."""

    @property
    def name(self) -> str:
        return self.source.name

    def hook_kwargs(self, hook: str) -> dict[str, Any]:
        """Return the row's arguments for a lifetime method; without `create` they go to the
        constructor."""
        target = self.source.make if hook == "create" else _takes_nothing
        if hook in self.source.hooks:
            target = getattr(_class_of(self.source.make), hook)
        return self.row.for_method(self.name, hook, target)

    async def create(self) -> Content:
        """Make the object and call `create`."""
        with as_tool_failure(f"{self.name}: create"):
            created = await self._begin(self.hook_kwargs("create"))

        tools = []
        for key, template in self.source.templates.items():
            if takes_self(template):
                method: Any = MethodType(template.function, self._object)
            else:
                method = getattr(self._object, key)
            row = self.row.for_method(template.name, "execute", template)
            tools.append(replace(template, function=method, row=row))
        self.tools = tuple(tools)
        return read_content(created, self.name)

    async def _begin(self, kwargs: Mapping[str, Any]) -> Any:
        """Make the object, in a thread unless `create` is async; return what `create` does."""
        source = self.source
        self._begun = True
        if "create" in source.hooks and inspect.iscoroutinefunction(_class_of(source.make).create):
            self._object = source.make()
            return await self._object.create(**kwargs)

        def make() -> Any:
            try:
                if "create" not in source.hooks:
                    self._object = source.make(**kwargs)
                    return None
                self._object = source.make()
                return self._object.create(**kwargs)
            finally:
                with self._lock:
                    self._making = False
                if self._late and self._object is not None:  # its caller no longer waits
                    released = self._object.release(**self.hook_kwargs("release"))
                    if inspect.isawaitable(released):
                        asyncio.run(maybe_await(released))

        self._making = True
        return await maybe_await(await run_in_thread(make, {}, f"{self.name}: create"))

    async def reward(self) -> float | None:
        """Call `calc_reward`; 0.0 without one."""
        if "calc_reward" not in self.source.hooks or self._object is None:
            return 0.0
        result = await call_user(self._object.calc_reward, self.hook_kwargs("calc_reward"))
        return as_number(result, f"{self.name}: calc_reward")

    async def release(self) -> None:
        """Release the object, if any, once."""
        if self._released or not self._begun:
            return
        self._released = True
        if "release" not in self.source.hooks:
            return
        with self._lock:
            self._late = self._making
        if self._object is not None and not self._late:
            with as_tool_failure(f"{self.name}: release"):
                await call_user(self._object.release, self.hook_kwargs("release"))


@dataclass(slots=True)
class _CallInstances(_TrajectoryInstance):
    """Instances of a `StatefulToolSource` with the lifetime `call`; itself never begun.

    As in verl, they have no reward.
    """

    instances: list[ToolInstance] = field(default_factory=list)
    """Those of the episode, released at its end."""

    async def create(self) -> Content:
        self.tools = tuple(
            replace(template, function=self._around(key))
            for key, template in self.source.templates.items()
        )
        return ""

    def _around(self, key: str) -> Callable[..., Any]:
        """Return a function that makes an instance, calls its method `key` and releases it."""

        async def call(**arguments: Any) -> ToolResult:
            instance = _TrajectoryInstance(self.source, self.row)
            # After a cancellation the end of the episode releases it, under its own deadline.
            self.instances.append(instance)
            try:
                # A bug in `create` would count as the model's mistake.
                with as_tool_failure(f"{self.name}: create", bugs=True):
                    created = await instance.create()
                tool = instance.tools[list(self.source.templates).index(key)]
                value = await call_user(tool.function, {**arguments, **tool.row})
                result = read_result(value, tool.name)
            except Exception:
                await instance.release()
                raise
            with as_tool_failure(f"{self.name}: release", bugs=True):
                await instance.release()
            self.instances.remove(instance)
            return replace(result, content=join_content(created, result.content))

        return call


@contextlib.contextmanager
def as_tool_failure(what: str, bugs: bool = False) -> Iterator[None]:
    """Convert exceptions of lifetime methods to ToolFailure, since the model did not cause them;
    bugs only if `bugs`."""
    try:
        yield
    except (TurnwrightError, TimeoutError):
        raise
    except (Exception, SystemExit) as error:  # raised in a task, SystemExit would end the loop
        if not bugs and failure_kind(error, "create") == FailureKind.USER_BUG:
            raise
        raise ToolFailure(
            f"{what} raised {class_name(error)}: {words(error)}".rstrip(": ")
        ) from error


@dataclass(frozen=True, slots=True)
class ToolSet:
    """Shared tools, and sources that make instances per episode."""

    shared: Tools
    sources: tuple[ToolSource, ...] = ()

    @property
    def known(self) -> Tools:
        """All tools known before an episode begins, for their schemas only; they must not be
        called."""
        tools = list(self.shared)
        for source in self._stateful:
            tools += source.templates.values()
        return Tools(tools)

    @property
    def rewards_episode(self) -> bool:
        """Whether a class of tools has a reward for the finished episode."""
        return any(
            "calc_reward" in source.hooks and source.lifetime == "trajectory"
            for source in self._stateful
        )

    @property
    def _stateful(self) -> list[StatefulToolSource]:
        return [source for source in self.sources if isinstance(source, StatefulToolSource)]

    async def open(self, task: Task, instances: list[ToolInstance]) -> tuple[Tools, Content]:
        """Open the tools of an episode; return them and the content of `create`.

        Every instance begun is in `instances`, also after errors.
        """
        row = arguments_of(task)
        named = tool_names_of(task)
        sets_nothing = named is None and not row.given
        if sets_nothing and not self.sources and not any(tool.from_row for tool in self.shared):
            return self.shared, ""

        wanted = None if named is None else set(named)
        tools = []
        for tool in self.shared:
            if wanted is None or tool.name in wanted:
                arguments = row.for_method(tool.name, "execute", tool)
                tools.append(replace(tool, row=arguments))

        # Sources in order; what one does not say before it is open is known afterwards.
        created: Content = ""
        names = [tool.name for tool in self.shared] + [source.name for source in self.sources]
        known = dict.fromkeys(names)
        for source in self.sources:
            known |= dict.fromkeys(source.names or ())
            if not _is_needed(source, wanted, known):
                continue
            instance = source.open(row, instances)
            instances.append(instance)
            created = join_content(created, await instance.create())
            known |= dict.fromkeys(tool.name for tool in instance.tools)
            for tool in instance.tools:
                if wanted is None or source.name in wanted or tool.name in wanted:
                    tools.append(tool)

        check_names(named or (), known, task, "the column tools")
        check_names(row.given, known, task, "tools_kwargs")
        return Tools(tools, self.shared.cut), created


def parse_tools(items: Iterable[Any], lifetime: Lifetime | None, cut: ResultLimit) -> ToolSet:
    """Sort the items of `tools=[...]` into shared tools and sources."""
    tools: list[Tool] = []
    sources: list[ToolSource] = []
    for item in items:
        if inspect.isclass(_class_of(item)):
            sources.append(stateful_source(item, lifetime))
        elif isinstance(item, ToolSource):
            sources.append(item)
        elif isinstance(item, StatefulTool):
            kind = type(item).__name__
            raise ToolSchemaError(
                f"{kind}() is an object, which every episode would share; give the class {kind}"
            )
        else:
            tools.append(as_tool(item))
    kit = ToolSet(Tools(tools, cut), tuple(sources))
    assert kit.known is not None  # raises for duplicate names
    return kit


def add_to_opening(messages: tuple[Message, ...], created: Content) -> tuple[Message, ...]:
    """Append the content of `create` to the last user message (some templates allow no second one),
    or add a user message."""
    if not created:
        return messages
    if not messages or messages[-1].role != "user":
        return (*messages, Message("user", created))
    last = messages[-1]
    return (*messages[:-1], replace(last, content=join_content(last.content, created)))


def _is_needed(source: ToolSource, wanted: set[str] | None, known: Iterable[str]) -> bool:
    """Whether an episode needs a source; a source with unknown tools is needed if a wanted name is
    still unresolved."""
    if wanted is None or source.name in wanted:
        return True
    if source.names is None:
        return not wanted <= set(known)
    return not wanted.isdisjoint(source.names)

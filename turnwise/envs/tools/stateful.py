"""Stateful tools, their lifetime, and the tools of one episode."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import re
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any, Literal, Protocol, runtime_checkable

from turnwise.envs.scripted_play import maybe_await
from turnwise.envs.tools.results import Content, ResultLimit, ToolResult, join_content, read_content, read_result
from turnwise.envs.tools.row_arguments import RowArguments, arguments_of, check_names, tool_names_of
from turnwise.envs.tools.schema import ToolSchemaError, tool_signature
from turnwise.envs.tools.tool import Tool, Tools, as_tool
from turnwise.envs.user_code import as_number, call_user, failure_kind, run_in_thread
from turnwise.errors import ToolFailure, TurnwiseError, class_name, words
from turnwise.types import FailureKind, Message, Task

Lifetime = Literal["trajectory", "call"]
RESERVED_METHODS = ("create", "calc_reward", "release")
"""Methods that belong to a lifetime, not to the model."""


class StatefulTool:
    """A tool with a state: `create`, `execute`, `calc_reward`, `release`. Given as a class; each lifetime has its own object.

    All four may be async; what is not runs in a thread. `execute` has the tool's hints and docstring.

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
    """What the model calls it; by default the class's name in snake case."""
    schema: Mapping[str, Any] | None = None
    """In OpenAI's shape, instead of one from the hints and the docstring of `execute`."""
    from_row: Sequence[str] = ()
    """Parameters of `execute` that the row gives (`execute_kwargs`), and that the model is not told of."""
    lifetime: Lifetime = "trajectory"
    """`trajectory`: one object per episode. `call`: created and released around each call, and `calc_reward` never asked."""

    execute: Callable[..., Any]

    def create(self, **create_kwargs: Any) -> Any:
        """Begin. What it returns, if anything, the model is shown."""

    def calc_reward(self, **calc_reward_kwargs: Any) -> Any:
        """Added to the reward of the episode, at its end. None: not computed, so the episode has no reward."""
        return 0.0

    def release(self, **release_kwargs: Any) -> Any:
        """Let go of everything. Called once for each object that was made, also when `create` failed."""


class ToolInstance(Protocol):
    """What a source of tools is within one episode."""

    @property
    def name(self) -> str:
        """What it is called in errors."""

    async def create(self) -> Content:
        """Begin; what the model is shown of it."""

    @property
    def tools(self) -> Sequence[Tool]:
        """Read once it was created."""

    async def reward(self) -> float | None:
        """What it adds to the episode's reward; None: not computed."""

    async def release(self) -> None:
        """Let go; does nothing a second time."""


@runtime_checkable
class ToolSource(Protocol):
    """Something in `tool_env(tools=[...])` that gives tools to each episode anew."""

    @property
    def name(self) -> str:
        """What it is called in errors, and in `tools_kwargs`."""

    @property
    def names(self) -> tuple[str, ...] | None:
        """What its tools are called; None where only an open one knows."""

    def open(self, row: RowArguments, lives: list[ToolInstance]) -> ToolInstance:
        """Its life in one episode, not begun; lives that begin later join `lives`, which all are released at the end."""


@dataclass(frozen=True, slots=True)
class StatefulToolSource:
    """A class whose objects live: a `StatefulTool`, or any class whose public methods are tools."""

    make: Callable[..., Any]
    name: str
    templates: Mapping[str, Tool]
    """The tools by the method that each calls, not bound to an object."""
    hooks: tuple[str, ...] = ()
    """Which of `create`, `calc_reward` and `release` it has."""
    lifetime: Lifetime = "trajectory"

    @property
    def names(self) -> tuple[str, ...]:
        """What its tools are called."""
        return tuple(tool.name for tool in self.templates.values())

    def open(self, row: RowArguments, lives: list[ToolInstance]) -> ToolInstance:
        """Its life in one episode.

        Raises:
            TaskError: when the row gives what its methods do not take.
        """
        life = _Object(self, row)
        life.check()
        return _PerCall(self, row, lives) if self.lifetime == "call" else life


def stateful_source(item: Any, lifetime: Lifetime | None = None) -> StatefulToolSource:
    """Read a class, or a `functools.partial` of one.

    Args:
        lifetime: instead of what the class says.

    Raises:
        ToolSchemaError: when it has no tools, or one of its methods cannot be one.
    """
    owner: Any = item.func if isinstance(item, functools.partial) else item
    lifetime = lifetime or getattr(owner, "lifetime", "trajectory")
    if lifetime not in ("trajectory", "call"):
        raise ToolSchemaError(f'{owner.__name__}: lifetime = {lifetime!r}; write "trajectory" or "call"')
    if issubclass(owner, StatefulTool):
        method = getattr(owner, "execute", None)
        if method is None:
            raise ToolSchemaError(f"{owner.__name__} has no execute; a StatefulTool has one, with hints and a docstring")
        name = owner.name or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", owner.__name__).lower()
        rows = (owner.from_row,) if isinstance(owner.from_row, str) else tuple(owner.from_row)
        made = Tool(method, tool_signature(method, name=name, schema=owner.schema, from_row=rows), rows)
        hooks = tuple(key for key in RESERVED_METHODS if getattr(owner, key) is not getattr(StatefulTool, key))
        return StatefulToolSource(item, name, {"execute": _sourced(made, owner)}, hooks, lifetime)
    methods = {key: raw for key, raw in _methods(owner) if key not in RESERVED_METHODS[1:]}
    marked = {key: raw for key, raw in methods.items() if isinstance(raw, Tool)}
    templates = {key: _sourced(_template(owner, key, raw), owner) for key, raw in (marked or methods).items()}
    if not templates:
        raise ToolSchemaError(f"{owner.__name__} has no public method that could be a tool; give functions, or add one")
    hooks = tuple(key for key in RESERVED_METHODS[1:] if callable(getattr(owner, key, None)))
    return StatefulToolSource(item, owner.__name__, templates, hooks, lifetime)


def _methods(owner: type) -> Iterator[tuple[str, Any]]:
    """Public methods in the order in which they are defined, those of base classes first."""
    found: dict[str, Any] = {}
    for base in reversed(owner.__mro__[:-1]):
        for key, raw in vars(base).items():
            if not key.startswith("_") and (isinstance(raw, (Tool, staticmethod, classmethod)) or inspect.isfunction(raw)):
                found[key] = raw
    return iter(found.items())


def _template(owner: type, key: str, raw: Any) -> Tool:
    if isinstance(raw, Tool):
        return raw
    method: Any = getattr(owner, key) if isinstance(raw, (staticmethod, classmethod)) else raw
    return Tool(method, tool_signature(method))


def _sourced(made: Tool, owner: type) -> Tool:
    return replace(made, source=f"{owner.__module__}.{owner.__qualname__}")


@dataclass(slots=True)
class _Object:
    """One object of a `StatefulToolSource`, from `create` to `release`."""

    source: StatefulToolSource
    row: RowArguments
    _object: Any = None
    _begun: bool = False
    _released: bool = False
    _making: bool = False
    """It is being made in a thread."""
    _late: bool = False
    """It was to be released meanwhile: that thread does so when it comes back."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _tools: tuple[Tool, ...] = ()

    @property
    def name(self) -> str:
        """The source's."""
        return self.source.name

    @property
    def tools(self) -> Sequence[Tool]:
        """Bound to the object, and to what the row gives."""
        return self._tools

    def check(self) -> None:
        """Hold the row to what the methods take.

        Raises:
            TaskError: when it gives something else, or too little.
        """
        for made in self.source.templates.values():
            self.row.for_method(made.name, "execute", made)
        self._kwargs("create")
        self._kwargs("calc_reward")
        self._kwargs("release")

    def _kwargs(self, hook: str) -> dict[str, Any]:
        """What the row gives to a method of the lifetime; a class without `create` has its constructor in place of it."""
        target = getattr(_owner(self.source), hook) if hook in self.source.hooks else _nothing
        if target is _nothing and hook == "create":
            target = self.source.make
        return self.row.for_method(self.name, hook, target)

    async def create(self) -> Content:
        """Make the object and begin.

        Raises:
            ToolFailure: when it cannot be made.
        """
        with _failing(f"{self.name}: create"):
            shown = await self._begin(self._kwargs("create"))
        self._tools = tuple(self._bound(key, made) for key, made in self.source.templates.items())
        return read_content(shown, self.name)

    async def _begin(self, kwargs: Mapping[str, Any]) -> Any:
        source = self.source
        self._begun = True
        if "create" in source.hooks and inspect.iscoroutinefunction(_owner(source).create):
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
                if self._late:
                    self._release_here()

        self._making = True
        return await maybe_await(await run_in_thread(make, {}, f"{self.name}: create"))

    def _bound(self, key: str, made: Tool) -> Tool:
        method = MethodType(made.function, self._object) if _takes_self(made) else getattr(self._object, key)
        return replace(made, function=method, row=self.row.for_method(made.name, "execute", made))

    async def reward(self) -> float | None:
        """What `calc_reward` says.

        Raises:
            RewardError: when it is no finite number.
        """
        if "calc_reward" not in self.source.hooks or self._object is None:
            return 0.0
        result = await call_user(self._object.calc_reward, self._kwargs("calc_reward"))
        return as_number(result, f"{self.name}: calc_reward")

    async def release(self) -> None:
        """Release the object, if there is one; once.

        Raises:
            ToolFailure: when `release` raised.
        """
        if self._released or not self._begun:
            return
        self._released = True
        if "release" not in self.source.hooks:
            return
        with self._lock:
            self._late = self._making
        if self._object is not None and not self._late:
            with _failing(f"{self.name}: release"):
                await call_user(self._object.release, self._kwargs("release"))

    def _release_here(self) -> None:
        """Release in this thread, which nobody waits for any more."""
        if self._object is not None:
            result = self._object.release(**self._kwargs("release"))
            if inspect.isawaitable(result):
                asyncio.run(_awaited(result))


@dataclass(slots=True)
class _PerCall:
    """A `StatefulToolSource` whose objects live for one call each."""

    source: StatefulToolSource
    row: RowArguments
    lives: list[ToolInstance]

    @property
    def name(self) -> str:
        """The source's."""
        return self.source.name

    async def create(self) -> Content:
        """Nothing yet: each call has an object of its own."""
        return ""

    @property
    def tools(self) -> Sequence[Tool]:
        """Each creates, executes and releases."""
        return [replace(made, function=self._around(key)) for key, made in self.source.templates.items()]

    def _around(self, key: str) -> Callable[..., Any]:
        async def call(**arguments: Any) -> ToolResult:
            life = _Object(self.source, self.row)
            self.lives.append(life)  # where this call is cancelled, the episode's end releases it, under its own deadline
            try:
                with _failing(f"{self.name}: create", bugs=True):  # within a call, it would be taken for the model's mistake
                    shown = await life.create()
                made = next(tool for name, tool in zip(self.source.templates, life.tools, strict=True) if name == key)
                returned = read_result(await call_user(made.function, {**arguments, **made.row}), made.name)
            except Exception:
                await life.release()
                raise
            with _failing(f"{self.name}: release", bugs=True):
                await life.release()
            self.lives.remove(life)
            return replace(returned, content=join_content(shown, returned.content))

        return call

    async def reward(self) -> float | None:
        """Nothing: as in verl, whoever lives for a call is not asked."""
        return 0.0

    async def release(self) -> None:
        """Nothing: the objects of its calls are lives of their own."""


def _owner(source: StatefulToolSource) -> Any:
    return source.make.func if isinstance(source.make, functools.partial) else source.make


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def _nothing() -> None:
    """In place of a method that a class does not have."""


def _takes_self(made: Tool) -> bool:
    return inspect.isfunction(made.function) and next(iter(inspect.signature(made.function).parameters), "") == "self"


@contextlib.contextmanager
def _failing(what: str, bugs: bool = False) -> Iterator[None]:
    """What a lifetime's own methods raise is not the model's doing; a mistake in their code stays one, unless `bugs`."""
    try:
        yield
    except (TurnwiseError, TimeoutError):
        raise
    except (Exception, SystemExit) as error:  # in a task of its own, SystemExit would end the loop
        if not bugs and failure_kind(error, "create") == FailureKind.USER_BUG:
            raise
        raise ToolFailure(f"{what} raised {class_name(error)}: {words(error)}".rstrip(": ")) from error


@dataclass(frozen=True, slots=True)
class ToolSet:
    """Tools that all episodes share, and sources that give each its own."""

    shared: Tools
    sources: tuple[ToolSource, ...] = ()

    @property
    def known(self) -> Tools:
        """All tools that are known before an episode begins; they are not to be called."""
        stateful_ones = (source for source in self.sources if isinstance(source, StatefulToolSource))
        return Tools([*self.shared, *(made for source in stateful_ones for made in source.templates.values())])

    async def open(self, task: Task, lives: list[ToolInstance]) -> tuple[Tools, Content]:
        """The tools of an episode, and what those that live have to show. Whatever was begun is in `lives`, also after errors.

        Raises:
            TaskError: when the row names a tool that there is not, or gives one what it does not take.
            ToolSchemaError: when two tools have one name.
            ToolFailure: when one cannot begin.
        """
        row, chosen = arguments_of(task), tool_names_of(task)
        if chosen is None and not row.given and not self.sources and not any(tool.from_row for tool in self.shared):
            return self.shared, ""
        wanted = None if chosen is None else set(chosen)
        found: list[Tool] = []
        for tool in self.shared:
            if wanted is None or tool.name in wanted:
                found.append(replace(tool, row=row.for_method(tool.name, "execute", tool)))
        shown: Content = ""
        names = {name: None for name in (*(tool.name for tool in self.shared), *(source.name for source in self.sources))}
        for source in self.sources:
            names |= dict.fromkeys(source.names or ())
            if not _asked(source, wanted, names):
                continue
            life = source.open(row, lives)
            lives.append(life)
            shown = join_content(shown, await life.create())
            names |= {tool.name: None for tool in life.tools}
            found += [tool for tool in life.tools if wanted is None or source.name in wanted or tool.name in wanted]
        check_names(chosen or (), names, task, "the column tools")
        check_names(row.given, names, task, "tools_kwargs")
        return Tools(found, self.shared.cut), shown


def parse_tools(items: Iterable[Any], lifetime: Lifetime | None, cut: ResultLimit) -> ToolSet:
    """Items of `tools=[...]`, parted.

    Raises:
        ToolSchemaError: for what is no tool, and for two of one name.
    """
    tools: list[Tool] = []
    sources: list[ToolSource] = []
    for item in items:
        if inspect.isclass(item.func if isinstance(item, functools.partial) else item):
            sources.append(stateful_source(item, lifetime))
        elif isinstance(item, ToolSource):
            sources.append(item)
        elif isinstance(item, StatefulTool):
            kind = type(item).__name__
            raise ToolSchemaError(f"{kind}() is an object, which every episode would share; give the class {kind}")
        else:
            tools.append(as_tool(item))
    kit = ToolSet(Tools(tools, cut), tuple(sources))
    assert kit.known is not None  # raises where two have one name
    return kit


def add_to_opening(messages: tuple[Message, ...], shown: Content) -> tuple[Message, ...]:
    """Opening messages with what tools have to show: at the end of the last one where it is the user's, else as one more.

    Some templates want user and assistant to take turns, so it is no second message of the user's.
    """
    if not shown:
        return messages
    if not messages or messages[-1].role != "user":
        return (*messages, Message("user", shown))
    last = messages[-1]
    return (*messages[:-1], replace(last, content=join_content(last.content, shown)))


def _asked(source: ToolSource, wanted: set[str] | None, known: Iterable[str]) -> bool:
    """Whether an episode needs a source: one whose tools are not known yet is asked where a name is left that nobody has."""
    if wanted is None or source.name in wanted:
        return True
    if source.names is None:
        return not wanted <= set(known)
    return not wanted.isdisjoint(source.names)

"""What a `tool_env` was given, and what of it an episode has."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from turnwise.env.tools.lifetime import Lifetime, StatefulTool, StatefulToolSource, ToolInstance, ToolSource, stateful_source
from turnwise.env.tools.results import Content, ResultLimit, join_content
from turnwise.env.tools.rows import arguments_of, check_names, tool_names_of
from turnwise.env.tools.schema import ToolSchemaError
from turnwise.env.tools.tools import Tool, Tools, as_tool
from turnwise.types import Message, Task


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

"""Functions as tools."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from turnwright.envs.tools.tool_schema import tool_signature

from .schemas import OpenAIFunctionToolSchema


@dataclass
class FunctionTool:
    """Registered function."""

    name: str
    fn: Callable[..., Any]
    tool_schema: OpenAIFunctionToolSchema
    is_async: bool = False

    async def call(self, parameters: dict[str, Any]) -> Any:
        """Call the function, a synchronous one in a thread."""
        return await self.fn(**parameters) if self.is_async else await asyncio.to_thread(self.fn, **parameters)


FUNCTION_TOOL_REGISTRY: dict[str, FunctionTool] = {}


def function_tool(
    name: str | Callable[..., Any] | None = None, *, schema: OpenAIFunctionToolSchema | dict[str, Any] | None = None
) -> Any:
    """Register a function: `@function_tool`, `@function_tool("name")`, `@function_tool(schema=...)`.

    Functions of two files may have one name; a file that defines it twice is an error.
    """
    if callable(name):
        return function_tool(schema=schema)(name)

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        key = name or fn.__name__
        known = FUNCTION_TOOL_REGISTRY.get(key)
        if known is not None and known.fn.__module__ == fn.__module__:
            raise ValueError(f"the function tool {key!r} is registered already, by {known.fn.__qualname__}; rename one")
        FUNCTION_TOOL_REGISTRY[key] = FunctionTool(key, fn, _schema(fn, key, schema), inspect.iscoroutinefunction(fn))
        return fn

    return register


def _schema(fn: Callable[..., Any], name: str, given: Any) -> OpenAIFunctionToolSchema:
    if isinstance(given, OpenAIFunctionToolSchema):
        return given
    if given is not None:
        return OpenAIFunctionToolSchema.model_validate(given)
    for key, parameter in inspect.signature(fn).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ValueError(
                f"the function tool {name!r}: {parameter} has no JSON schema; name each parameter, or {key}: list[T]"
            )
    try:
        from transformers.utils import get_json_schema
    except ImportError:
        return OpenAIFunctionToolSchema.model_validate(tool_signature(fn, name=name).schema)
    found = get_json_schema(fn)
    found["function"]["name"] = name
    return OpenAIFunctionToolSchema.model_validate(found)


def get_function_tool(name: str) -> FunctionTool:
    """Return a registered function."""
    return FUNCTION_TOOL_REGISTRY[name]

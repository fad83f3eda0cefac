"""What tools and simulated users of verl are written against: schemas, base classes,
registered functions."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal
from uuid import uuid4

from pydantic import BaseModel, Field, field_validator

from turnwright.envs.tools.tool_schema import tool_signature


class OpenAIFunctionPropertySchema(BaseModel):
    """One parameter."""

    type: str | list[str]
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(BaseModel):
    """All parameters."""

    type: str
    properties: dict[str, OpenAIFunctionPropertySchema]
    required: list[str] = Field(default_factory=list)


class OpenAIFunctionSchema(BaseModel):
    """Function."""

    name: str
    description: str
    parameters: OpenAIFunctionParametersSchema = Field(
        default_factory=lambda: OpenAIFunctionParametersSchema(type="object", properties={})
    )
    strict: bool = False


class OpenAIFunctionToolSchema(BaseModel):
    """Tool."""

    type: str
    function: OpenAIFunctionSchema


class OpenAIFunctionParsedSchema(BaseModel):
    """Call with its arguments as text."""

    name: str
    arguments: str


class OpenAIFunctionCallSchema(BaseModel):
    """Call with its arguments."""

    name: str
    arguments: dict[str, Any]

    @staticmethod
    def from_openai_function_parsed_schema(
        parsed_schema: OpenAIFunctionParsedSchema,
    ) -> tuple[OpenAIFunctionCallSchema, bool]:
        """Read the arguments; return the call, and whether they are no JSON object."""
        try:
            arguments = json.loads(parsed_schema.arguments)
        except json.JSONDecodeError:
            arguments = None

        has_error = not isinstance(arguments, dict)
        if has_error:
            arguments = {}
        return OpenAIFunctionCallSchema(name=parsed_schema.name, arguments=arguments), has_error


class OpenAIFunctionToolCall(BaseModel):
    """Call with its id."""

    id: str
    type: Literal["function"] = "function"
    function: OpenAIFunctionCallSchema


class ToolResponse(BaseModel):
    """Response of a tool: text, images, videos."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    @field_validator("image", "video", mode="before")
    @classmethod
    def _is_list(cls, value: Any) -> Any:
        if value is not None and not isinstance(value, list):
            raise ValueError(f"must be a list, not {type(value).__name__}; write [value]")
        return value

    def is_empty(self) -> bool:
        """Return whether there is nothing in it."""
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        """Return whether there is only text in it."""
        return bool(self.text) and not self.image and not self.video


class BaseTool:
    """Tool whose one object serves all episodes; `create` begins an instance, `release` ends it."""

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        self.config = config
        schema = tool_schema or self.get_openai_tool_schema()
        if schema is None:
            raise ValueError(
                f"{type(self).__name__} has no schema: give tool_schema, or override "
                "get_openai_tool_schema"
            )
        self.tool_schema: OpenAIFunctionToolSchema = schema
        self.name = schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema | None:
        """Return the schema."""
        return getattr(self, "tool_schema", None)

    async def create(
        self, instance_id: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """Begin an instance; return its id, and a response for the model."""
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[Any, float, dict[str, Any]]:
        """Return a response, a reward and metrics."""
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Return the reward of an instance."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End an instance."""


@dataclass
class FunctionTool:
    """Registered function."""

    name: str
    fn: Callable[..., Any]
    tool_schema: OpenAIFunctionToolSchema
    is_async: bool = False

    async def call(self, parameters: dict[str, Any]) -> Any:
        """Call the function, a synchronous one in a thread."""
        if self.is_async:
            return await self.fn(**parameters)
        return await asyncio.to_thread(self.fn, **parameters)


FUNCTION_TOOL_REGISTRY: dict[str, FunctionTool] = {}


def function_tool(
    name: str | Callable[..., Any] | None = None,
    *,
    schema: OpenAIFunctionToolSchema | dict[str, Any] | None = None,
) -> Any:
    """Register a function: `@function_tool`, `@function_tool("name")`,
    `@function_tool(schema=...)`.

    Functions of two files may have one name; a file that defines it twice is an error.
    """
    if callable(name):
        return function_tool(schema=schema)(name)

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        key = name or fn.__name__
        registered = FUNCTION_TOOL_REGISTRY.get(key)
        if registered is not None and registered.fn.__module__ == fn.__module__:
            raise ValueError(
                f"the function tool {key!r} is registered already, by "
                f"{registered.fn.__qualname__}; rename one"
            )

        tool_schema = _schema(fn, key, schema)
        is_async = inspect.iscoroutinefunction(fn)
        FUNCTION_TOOL_REGISTRY[key] = FunctionTool(key, fn, tool_schema, is_async)
        return fn

    return register


def _schema(fn: Callable[..., Any], name: str, schema: Any) -> OpenAIFunctionToolSchema:
    """Return the schema that was given, else that of the signature.

    transformers makes it where it is installed, as for verl itself, so that the model reads the
    same text.
    """
    if isinstance(schema, OpenAIFunctionToolSchema):
        return schema
    if schema is not None:
        return OpenAIFunctionToolSchema.model_validate(schema)

    for key, parameter in inspect.signature(fn).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ValueError(
                f"the function tool {name!r}: {parameter} has no JSON schema; name each parameter, "
                f"or {key}: list[T]"
            )

    try:
        from transformers.utils import get_json_schema
    except ImportError:
        return OpenAIFunctionToolSchema.model_validate(tool_signature(fn, name=name).schema)
    schema = get_json_schema(fn)
    schema["function"]["name"] = name
    return OpenAIFunctionToolSchema.model_validate(schema)


def get_function_tool(name: str) -> FunctionTool:
    """Return a registered function."""
    return FUNCTION_TOOL_REGISTRY[name]


class BaseInteraction:
    """Simulated user whose one object serves all episodes."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin an instance; return its id."""
        return instance_id or str(uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Answer the model; return whether to end, the text, a reward and metrics."""
        return False, "Your current result seems acceptable.", 0.8, {}

    async def calculate_score(self) -> float:
        """Return the reward of an instance."""
        return 0.0

    async def finalize_interaction(self) -> None:
        """End an instance."""

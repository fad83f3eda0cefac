"""Schemas, calls and responses of tools."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, Field, field_validator


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
        wrong = not isinstance(arguments, dict)
        return OpenAIFunctionCallSchema(name=parsed_schema.name, arguments={} if wrong else arguments), wrong


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

"""A tool of older releases: arguments of the row by name, text in place of a response,
its schema in a method."""

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema


class FlatTool(BaseTool):
    def __init__(self, config, tool_schema=None):
        super().__init__(config, tool_schema)
        self.truths = {}

    def get_openai_tool_schema(self):
        parameters = {
            "type": "object",
            "properties": {"answer": {"type": "string"}},
            "required": ["answer"],
        }
        body = {"name": "check", "description": "Check an answer.", "parameters": parameters}
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": body})

    async def create(self, instance_id=None, truth=None):
        self.truths[instance_id] = truth
        return instance_id

    async def execute(self, instance_id, parameters, **kwargs):
        right = parameters["answer"] == self.truths[instance_id]
        return ("right" if right else "wrong"), (1.0 if right else None), None

    async def release(self, instance_id):
        del self.truths[instance_id]

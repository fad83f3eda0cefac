"""Names of release 3.6."""

from swift.infer_engine.protocol import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    RequestConfig,
    RolloutInferRequest,
)

RolloutResponseChoice = ChatCompletionResponseChoice

__all__ = [
    "ChatCompletionResponse",
    "ChatCompletionResponseChoice",
    "ChatMessage",
    "RequestConfig",
    "RolloutInferRequest",
    "RolloutResponseChoice",
]

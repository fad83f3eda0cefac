"""Engines: their requests, and the names of those that run a model of their own."""

from .protocol import InferRequest, RequestConfig, RolloutInferRequest

__all__ = ["InferRequest", "PtEngine", "RequestConfig", "RolloutInferRequest", "TransformersEngine"]


class TransformersEngine:
    """An engine of its own, which a reward may call; it needs ms-swift."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise ImportError("an engine of its own needs ms-swift; pip install ms-swift")


PtEngine = TransformersEngine

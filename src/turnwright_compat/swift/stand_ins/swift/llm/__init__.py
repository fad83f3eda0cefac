"""Names of release 3.6."""

from swift.infer_engine import InferRequest, PtEngine, RequestConfig, RolloutInferRequest
from swift.template import Messages, Template
from swift.utils import to_device

__all__ = ["InferRequest", "Messages", "PtEngine", "RequestConfig", "RolloutInferRequest", "Template", "to_device"]

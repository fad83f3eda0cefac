"""An agent of the user's that asks the model by a chat API."""

from turnwright.compat.slime_session import generate

__all__ = ["generate"]

"""An agent of the user's that asks the model by a chat API."""

from turnwright_compat.slime.session import generate

__all__ = ["generate"]

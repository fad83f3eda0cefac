"""Names of release 3.6."""

from swift.rewards.orm import ORM, AsyncORM, MathAccuracy, orms

__all__ = ["ORM", "AsyncORM", "MathAccuracy", "orms"]

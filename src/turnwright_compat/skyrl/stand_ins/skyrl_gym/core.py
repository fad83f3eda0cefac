"""Base class of environments."""

from __future__ import annotations

from typing import Any, Generic, TypedDict, TypeVar

ObsType = TypeVar("ObsType")
ActType = TypeVar("ActType")


class EnvStepOutput(TypedDict):
    """Return value of `Env.step`."""

    observations: Any
    reward: Any
    done: bool
    metadata: dict[str, Any] | None


class Env(Generic[ObsType, ActType]):
    """Environment of one episode: `init`, `step` until done, `close`."""

    def init(self, *prompt: Any) -> tuple[ObsType, dict[str, Any]]:
        """Begin the episode; return the prompt and metadata."""
        raise NotImplementedError

    def step(self, action: ActType) -> Any:
        """Respond to one reply."""
        raise NotImplementedError

    def close(self) -> None:
        """Release all resources."""

    def __enter__(self) -> Env[ObsType, ActType]:
        return self

    def __exit__(self, *error: object) -> bool:
        self.close()
        return False

    def __str__(self) -> str:
        return f"Env({type(self).__name__})"

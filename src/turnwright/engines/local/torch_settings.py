"""Settings of torch that a process has once, kept as a run set them.

Code of an environment that runs in a thread of the run may change them: `torch.set_default_dtype`,
`set_default_device`, `set_num_threads`. The engine's next step would fail, or give other bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class TorchSettings:
    """Process-wide settings on which results depend."""

    dtype: torch.dtype
    device: torch.device
    threads: int

    def restore(self) -> str:
        """Set back what differs; return what it was, or an empty text."""
        changed: list[str] = []

        def compare(what: str, now: Any, then: Any, set_back: Callable[[Any], object]) -> None:
            if now != then:
                changed.append(f"{what} to {now}")
                set_back(then)

        compare("dtype", torch.get_default_dtype(), self.dtype, torch.set_default_dtype)
        compare("device", _default_device(), self.device, _set_default_device)
        compare("threads", torch.get_num_threads(), self.threads, torch.set_num_threads)
        return ", ".join(changed)


def _set_default_device(device: torch.device) -> None:
    # torch looks up a default device, even the CPU, in each call that makes a tensor.
    torch.set_default_device(None if device.type == "cpu" else device)


def _default_device() -> torch.device:
    """Return `torch.get_default_device()`, which takes 12 us, in a fraction of that."""
    return torch.empty(0).device


@dataclass(slots=True)
class _Kept:
    settings: TorchSettings
    on_change: Callable[[str], None]


_kept: _Kept | None = None


@contextmanager
def kept(threads: int, on_change: Callable[[str], None]) -> Iterator[None]:
    """Keep float32, the CPU and a number of threads as the process' settings until the context
    ends.

    `on_change` receives what `keep` set back. At the end dtype and device are those of the
    beginning.
    """
    global _kept
    outer = _kept
    before = TorchSettings(torch.get_default_dtype(), _default_device(), threads)
    settings = TorchSettings(torch.float32, torch.device("cpu"), threads)
    settings.restore()
    _kept = _Kept(settings, on_change)
    try:
        yield
    finally:
        before.restore()
        _kept = outer


def keep() -> None:
    """Set back what other code changed, before each computation of a run.

    Outside of `kept` it does nothing.
    """
    if _kept is None:
        return
    changed = _kept.settings.restore()
    if changed:
        _kept.on_change(changed)

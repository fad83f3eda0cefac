"""The process that a run shares with the code of its environments, kept as the run needs it.

Environments run in threads of the run unless `isolation = "process"`. Their code, or a library of
theirs, may change what the process has once: its working directory, torch's defaults, its open
files, its threads. What the run can set back is set back, and a line names the environments; what
ends the run ends it with a line.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from turnwright.engines.local import torch_settings
from turnwright.envs.spec import EnvSpec
from turnwright.envs.user_code import is_interrupt, user_line, user_location
from turnwright.errors import TraceError, TurnwrightError
from turnwright.records import ProgressListener, RunDir

REMEDY = (
    'code that changes its process belongs in one of its own: isolation = "process" in its [[env]]'
)


class SharedProcess:
    """Watches what code of environments does to the process of a run."""

    def __init__(
        self,
        env_specs: Sequence[EnvSpec],
        run: RunDir,
        watch: ProgressListener,
        torch_threads: int,
    ) -> None:
        self._run = run
        self._torch_threads = torch_threads
        self._watch = watch
        self._threads = set(threading.enumerate())
        self._noted: set[str] = set()

        names = [spec.name for spec in env_specs if spec.rules.isolation == "thread"]
        plural = "s" if len(names) > 1 else ""
        self._environments = f"environment{plural} {', '.join(names)}"

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Keep the process' settings until the run ends.

        Raises:
            TurnwrightError: where code of an environment ended the run: by an exception outside of
                its calls, or by closing the run's files.
        """
        began_in = os.getcwd()
        try:
            with torch_settings.kept(self._torch_threads, self._note_change):
                yield
        except (KeyboardInterrupt, SystemExit) as error:
            if is_interrupt(error):
                raise
            raise self._failure(
                f"raised {type(error).__name__} outside of its calls", error
            ) from error
        except (OSError, ValueError, TraceError) as error:
            if not self._lost_files():
                raise
            raise self._failure("closed files of this process", error) from error
        finally:
            # The directory may be gone.
            with suppress(OSError):
                os.chdir(began_in)
            self._note_threads()

    def _note_change(self, changed: str) -> None:
        """Say once what code of an environment changed."""
        if changed not in self._noted:
            self._noted.add(changed)
            self._watch.note(
                f"code of {self._environments} set torch's default {changed} for all of the "
                f"process; it is set back before each computation: {REMEDY}"
            )

    def _note_threads(self) -> None:
        """Name the threads that would keep the process from ending."""
        for thread in threads_left(self._threads):
            self._watch.note(
                f"code of {self._environments} left a thread running, {describe_thread(thread)}; "
                "nothing waits for it, and the command ends without it"
            )

    def _lost_files(self) -> bool:
        """Return whether a file that the run has open is closed."""
        for descriptor in self._run.descriptors():
            try:
                os.fstat(descriptor)
            except OSError as error:
                if error.errno == errno.EBADF:
                    return True
        return False

    def _failure(self, what: str, error: BaseException) -> TurnwrightError:
        location = user_location(error)
        where = f" ({location})" if location else ""
        resume = f"turnwright train --resume {self._run.given_path}"
        return TurnwrightError(
            f"code of {self._environments} {what}{where}; {REMEDY}. Then resume with: {resume}"
        )


def threads_left(before: set[threading.Thread]) -> list[threading.Thread]:
    """Return the threads, begun since `before`, for which Python waits before a process ends."""
    waited_for = [thread for thread in threading.enumerate() if not thread.daemon]
    return [thread for thread in waited_for if thread not in before and thread.is_alive()]


def describe_thread(thread: threading.Thread) -> str:
    """Return a thread's name, and the line of user code where it is."""
    frame: Any = sys._current_frames().get(thread.ident or 0)
    place = user_line(frame)
    return f"{thread.name!r} at {place}" if place else repr(thread.name)

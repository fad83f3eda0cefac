"""A control group for each sandbox, where this user may make one: the kernel bounds all its memory.

It needs version 2 of control groups, and a group that is delegated to this user with the memory
controller, as systemd delegates those of a user's session
(https://docs.kernel.org/admin-guide/cgroup-v2.html#delegation). Groups are made beside the one of
this process, since a group with processes cannot hand its memory on to groups below it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

OWN = Path("/proc/self/cgroup")
MOUNTS = Path("/proc/self/mountinfo")

_PROBE_BYTES = 64 << 20
"""Memory of the group by which is tried whether groups work."""

_REMOVAL_S = 1.0
"""Maximum seconds until a group whose processes were killed is empty."""


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A control group whose processes together have at most so much memory."""

    path: Path

    @classmethod
    def make(cls, parent: Path, limit: int) -> MemoryGroup:
        """Make a group below `parent`; raise `OSError` where this is not allowed."""
        group = cls(Path(tempfile.mkdtemp(prefix="turnwright-sandbox-", dir=parent)))
        try:
            (group.path / "memory.max").write_text(str(limit))
            with contextlib.suppress(FileNotFoundError):  # kernels without swap
                (group.path / "memory.swap.max").write_text("0")
        except OSError:
            group.remove()
            raise
        return group

    def command(self, words: list[str]) -> list[str]:
        """Return a command line that joins the group before it runs `words`."""
        join = 'echo 0 > "$0" && exec "$@"'
        return ["/bin/sh", "-c", join, str(self.path / "cgroup.procs"), *words]

    @property
    def was_exceeded(self) -> bool:
        """Whether the kernel has killed a process because the group had all of its memory."""
        try:
            lines = (self.path / "memory.events").read_text().splitlines()
            counts = dict(line.split() for line in lines)
        except (OSError, ValueError):
            return False
        return counts.get("oom_kill", "0") != "0"

    def remove(self) -> None:
        """Remove the group; its processes have been killed, and may take a moment to end."""
        until = time.monotonic() + _REMOVAL_S
        while True:
            try:
                self.path.rmdir()
                break
            except OSError as error:
                if error.errno != errno.EBUSY or time.monotonic() > until:
                    break
            time.sleep(0.01)


@functools.cache
def delegated_group() -> Path | None:
    """Return the directory in which this user may make groups with a limit on memory.

    None if there is none.
    """
    parent = _parent_group(OWN, MOUNTS)
    return parent if parent is not None and _works(parent) else None


def _parent_group(own: Path, mounts: Path) -> Path | None:
    """Return the group above that of this process, if it is delegated to this user with the memory
    controller."""
    try:
        mark = "0::"  # of version 2
        groups = [line for line in own.read_text().splitlines() if line.startswith(mark)]
        mounted = [line for line in mounts.read_text().splitlines() if " - cgroup2 " in line]
        if not groups or not mounted:
            return None
        group = groups[0].removeprefix(mark)
        if group == "/" or ".." in group.split("/"):
            return None

        # Fields of a mount: id, parent, device, directory of the hierarchy that is mounted, where
        # it is mounted.
        _, _, _, root, target, *_ = mounted[0].split()
        if group == root or not group.startswith(root):
            return None
        parent = (Path(target) / os.path.relpath(group, root)).parent
        controllers = (parent / "cgroup.subtree_control").read_text().split()
    except OSError:
        return None
    return parent if "memory" in controllers and _is_delegated(parent) else None


def _is_delegated(group: Path) -> bool:
    """Return whether a group is this user's: by its owner, or for root by systemd's mark on groups
    that it gave away."""
    user = os.geteuid()
    if user != 0:
        is_writable = os.access(group, os.W_OK) and os.access(group / "cgroup.procs", os.W_OK)
        return is_writable and group.stat().st_uid == user
    for name in ("user.delegate", "trusted.delegate"):
        with contextlib.suppress(OSError):
            if os.getxattr(group, name) == b"1":
                return True
    return False


def _works(parent: Path) -> bool:
    """Return whether a process can be limited in a new group below `parent`."""
    try:
        group = MemoryGroup.make(parent, _PROBE_BYTES)
    except OSError:
        return False
    command = group.command(["/bin/true"])
    try:
        probe = subprocess.run(command, capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return False
    finally:
        group.remove()
    return probe.returncode == 0

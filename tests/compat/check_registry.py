"""Checks registered environments, each in a process of its own.

    python check_registry.py FRAMEWORK SITE SECONDS [ID ...]

Prints `id<TAB>seconds<TAB>error` for each id of the registry, the error empty where the check finds
none. SECONDS of CPU time bound each. Each split has 16 tasks, not the 200 of the command line,
since some datasets take seconds for one.
"""

import os
import resource
import signal
import sys
import time


def check(name, id, seconds):
    """Return the first error of an environment; empty where there is none."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        # Another program's load changes no verdict.
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        signal.alarm(20 * seconds)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        from turnwright.envs.check import check_env
        from turnwright.envs.resolve import resolve_env

        try:
            findings = check_env(resolve_env(f"{name}:{id}"), n=4, made=16)
            found = [finding.text for finding in findings if finding.severity == "error"]
        except BaseException as error:
            found = [f"{type(error).__name__}: {error}"]
        os.write(writer, (" ".join(found[0].split())[:300] if found else "").encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        text = answer.read().decode(errors="replace")
    _, status = os.waitpid(pid, 0)
    return (
        text
        if os.WIFEXITED(status)
        else f"did not end in {seconds} s of CPU time (signal {os.WTERMSIG(status)})"
    )


def main():
    name, site, seconds, *only = sys.argv[1:]
    sys.path.append(site)
    from turnwright.envs.foreign import framework

    again = ("-raw", "-train")  # the same games in other wrappers, which do not apply
    ids = only or [id for id in framework(name).ids() if not id.endswith(again)]
    for id in ids:
        started = time.monotonic()
        error = check(name, id, int(seconds))
        print(id, f"{time.monotonic() - started:.1f}", error, sep="\t", flush=True)


if __name__ == "__main__":
    main()

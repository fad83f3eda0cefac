"""Checks registered environments, each in a process of its own.

    python check_registry.py FRAMEWORK SITE SECONDS COUNT [ID ...]

Prints `id<TAB>seconds<TAB>error` for each, the error empty where the check finds none, until COUNT of them pass; 0 checks all.
"""

import os
import signal
import sys
import time


def check(name, id, seconds):
    """Return the first error of an environment; empty where there is none."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(seconds)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        from turnwise.envs.check import check_env
        from turnwise.envs.resolve import resolve_env

        try:
            findings = check_env(resolve_env(f"{name}:{id}"), n=4)
            found = [finding.text for finding in findings if finding.severity == "error"]
        except BaseException as error:
            found = [f"{type(error).__name__}: {error}"]
        os.write(writer, (" ".join(found[0].split())[:300] if found else "").encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        text = answer.read().decode(errors="replace")
    _, status = os.waitpid(pid, 0)
    return text if os.WIFEXITED(status) else f"did not end in {seconds} s (signal {os.WTERMSIG(status)})"


def main():
    name, site, seconds, count, *only = sys.argv[1:]
    sys.path.append(site)
    from turnwise.envs.foreign import framework

    passed = 0
    for id in only or list(framework(name).ids()):
        if not only and id.endswith(("-raw", "-train")):  # the same games in other wrappers, which do not apply
            continue
        started = time.monotonic()
        error = check(name, id, int(seconds))
        passed += not error
        print(id, f"{time.monotonic() - started:.1f}", error, sep="\t", flush=True)
        if int(count) and passed >= int(count):
            break


if __name__ == "__main__":
    main()

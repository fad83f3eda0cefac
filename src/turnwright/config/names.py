"""Names and other texts that keys accept, and what is wrong with any other."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Literal, get_args

from turnwright import plugins
from turnwright.errors import did_you_mean

ENGINES = ("local", "auto", "vllm", "sglang", "llamacpp", "chat")
COLUMNS = ("prompt", "answer", "id", "images", "videos", "env", "metadata", "tools")
"""Contents that `[env] columns` can name."""
PROGRAM = "program"
"""`env.use` of an unmodified program (`turnwright_serve.proxy.recipe`)."""
HISTORY_MODES = ("append", "inline", "template")
HISTORY_POLICIES = ("keep_images", "downscale_images", "drop_reasoning")
"""Names of the built-in history policies; each takes a number."""
HISTORY_OBJECT = "object:"
"""Prefix of the name of a policy given as an object."""
Advantage = Literal[
    "std",
    "mean",
    "rloo",
    "maxrl",
    "batch",
    "group_batch",
    "running",
    "gigpo",
    "gagpo",
    "state_rloo",
    "state_std",
    "gae",
    "gae_turn",
    "gae_bilevel",
]
ADVANTAGES: tuple[str, ...] = get_args(Advantage)
STATE_ADVANTAGES = ("gigpo", "gagpo", "state_rloo", "state_std")
"""Advantages that compare the turns of a task's episodes that began in equal states."""
CRITIC_ADVANTAGES = ("gae", "gae_turn", "gae_bilevel")
"""Generalized advantages from the values of a critic: by token, by turn, or by both."""
GROUPLESS_ADVANTAGES = ("batch", "running", *CRITIC_ADVANTAGES)
"""Advantages for which an episode needs no others of its task."""
ALGORITHM_ADVANTAGES: dict[str, Advantage] = {
    "grpo": "std",
    "dr_grpo": "mean",
    "dapo": "std",
    "rloo": "rloo",
    "reinforce_pp": "batch",
    "reinforce_pp_baseline": "group_batch",
    "gspo": "std",
    "cispo": "std",
    "maxrl": "maxrl",
    "gigpo": "gigpo",
    "gagpo": "gagpo",
    "state_rloo": "state_rloo",
    "state_grpo": "state_std",
    "ppo": "gae",
    "turn_ppo": "gae_turn",
    "bilevel_ppo": "gae_bilevel",
}
"""The advantage of each algorithm."""
ALGORITHMS = tuple(ALGORITHM_ADVANTAGES)
PARSERS = (
    *("hermes", "qwen3_coder", "seed", "mistral", "deepseek", "glm", "hunyuan", "kimi", "kimi_k3"),
    *("harmony", "cohere", "command_r", "gemma", "lfm2", "minimax_m2", "muse", "minimax_m1"),
    *("apriel", "nemotron_v2", "gigachat", "functionary", "minicpm", "granite", "internlm2"),
    *("function_gemma", "minicpm3", "olmo3", "solar", "apertus", "llama3", "pythonic", "json_list"),
)
"""Reply formats, the names of `turnwright.renderers.parsers.PARSERS`."""
TRACKERS = ("trackio", "wandb", "tensorboard")
SAMPLERS = ("uniform", "window", "pools", "progress")
LOSS_SCALES = ("default", "last_round")

ErrorOf = Callable[[str], str]
"""What is wrong with a name, or an empty string."""


def _named(
    names: Collection[str], own: str = "file.py:function", marks: Collection[str] = (".py",)
) -> ErrorOf:
    """Return a function that tells what is wrong with a name, or returns an empty string.

    A name with any of the `marks` is the user's, of the form `own`, unless that is empty.
    """

    def error(name: str) -> str:
        is_own = bool(own) and any(mark in name for mark in marks)
        if name in names or is_own:
            return ""
        near = did_you_mean(name, names)
        choices = f"there are {', '.join(names)}"
        if own:
            choices += f"; your own is {own}"
        return f"{near} {choices}" if near else choices

    return error


def _or_installed(kind: plugins.Kind, error: ErrorOf) -> ErrorOf:
    """Return a function that accepts, besides what `error` does, names of an installed package."""

    def error_unless_installed(name: str) -> str:
        why = error(name)
        # Packages are asked only about names that are not ours: that reads their metadata.
        if why and name in plugins.installed(kind):
            return ""
        return why

    return error_unless_installed


engine_error = _or_installed("engines", _named(ENGINES, own=""))
parser_error = _or_installed("parsers", _named(PARSERS, own=""))
tracker_error = _or_installed("trackers", _named(TRACKERS, "file.py:Class", marks=(".py", ":")))
sampler_error = _named(SAMPLERS, "file.py:Class")
algorithm_error = _named(ALGORITHMS)
advantage_error = _named(ADVANTAGES)
loss_scale_error = _named(LOSS_SCALES)


def history_error(value: str) -> str:
    """Return what is wrong with a value of `rollout.history`, or an empty string."""
    if value in HISTORY_MODES or value.startswith(HISTORY_OBJECT) or ".py" in value:
        return ""
    policy, _, number = value.partition(":")
    if policy in HISTORY_POLICIES:
        return "" if number.isdecimal() else f"say how many, as in {policy}:2"

    near = did_you_mean(policy, (*HISTORY_MODES, *HISTORY_POLICIES))
    forms = [*HISTORY_MODES, *(f"{name}:N" for name in HISTORY_POLICIES), "file.py:policy"]
    choices = f"there are {', '.join(forms)}"
    return f"{near} {choices}" if near else choices


def url_error(url: str) -> str:
    """Return what is wrong with the URL of a server."""
    if url.startswith(("http://", "https://")):
        return ""
    return f"{url!r} is not a URL; write http://host:port"


def address_error(address: str) -> str:
    """Return what is wrong with an address to listen at."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and int(port) < 2**16:
        return ""
    return "write host:port, such as 0.0.0.0:7070; port 0 is a free one"


def device_error(device: str) -> str:
    """Return what is wrong with the name of a device."""
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        return ""
    return 'must be "auto", "cpu", "cuda" or "cuda:N"'


def policy_name_error(name: str) -> str:
    """Return what is wrong with a policy's name, which is part of names of metrics and files."""
    if re.fullmatch(r"[A-Za-z][\w-]*", name, re.ASCII):
        return ""
    return "must be a name of letters, digits, '_' and '-', such as \"asker\""


def stop_error(text: str) -> str:
    """Return what is wrong with a text that ends replies."""
    return "" if text else 'a text must not be empty; write for example ["</search>"]'


def sanity_share_error(share: float | str) -> str:
    """Return what is wrong with a share of compared episodes, or `turns`."""
    if share == "turns":
        return ""
    is_share = isinstance(share, (int, float)) and 0 <= share <= 1
    return "" if is_share else 'must be from 0 to 1, or "turns"'


def out_error(directory: str) -> str:
    """Return what is wrong with the directory of a run."""
    return "" if directory.strip() else "must name a directory for the run"


def no_such_file(path: str) -> str:
    """Return the error about a file that there is not, with the probably intended one."""
    folder = Path(path).parent
    near = ""
    if folder.is_dir():
        near = did_you_mean(Path(path).name, [file.name for file in folder.iterdir()])
    return f"no such file; {near or 'check the path, which is relative to the recipe'}"

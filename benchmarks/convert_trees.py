"""Convert every multi-turn launch script of other systems' source trees, and
judge each recipe key by key.

    python benchmarks/convert_trees.py TREES [--verbose]

TREES holds the trees of slime, Miles, SkyRL, verl, ms-swift and TRL, in folders `slime`, `miles`,
`skyrl`, `verl`, `swift`, `trl`. Nothing of them is executed.

A script counts if it starts a training and its text names what only several turns need
(`MULTI_TURN`: a generate function, an agent loop, turns, tools, a scheduler, an environment
factory, a teacher of own replies). The judge does not use the converter's reader or tables. It
finds flags in the text of the script, whatever branch they are in, and compares them with the
recipe by `EXPECTED`, which is written from the systems' documents. A flag is silently wrong if the
recipe has another value than each of those that the text gives, or if neither the recipe nor the
account names it. Branches, loops and variables that the judge cannot resolve leave several values
or none; a flag without a value is only required to be named.

Prints `{"scripts", "complete", "incomplete_said", "refused_said", "silently_wrong"}`.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnwright.errors import ConfigError
from turnwright_compat.launch_scripts import Converted, convert_file

Transform = Callable[[Any], Any]
SYSTEM_OF = {
    "slime": "slime",
    "miles": "slime",
    "skyrl": "skyrl",
    "verl": "verl",
    "swift": "swift",
    "trl": "trl",
}

LAUNCHES = {
    "slime": r"train(_async)?\.py|execute_train\(",
    "skyrl": r"skyrl[\w.]*entrypoints|-m\s+examples\.train|examples/train/\S+entrypoint",
    "verl": r"verl\.trainer\.main_ppo|fully_async_main|one_step_off_policy\.main",
    "swift": r"(swift|megatron) rlhf|^rlhf_type:",
    "trl": r"(GRPO|RLOO)Trainer\(",
}
MULTI_TURN = {
    "slime": r"--custom-generate-function-path|--rollout-function-path|--custom-agent-function-path|--generate-max-turns"  # noqa: E501
    r"|--fully-async|--use-session-server",
    "skyrl": r"generator\.max_turns|use_conversation_multi_turn|step_wise|fully_async|examples[./]train[./\w]*"  # noqa: E501
    r"(search|sql|multiply|rlm|mini_swe|verifiers|harbor|openenv|openreward|visgym|turn_level)",
    "verl": r"multi_turn|agent_loop|agent\.default|tool_config|function_tool",
    "swift": r"multi_turn_scheduler|gym_env|max_turns|rlhf_type[: ]+gkd|teacher_model",
    "trl": r"environment_factory\s*=|\btools\s*=|rollout_func\s*=",
}


# What a flag becomes: recipe key and value.


def same(value: Any) -> Any:
    """The value itself."""
    return value


def off_at(*values: Any) -> Transform:
    """The value, or nothing where it means none."""
    return lambda value: None if value in values else value


def choice(**names: Any) -> Transform:
    """The word that a recipe has for a word."""
    return lambda value: names.get(
        str(value).lower().replace("-", "_").replace("+", "p"), NOT_JUDGED
    )


def text(value: Any) -> Any:
    """The value as a text."""
    return str(value)


def at_least_0(value: Any) -> Any:
    """-1 disables there what 0 disables here."""
    return max(0, value) if isinstance(value, int) else NOT_JUDGED


NOT_JUDGED = object()
"""A value for which the table has no word: it must be named, whatever became of it."""

EXPECTED: dict[str, dict[str, tuple[str, Transform]]] = {
    "slime": {
        "hf-checkpoint": ("model.path", text),
        "num-rollout": ("train.steps", same),
        "rollout-batch-size": ("rollout.groups", same),
        "n-samples-per-prompt": ("rollout.group_size", same),
        "rollout-temperature": ("rollout.temperature", same),
        "rollout-top-p": ("rollout.top_p", same),
        "rollout-top-k": ("rollout.top_k", at_least_0),
        "rollout-max-response-len": ("limits.episode_tokens", same),
        "rollout-max-prompt-len": ("limits.prompt_tokens", same),
        "rollout-max-context-len": ("limits.context", same),
        "max-seq-len": ("limits.context", same),
        "generate-max-turns": ("limits.turns", same),
        "prompt-data": ("env.0.tasks", text),
        "input-key": ("env.0.columns.prompt", text),
        "label-key": ("env.0.columns.answer", text),
        "advantage-estimator": (
            "train.algorithm",
            choice(
                grpo="grpo",
                gspo="gspo",
                cispo="cispo",
                ppo="ppo",
                reinforce_plus_plus="reinforce_pp",
                reinforce_plus_plus_baseline="reinforce_pp_baseline",
            ),
        ),
        "eps-clip": ("train.clip_low", same),
        "eps-clip-high": ("train.clip_high", same),
        "entropy-coef": ("train.entropy", same),
        "lr": ("train.lr", same),
        "lr-decay-style": (
            "train.schedule",
            choice(constant="constant", linear="linear", cosine="cosine"),
        ),
        "weight-decay": ("train.weight_decay", same),
        "clip-grad": ("train.max_grad_norm", same),
        "save": ("out", text),
        "save-interval": ("checkpoint.every", same),
        "eval-interval": ("eval.every", same),
        "n-samples-per-eval-prompt": ("eval.samples", same),
        "lora-rank": ("lora.rank", off_at(0)),
        "lora-dropout": ("lora.dropout", same),
        "custom-rm-path": ("env.0.args.custom_rm_path", text),
        "rm-type": ("env.0.args.rm_type", text),
        "seed": ("seed", same),
    },
    "skyrl": {
        "generator.max_turns": ("limits.turns", same),
        "generator.n_samples_per_prompt": ("rollout.group_size", same),
        "generator.max_input_length": ("limits.context", same),
        "trainer.max_prompt_length": ("limits.prompt_tokens", same),
        "generator.sampling_params.max_generate_length": ("limits.turn_tokens", same),
        "generator.sampling_params.temperature": ("rollout.temperature", same),
        "generator.sampling_params.top_p": ("rollout.top_p", same),
        "generator.apply_overlong_filtering": ("train.overlong_filter", off_at(False)),
        "generator.eval_n_samples_per_prompt": ("eval.samples", same),
        "trainer.policy.model.path": ("model.path", text),
        "trainer.train_batch_size": ("rollout.groups", same),
        "trainer.epochs": ("train.data_epochs", same),
        "trainer.max_training_steps": ("train.steps", off_at(None)),
        "trainer.policy.optimizer_config.lr": ("train.lr", same),
        "trainer.policy.optimizer_config.weight_decay": ("train.weight_decay", same),
        "trainer.policy.optimizer_config.max_grad_norm": ("train.max_grad_norm", same),
        "trainer.policy.model.lora.rank": ("lora.rank", off_at(0)),
        "trainer.algorithm.advantage_estimator": (
            "train.algorithm",
            choice(gae="ppo", grpo="grpo", rloo="rloo", reinforcepp="reinforce_pp"),
        ),
        "trainer.algorithm.kl_loss_coef": ("train.kl", off_at(0, 0.0)),
        "trainer.algorithm.eps_clip_low": ("train.clip_low", same),
        "trainer.algorithm.eps_clip_high": ("train.clip_high", same),
        "trainer.ckpt_path": ("out", text),
        "trainer.eval_interval": ("eval.every", at_least_0),
        "trainer.update_epochs_per_batch": ("train.epochs", same),
        "trainer.fully_async.max_staleness_steps": ("schedule.staleness", same),
    },
    "verl": {
        "data.train_batch_size": (
            "rollout.groups",
            lambda value: NOT_JUDGED if value == 0 else value,
        ),
        "data.max_prompt_length": ("limits.prompt_tokens", same),
        "data.max_response_length": ("limits.episode_tokens", same),
        "actor_rollout_ref.model.path": ("model.path", text),
        "actor_rollout_ref.rollout.n": ("rollout.group_size", same),
        "actor_rollout_ref.rollout.temperature": ("rollout.temperature", same),
        "actor_rollout_ref.rollout.top_p": ("rollout.top_p", same),
        "actor_rollout_ref.rollout.top_k": ("rollout.top_k", at_least_0),
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": ("limits.turns", same),
        "actor_rollout_ref.rollout.multi_turn.tool_config_path": (
            "env.0.args.tool_config_path",
            text,
        ),
        "actor_rollout_ref.actor.optim.lr": ("train.lr", same),
        "actor_rollout_ref.actor.optim.weight_decay": ("train.weight_decay", same),
        "actor_rollout_ref.actor.clip_ratio_low": ("train.clip_low", same),
        "actor_rollout_ref.actor.clip_ratio_high": ("train.clip_high", same),
        "actor_rollout_ref.actor.clip_ratio_c": ("train.clip_cap", same),
        "actor_rollout_ref.actor.entropy_coeff": ("train.entropy", same),
        "actor_rollout_ref.actor.loss_agg_mode": (
            "train.aggregation",
            choice(
                token_mean="token",
                seq_mean_token_mean="trajectory",
                seq_mean_token_sum_norm="fixed",
            ),
        ),
        "algorithm.adv_estimator": (
            "train.algorithm",
            choice(
                gae="ppo",
                grpo="grpo",
                rloo="rloo",
                reinforce_plus_plus="reinforce_pp",
                reinforce_plus_plus_baseline="reinforce_pp_baseline",
            ),
        ),
        "trainer.total_training_steps": ("train.steps", off_at(None)),
        "trainer.test_freq": ("eval.every", at_least_0),
        "actor_rollout_ref.rollout.val_kwargs.n": ("eval.samples", same),
        "actor_rollout_ref.rollout.val_kwargs.top_p": ("eval.top_p", same),
        "actor_rollout_ref.model.lora_rank": ("lora.rank", off_at(0)),
    },
    "swift": {
        "model": ("model.path", text),
        "num_generations": ("rollout.group_size", same),
        "temperature": ("rollout.temperature", same),
        "top_p": ("rollout.top_p", same),
        "top_k": ("rollout.top_k", at_least_0),
        "max_turns": ("limits.turns", same),
        "max_completion_length": ("limits.turn_tokens", same),
        "max_length": ("limits.prompt_tokens", same),
        "learning_rate": ("train.lr", same),
        "lr": ("train.lr", same),
        "weight_decay": ("train.weight_decay", same),
        "num_train_epochs": ("train.data_epochs", same),
        "epsilon": ("train.clip_low", same),
        "epsilon_high": ("train.clip_high", same),
        "lora_rank": ("lora.rank", same),
        "teacher_model": ("teacher.0.path", text),
        "seed": ("seed", same),
        "output_dir": ("out", text),
    },
    "trl": {
        "num_generations": ("rollout.group_size", same),
        "max_completion_length": ("limits.turn_tokens", same),
        "learning_rate": ("train.lr", same),
        "temperature": ("rollout.temperature", same),
        "top_k": ("rollout.top_k", at_least_0),
        "top_p": ("rollout.top_p", same),
        "weight_decay": ("train.weight_decay", same),
        "num_train_epochs": ("train.data_epochs", same),
        "max_tool_calling_iterations": ("env.0.args.max_tool_calling_iterations", same),
        "output_dir": ("out", text),
    },
}


SUPERSEDED = {
    "num_train_epochs": ("max_steps", "train_iters"),
    "trainer.epochs": ("trainer.max_training_steps",),
    "trainer.algorithm.kl_loss_coef": ("trainer.algorithm.use_kl_loss",),
}
"""A flag -> others that decide in its place where they are given."""


@dataclass(slots=True)
class Judged:
    """One script."""

    path: str
    kind: str
    faults: list[str] = field(default_factory=list)


def scripts(trees: Path) -> Iterator[tuple[str, Path, str]]:
    """Yield each multi-turn launch script as (system, path, text)."""
    for folder, system in SYSTEM_OF.items():
        for path in sorted((trees / folder).rglob("*")):
            if (
                path.suffix not in (".sh", ".py", ".yaml")
                or not path.is_file()
                or path.is_symlink()
            ):
                continue
            if path.suffix == ".yaml" and system != "swift":
                continue  # configurations that other scripts name
            source = path.read_text(encoding="utf-8", errors="replace")
            if folder == "trl" and "examples" not in path.parts:
                continue
            starts = re.search(LAUNCHES[system], uncommented(source), re.MULTILINE)
            in_package = path.suffix == ".py" and (
                path.parts[len(trees.parts) + 1] == folder or path.name.startswith("train")
            )
            if starts and not in_package and re.search(MULTI_TURN[system], uncommented(source)):
                if (
                    path.suffix == ".py"
                    and system != "trl"
                    and not re.search(r"['\"]\s*--?[a-z]|execute_train\(", source)
                ):
                    continue
                if path.suffix == ".py" and system in ("skyrl", "verl", "swift"):
                    continue  # their own code; they are started by scripts
                yield system, path, source


def uncommented(source: str) -> str:
    """Return the text without lines that are comments."""
    return "\n".join(line for line in source.splitlines() if not line.lstrip().startswith("#"))


def plain(word: str) -> Any:
    """Return a word as a number, a truth value or a text."""
    word = word.strip().strip("\"'")
    lowered = word.lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    if lowered in ("null", "none"):
        return None
    try:
        return int(word) if re.fullmatch(r"[+-]?\d+", word) else float(word)
    except ValueError:
        return word


def variables(source: str) -> dict[str, set[str]]:
    """Return the literal values that a script gives to variables anywhere."""
    found: dict[str, set[str]] = {}
    pattern = r"^\s*(?:export\s+|local\s+|declare\s+)?([A-Za-z_]\w*)=(\"[^\"\n]*\"|'[^'\n]*'|[^\s\"';&|]*)"  # noqa: E501
    for match in re.finditer(pattern, source, re.MULTILINE):
        found.setdefault(match[1], set()).add(match[2].strip("\"'"))
    for match in re.finditer(r"\$\{([A-Za-z_]\w*):?[-=]([^}$]*)\}", source):
        found.setdefault(match[1], set()).add(match[2].strip("\"'"))
    return found


def resolved(word: str, known: dict[str, set[str]], depth: int = 0) -> set[str]:
    """Return the texts that a word can be; those that hold something unknown are left out."""
    match = re.search(r"\$\{([A-Za-z_]\w*)(?::?[-=]([^}$]*))?\}|\$([A-Za-z_]\w*)", word)
    if match is None:
        return set() if "$" in word or "{" in word.replace("{}", "") else {word}
    if depth > 6:
        return set()
    name = match[1] or match[3]
    values = known.get(name, set()) | ({match[2]} if match[2] is not None else set())
    found: set[str] = set()
    for value in values:
        if f"${name}" not in value and f"${{{name}" not in value:
            found |= resolved(word[: match.start()] + value + word[match.end() :], known, depth + 1)
    return found


def flags(system: str, path: Path, source: str) -> dict[str, set[str] | None]:
    """Return the flags in a script's text with the values that they can have; None for
    values that are not known."""
    body = uncommented(source)
    found: dict[str, set[str] | None] = {}

    def add(name: str, word: str | None) -> None:
        values = None if word is None or not word.strip() else resolved(word, known)
        if not values or found.get(name, set()) is None:
            found[name] = None
        else:
            found[name] = (found.get(name) or set()) | values

    known = variables(body)
    if system == "trl":
        for call in re.finditer(r"(?:GRPO|RLOO)Config\((.*?)\n\s*\)", body, re.DOTALL):
            for match in re.finditer(r"^\s*([a-z_]\w*)=(.+?),?\s*$", call[1], re.MULTILINE):
                literal = re.fullmatch(r"-?[\d.]+(?:e-?\d+)?|\"[^\"]*\"|True|False", match[2])
                found[match[1]] = {match[2].strip('"')} if literal else None
        return found
    if path.suffix == ".yaml":
        for match in re.finditer(r"^\s*([a-z_]\w*):[ \t]+([^#\n]+)", body, re.MULTILINE):
            add(match[1], match[2].strip())
        return found
    if system in ("skyrl", "verl"):
        for match in re.finditer(
            r"(?<![\w.-])\+{0,2}([a-z_]\w*(?:\.\w+)+)=(\"[^\"\n]*\"|'[^'\n]*'|[^\s\\\"')]*)", body
        ):
            add(match[1], match[2].strip("\"'"))
        return found
    pattern = r"(?<![\w-])--([a-z][\w-]*)(?:[ \t=]+((?:\"[^\"\n]*\"|'[^'\n]*'|[^\s\\\"')-][^\s\\\"')]*)))?"  # noqa: E501
    for match in re.finditer(pattern, body):
        name = match[1].replace("_", "-") if system == "slime" else match[1].replace("-", "_")
        add(name, None if match[2] is None else match[2].strip("\"'"))
    return found


def always(path: Path, source: str) -> str:
    """Return the texts of a Python launcher that are in no branch; of another
    script, all of its text."""
    if path.suffix != ".py":
        return source
    unconditional: list[str] = []

    def walk(node: ast.AST) -> None:
        if isinstance(node, ast.If | ast.IfExp | ast.Match):
            return
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            unconditional.append(node.value)
        for child in ast.iter_child_nodes(node):
            walk(child)

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            for one in node.body:
                walk(one)
    return " ".join(unconditional)


def value_at(recipe: dict[str, Any], key: str) -> Any:
    """Return a recipe's value by its dotted key; None if it is not set."""
    found: Any = recipe
    for part in key.split("."):
        try:
            found = found[int(part)] if part.isdecimal() else found[part]
        except (KeyError, IndexError, TypeError):
            return None
    return found


def equal(left: Any, right: Any) -> bool:
    """Compare numbers as numbers and the ends of paths, which the converter makes absolute."""
    if isinstance(left, int | float) and isinstance(right, int | float):
        return math.isclose(left, right, rel_tol=1e-9)
    if isinstance(left, str) and isinstance(right, str):
        return (
            left == right
            or left.endswith(f"/{right}")
            or right.partition("#")[0].partition("@")[0] == left
        )
    return bool(left == right)


def named(flag: str, converted: Converted) -> bool:
    """Return whether the account or a line of what is missing names a flag."""
    return any(
        account.key == flag or account.key.endswith(f".{flag}") for account in converted.accounts
    ) or any(flag in line for line in (*converted.incomplete, *converted.notes))


def dropped(flag: str, converted: Converted) -> bool:
    """Return whether a flag is listed as not converted for a reason, or its
    value as one to replace.

    "No effect at this value" is no such reason: where the table here has a
    value, the flag has an effect.
    """
    listed = [
        one for one in converted.accounts if one.key == flag and one.kind in ("none", "unknown")
    ]
    return any(not one.text.startswith("no effect") for one in listed) or any(
        flag in line for line in (*converted.incomplete, *converted.notes)
    )


def judge(system: str, path: Path, source: str) -> Judged:
    """Convert a script and compare each of its flags with the recipe."""
    try:
        converted = convert_file(path)
    except ConfigError as error:
        one_line = "\n" not in str(error) and len(str(error)) > 10
        return Judged(
            str(path), "refused_said", [] if one_line else ["the refusal is not one line"]
        )
    except Exception as error:
        return Judged(str(path), "silently_wrong", [f"crashed: {type(error).__name__}: {error}"])
    recipe = tomllib.loads(converted.recipe)
    faults = [] if converted.system == system else [f"taken for {converted.system}"]
    given = flags(system, path, source)
    certain = always(path, source)
    for flag, values in given.items():
        if any(other in given for other in SUPERSEDED.get(flag, ())):
            continue
        if (
            system == "trl"
            or named(flag, converted)
            or f"--{flag}" in certain
            or path.suffix != ".py"
        ):
            faults += judge_flag(system, flag, values, converted, recipe)
    faults += judge_minibatches(system, given, converted, recipe)
    case = Case(uncommented(source), certain, given, converted, recipe)
    if case.replaced and converted.complete:
        faults.append("an environment to replace is not said")
    faults += JUDGES[system](case)
    kind = "complete" if converted.complete else "incomplete_said"
    return Judged(str(path), "silently_wrong" if faults else kind, faults)


def judge_flag(
    system: str, flag: str, values: set[str] | None, converted: Converted, recipe: dict[str, Any]
) -> list[str]:
    """Return what is wrong about one flag."""
    if not named(flag, converted):
        # a flag of another command of the script, or of a branch that is not taken, is in no
        # setting of the training
        known = EXPECTED[system].get(flag)
        if known is None or values is None or not converted.complete:
            return []
        return (
            []
            if any(equal(value_at(recipe, known[0]), known[1](plain(one))) for one in values)
            else [f"{flag} is lost"]
        )
    if flag not in EXPECTED[system] or not values:
        return []
    key, transform = EXPECTED[system][flag]
    expected = [transform(plain(one)) for one in values]
    actual = value_at(recipe, key)
    if key == "train.algorithm" and actual in ("gspo", "cispo"):
        # A loss that is an algorithm here, with the advantages of GRPO or of a critic.
        if "grpo" in expected:
            return []
        if "ppo" in expected and value_at(recipe, "train.advantage") == "gae":
            return []
    if any(one is NOT_JUDGED or equal(actual, one) for one in expected) or dropped(flag, converted):
        return []
    if any(
        key.removeprefix("env.0.") in note or key in note
        for note in (*converted.notes, *converted.incomplete)
    ):
        return []  # the account says that it is another value, and why
    return [f"{flag} = {sorted(values)}: {key} = {actual!r}"]


RATIOS = {
    "slime": (("rollout-batch-size", "n-samples-per-prompt"), "global-batch-size"),
    "skyrl": (("trainer.train_batch_size",), "trainer.policy_mini_batch_size"),
    "verl": (("data.train_batch_size",), "actor_rollout_ref.actor.ppo_mini_batch_size"),
}
"""The batch and its part that is one optimizer step; `train.minibatches` is their ratio."""


def judge_minibatches(
    system: str, given: dict[str, set[str] | None], converted: Converted, recipe: dict[str, Any]
) -> list[str]:
    """Return what is wrong about the optimizer steps of a batch, where the text has
    one value for each part."""
    if system not in RATIOS:
        return []
    whole, part = RATIOS[system]
    values = [
        plain(next(iter(own)))
        for key in (*whole, part)
        if (own := given.get(key)) and len(own) == 1
    ]
    if len(values) != len(whole) + 1 or not all(isinstance(one, int) and one > 0 for one in values):
        return []
    if not all(named(key, converted) for key in (*whole, part)) or "num-steps-per-rollout" in given:
        return []
    expected = max(1, round(math.prod(values[:-1]) / values[-1]))
    actual = value_at(recipe, "train.minibatches")
    return [] if actual == expected else [f"{part}: train.minibatches = {actual}, not {expected}"]


@dataclass(frozen=True, slots=True)
class Case:
    """A script with its recipe."""

    body: str
    """Text without comments."""
    certain: str
    """Text of a launcher that is in no branch."""
    given: dict[str, set[str] | None]
    converted: Converted
    recipe: dict[str, Any]

    @property
    def use(self) -> str:
        """The environment."""
        return str(value_at(self.recipe, "env.0.use"))

    @property
    def replaced(self) -> bool:
        """Whether the recipe leaves the environment to the user."""
        return self.use.startswith("REPLACE")


def judge_swift(case: Case) -> Iterator[str]:
    """Yield what is wrong about a scheduler or a teacher."""
    if re.search(r"rlhf_type[: ]+gkd", case.body) and "teacher" not in case.recipe:
        yield "gkd without a teacher"
    if (
        "teacher_model" in case.given
        and "teacher" not in case.recipe
        and not dropped("teacher_model", case.converted)
    ):
        yield "a teacher is lost"
    scheduler = case.given.get("multi_turn_scheduler")
    if scheduler and not any(case.use == f"swift:{one}" for one in scheduler):
        yield f"the scheduler is {scheduler}, use = {case.use}"


def judge_slime(case: Case) -> Iterator[str]:
    """Yield what is wrong about a generate function, a function for a step, a
    schedule or a teacher."""
    generate = case.given.get("custom-generate-function-path")
    functions = {one.rpartition(".")[2] for one in generate or ()} | {"build_env"}
    is_named = named("custom-generate-function-path", case.converted)
    if generate and is_named and not case.replaced and case.use.rpartition(":")[2] not in functions:
        yield f"the generate function is {generate}, use = {case.use}"
    asynchronous = re.search(r"--fully-async\b|fully_async_rollout\.", case.certain)
    if (
        asynchronous
        and value_at(case.recipe, "schedule.mode") != "async"
        and case.converted.complete
    ):
        yield "fully asynchronous, schedule.mode is not"
    rollout = case.given.get("rollout-function-path")
    own = asynchronous or any("sglang_rollout" in one for one in rollout or ())
    if rollout and not own and case.converted.complete:
        yield "a function for a step is lost"
    if "--use-opd" in case.body and "teacher" not in case.recipe:
        yield "a teacher is lost"


def judge_skyrl(case: Case) -> Iterator[str]:
    """Yield what is wrong about an environment."""
    classes = case.given.get("environment.env_class")
    by_name = case.use.startswith("skyrl:") or ":" not in case.use
    if (
        classes
        and by_name
        and not case.replaced
        and not any(case.use == f"skyrl:{one}" for one in classes)
    ):
        yield f"the environment is {classes}, use = {case.use}"
    if not classes and not case.replaced and "entrypoints.main_base" not in case.body:
        yield "an environment is made up"


def judge_verl(case: Case) -> Iterator[str]:
    """Yield what is wrong about turns or a teacher."""
    several = re.search(
        r"multi_turn\.enable=[Tt]rue|default_agent_loop=tool_agent|agent_loop_config_path=",
        case.body,
    )
    if (
        several
        and value_at(case.recipe, "limits.turns") == 1
        and "max_assistant_turns=1" not in case.body
    ):
        yield "several turns became one"
    if re.search(r"distillation\.enabled=[Tt]rue", case.body) and "teacher" not in case.recipe:
        yield "a teacher is lost"


def judge_trl(case: Case) -> Iterator[str]:
    """Yield what is wrong about an environment."""
    factory = re.search(r"environment_factory\s*=\s*(\w+)", case.body)
    if factory and not case.replaced and case.use.rpartition(":")[2] != factory[1]:
        yield f"the environment is {factory[1]}, use = {case.use}"


JUDGES = {
    "slime": judge_slime,
    "skyrl": judge_skyrl,
    "verl": judge_verl,
    "swift": judge_swift,
    "trl": judge_trl,
}
"""What is wrong about the kind of a training: its environment, its teacher,
its schedule, its turns."""


def main() -> int:
    """Print the counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trees", type=Path)
    parser.add_argument("--verbose", action="store_true", help="name the scripts of each class")
    args = parser.parse_args()
    found = [(system, judge(system, path, source)) for system, path, source in scripts(args.trees)]
    kinds = ("complete", "incomplete_said", "refused_said", "silently_wrong")
    counts = {kind: sum(one.kind == kind for _, one in found) for kind in kinds}
    if args.verbose:
        for kind in kinds:
            for system, one in found:
                if one.kind == kind:
                    print(f"{kind:16} {system:6} {Path(one.path).relative_to(args.trees)}")
                    print("".join(f"{'':24}{fault}\n" for fault in one.faults), end="")
    print(json.dumps({"scripts": len(found)} | counts))
    return 1 if counts["silently_wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())

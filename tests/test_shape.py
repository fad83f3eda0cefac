"""The shape of the code: capabilities of our own objects are declared, and nobody configures
another object from outside."""

import ast
import functools
import gc
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from turnwright.envs.stand_ins import MODULES

ROOT = Path(__file__).parents[1] / "src"


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Return the code by file, without the modules of stand-ins, which have other frameworks' shape."""  # noqa: E501
    homes = {
        ROOT.joinpath(*home.split(".")).with_suffix(".py")
        for sources in MODULES.values()
        for home in sources
    }
    files = (path for path in sorted(ROOT.glob("turnwright*/**/*.py")) if path not in homes)
    # else the growing trees are looked through again and again, which takes three
    # times as long as parsing
    gc.disable()
    try:
        return {str(path.relative_to(ROOT)): ast.parse(path.read_text("utf-8")) for path in files}
    finally:
        gc.enable()


FLASH = "_scaled_dot_product_flash_attention_for_cpu"

# `getattr`, `hasattr` and `setattr` with a literal name: for foreign objects only. By
# file, under the reason.
FOREIGN = {
    # modules of torch, and configurations and models of transformers and peft
    "turnwright/engines/local/engine.py": "config",
    "turnwright/engines/local/fused_decoder.py": "q_norm rope_parameters sliding_window",
    "turnwright/engines/local/mixed_precision.py": "_is_avx512_bf16_supported",
    "turnwright/engines/local/model.py": "rope_parameters full_tensor top_k weight",
    "turnwright/engines/local/attention.py": f"{FLASH} _attn_implementation config qkv",
    "turnwright/engines/local/vision.py": "base_model_prefix config deepstack_features "
    "get_image_features rope_parameters vision_config",
    "turnwright/training/forward/forward.py": "base_model_prefix config get_output_embeddings "
    "weight",
    "turnwright/training/forward/mixed_decoder.py": "q_norm",
    "turnwright/training/forward/prefix_tree.py": f"{FLASH} {FLASH}_backward _attn_implementation "
    "config head_dim num_experts_per_tok "
    "num_hidden_layers",
    "turnwright_compat/trl/rollout.py": "peft_config",
    "turnwright/training/low_rank.py": "lora_A",
    "turnwright/training/model/lora.py": "get_output_embeddings peft_config",
    "turnwright/training/distributed.py": "_no_split_modules full_tensor "
    "set_reduce_scatter_unused_params",
    "turnwright/training/servers.py": "head_dim",
    "turnwright/training/teachers/local.py": "config max_position_embeddings",
    "turnwright/training/trainer/memory.py": "config vocab_size weight",
    # arrays and images of any library
    "turnwright/config/recipe.py": "ndim",
    "turnwright/envs/tools/results.py": "shape",
    "turnwright/types/media.py": "size tobytes",
    "turnwright/types/messages.py": "ndim tobytes",
    "turnwright/types/expert_routing.py": "dtype kind shape",
    # objects of gymnasium, verifiers, the MCP client and jinja
    "turnwright/envs/gym.py": "dtype shape",
    "turnwright/envs/tools/mcp.py": "blob data mime_type resource text",
    "turnwright/renderers/template_sandbox.py": "jinja_pass_arg",
    "turnwright/renderers/watching_sandbox.py": "jinja_pass_arg",
    "turnwright_compat/games/reasoning_gym.py": "validate",
    "turnwright_compat/games/textarena.py": "close env game_info",
    # optional hooks of what a user writes: environments, factories, play functions, tools, policies
    "turnwright_compat/skyrl/adapter.py": "get_metrics",
    "turnwright_compat/slime/adapter.py": "close format_observation reset response_length samples "
    "step",
    "turnwright/training/advantages.py": "keep keep_when_insufficient reason",
    "turnwright_compat/swift/adapter.py": "_build_messages messages response rollout_infos step",
    "turnwright_compat/verl/adapter.py": "execute tool_schema",
    "turnwright_compat/verl/agent_loop.py": "response_ids",
    "turnwright_compat/verl/tools.py": "image model_dump",
    "turnwright/envs/isolation/env_server.py": "max_turns",
    "turnwright/envs/resolve.py": "tasks",
    "turnwright/envs/tools/stateful.py": "execute lifetime",
    "turnwright/renderers/history.py": "name",
    "turnwright/renderers/renderer.py": "vision",
    "turnwright/rollouts/standalone.py": "max_turns",
    "turnwright/training/policies.py": "agents",
    "turnwright/rollouts/episode.py": "max_turns",
    "turnwright/rollouts/env_session.py": "reset",
    # Python's own modules, coroutines and errors of the system
    "turnwright/envs/isolation/sandbox.py": "_base_executable",
    "turnwright/rollouts/watchdog.py": "SIGUSR1 cr_await cr_code cr_frame",
    "turnwright_serve/proxy/recording.py": "strerror",
    "turnwright_serve/serve.py": "strerror",
    "turnwright_view/web/server.py": "strerror",
}

# Variables that hold a record or the state of a running thing, which the code beside it fills:
# data, not configuration.
RECORDS = {
    # trajectory and its parts, while it is recorded, played by hand or read
    "trajectory",
    "turn",
    "turns[-1]",
    "span",
    "path",
    "record",
    "row",
    "played",
    "journal",
    "generation",
    "attempt",
    "data",
    "episode",
    "_episode",
    # what a function finds, makes or counts, and returns
    "found",
    "allocations",
    "response",
    "plan",
    "step_metrics",
    "result",
    "refused",
    # the state of a running rollout, process, thread or session
    "stop",
    "job",
    "call",
    "session",
    "_budget",
    "_threads",
    "worker",
    "server",
    "member",
    "escaper",
    "_shared",
    "thread",
    # places and passes of the local engine
    "slot",
    "batch",
    "fused",
    "part",
    "runs[-1]",
    "media",
    "cache",
    "table",
    "recording",
    # tensors, modules and configurations of torch, transformers, tokenizers and jinja
    "ctx",
    "p",
    "master",
    "parameter",
    "layer",
    "module",
    "model",
    "config",
    "own_config",
    "tokenizer",
    "options",
    "flags",
    "node",
    "operand",
    # what a display shows, and how far a tracker is
    "state",
    "_state",
    "position",
}

# Assignments to attributes of any other object that is not `self`: (file, target) -> why.
OTHERS = {
    ("turnwright/cli/completion.py", "action.complete"): "where shtab looks for it",
    ("turnwright/cli/main.py", "args.overrides"): "argparse",
    ("turnwright/cli/main.py", "warnings.formatwarning"): "the hook that Python has for it",
    ("turnwright/display/run_log.py", "package.propagate"): "logging",
    ("turnwright/config/recipe.py", "merged.origins"): "a copy, by the function that makes it",
    ("turnwright/engines/local/engine.py", "self._finalizer.atexit"): "weakref",
    ("turnwright_compat/trl/script.py", "sys.argv"): "the command line of a script that runs",
    ("turnwright/envs/thread_alarm.py", "timer.daemon"): "threading",
    (
        "turnwright/engines/local/slots.py",
        "first.index",
    ): "two slots change places, in the class that has them",
    ("turnwright/engines/local/slots.py", "second.index"): "likewise",
    (
        "turnwright/engines/remote/fleet.py",
        "engine.patient",
    ): "a fleet asks others meanwhile, and its engines are its own",
    ("turnwright_serve/server/http.py", "self._server.should_exit"): "uvicorn",
    ("turnwright/engines/protocols.py", "other._before"): "a copy, by a method of its class",
    (
        "turnwright_compat/swift/adapter.py",
        "scheduler._build_messages",
    ): "ms-swift, by the function that makes it",
    ("turnwright_compat/swift/adapter.py", "scheduler.infer_engine"): "likewise",
    ("turnwright_compat/swift/adapter.py", "scheduler.max_turns"): "likewise",
    ("turnwright_compat/swift/adapter.py", "scheduler.on_trajectory_start"): "likewise",
    ("turnwright_compat/swift/adapter.py", "scheduler.on_turn_end"): "likewise",
    ("turnwright_compat/swift/adapter.py", "scheduler.step"): "likewise",
    ("turnwright_compat/verifiers/adapter.py", "trace.ok"): "verifiers",
    ("turnwright/envs/isolation/forking.py", "tempfile.tempdir"): "a module of Python",
    ("turnwright/envs/user_imports.py", "spec.loader"): "importlib",
    ("turnwright/envs/user_imports.py", "spec.submodule_search_locations"): "importlib",
    ("turnwright/training/trainer/allocations.py", "leaf.grad"): "torch",
    ("turnwright/renderers/history.py", "policy.name"): "a function, named by what makes it",
    ("turnwright/renderers/template.py", "twin._no_tools"): "a copy, by a method of its class",
    ("turnwright/renderers/template.py", "twin._parts"): "a copy, by a method of its class",
    (
        "turnwright/renderers/template.py",
        "twin._text_arguments",
    ): "a copy, by a method of its class",
    ("turnwright/renderers/template.py", "twin._variables"): "a copy, by a method of its class",
    ("turnwright/renderers/template.py", "twin._writes_parts"): "a copy, by a method of its class",
}


def literal_names(tree: ast.AST) -> Iterator[str]:
    """Names given as literals to getattr, hasattr and setattr; those with underscores on both
    sides are Python's own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
            name = node.args[1]
            literal = node.func.id in ("getattr", "hasattr", "setattr") and isinstance(
                name, ast.Constant
            )
            if literal and not re.fullmatch(r"__\w+__", name.value):
                yield name.value


def assigned(tree: ast.AST) -> Iterator[str]:
    """Targets of assignments and deletions that are attributes of something other than
    self, cls or a record."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
            name = ast.unparse(node.value).rpartition(".")[2]
            if (
                name not in ("self", "cls")
                and name not in RECORDS
                and not re.fullmatch(r"__\w+__", node.attr)
            ):
                yield ast.unparse(node)


def compared(found: set[tuple[str, str]], allowed: set[tuple[str, str]]) -> list[str]:
    """What is not allowed, and what is allowed and not there any more."""
    return [f"{file}: {name}" for file, name in sorted(found - allowed)] + [
        f"{file}: {name} is allowed, and not there any more"
        for file, name in sorted(allowed - found)
    ]


def test_optional_attributes_of_our_own_objects_are_declared_by_protocols():
    found = {(file, name) for file, tree in trees().items() for name in literal_names(tree)}
    assert not compared(
        found, {(file, name) for file, names in FOREIGN.items() for name in names.split()}
    )


def test_nobody_sets_the_attributes_of_an_object_from_outside_its_class():
    found = {(file, target) for file, tree in trees().items() for target in assigned(tree)}
    assert not compared(found, set(OTHERS))


def test_every_name_of_a_record_is_in_use():
    nodes = (
        node
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
    )
    stored = {
        ast.unparse(node.value).rpartition(".")[2]
        for node in nodes
        if isinstance(node.ctx, (ast.Store, ast.Del))
    }
    assert stored >= RECORDS


def test_no_two_public_classes_have_one_name():
    classes = [
        node for tree in trees().values() for node in tree.body if isinstance(node, ast.ClassDef)
    ]
    names = [node.name for node in classes if not node.name.startswith("_")]
    assert not {name for name in names if names.count(name) > 1}


@pytest.mark.parametrize(
    ("code", "names", "targets"),
    [
        ("getattr(engine, 'bind', None)", ["bind"], []),
        ("if hasattr(x, 'a'): setattr(x, 'b', 1)", ["a", "b"], []),
        ("getattr(x, name); getattr(x, '__name__')", [], []),
        ("trainer.pixels = 1", [], ["trainer.pixels"]),
        ("self.parts.trainer.last, self.x = 1, 2", [], ["self.parts.trainer.last"]),
        ("for a.b in c: del d.e", [], ["a.b", "d.e"]),
        ("turn.reward = 1; self.trajectory.turns[-1].retries += 1", [], []),
    ],
)
def test_what_the_two_tests_above_would_find(code, names, targets):
    tree = ast.parse(code)
    assert sorted(literal_names(tree)) == names
    assert sorted(assigned(tree)) == targets

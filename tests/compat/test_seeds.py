"""Every code block of the four documents, and the test that runs it; what no other test
runs of them is run here."""

import ast
import http.server
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from kit.histories import TEMPLATES
from kit.rollouts import bpe
from transformers import PreTrainedTokenizerFast

from turnwright.config import load
from turnwright.renderers import CHATML, ChatTemplate
from turnwright.renderers.template import template_source
from turnwright.types import Message

HERE = Path(__file__).parent
SEEDS = Path(os.environ.get("TURNWRIGHT_SEEDS") or HERE.parents[1].parent / "shared/seeds")
CONVERT = "../convert/test_convert_recipes.py"

PREAMBLE = """
<|im start]>system
You are a helpful assistant that can use tools to get information for
the user.
# Tools
You may call one or more functions to assist with the user query.You are provided with function signatures within <tools></tools> XMLtags:
<tools>
...
"""  # noqa: E501
FIXED_BASE_TEXT = r"""
<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n
<|im_start|>user\nI am a user.<|im_end|>\n
"""
DOWNLOAD = """
pip install huggingface_hub
hf download Qwen/QwQ-32B --revision refs/pr/81
"""
QWQ = """
<|im_start|>system
You are a helpful assistant.<|im_end|>
<|im_start|>user
What is 2 + 2?<|im_end|>
<|im_start|>assistant
 2 + 2 = 4.<|im_end|>
<|im_start|>user
Explain why.<|im_end|>
<|im_start|>assistant
<tool_call>
{"name": "", "arguments": {"query": "Why is 2 + 2 = 4?"}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
The sum of two and two is four because it is a basic arithmetic operation.
</tool_response><|im_end|>
<|im_start|>assistant
<think>The tool provided a good explanation.</think> The sum of two and two is four because it is a basic arithmetic operation.<|im_end|>
"""  # noqa: E501
QWEN3 = """
<|im_start|>system
You are a helpful assistant.<|im_end|>
<|im_start|>user
What is 2 + 2?<|im_end|>
<|im_start|>assistant
 2 + 2 = 4.<|im_end|>
<|im_start|>user
Explain why.<|im_end|>
<|im_start|>assistant
<think>
user wants to know the reasoning behind the answer. Search for a good explanation
</think>

<tool_call>
{"name": "", "arguments": {"query": "Why is 2 + 2 = 4?"}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
The sum of two and two is four because it is a basic arithmetic operation.
</tool_response><|im_end|>
<|im_start|>assistant
<think>
The tool provided a good explanation.
</think>

The sum of two and two is four because it is a basic arithmetic operation.<|im_end|>
"""

BLOCKS = {
    "slime-vlm-multi-turn.md": [
        (
            "# Pseudocode: custom",
            "return sample",
            "test_slime.py::test_the_printed_generate_function",
        ),
        (
            "<|im start]>system",
            "...",
            "test_seeds.py::test_slimes_preamble_is_what_a_template_writes_before_tools",
        ),
        (
            "dummy = apply_chat_template",
            "obs_ids =",
            "test_seeds_slime.py::test_the_printed_delta_is_the_observation_that_we_append",
        ),
    ],
    "skyrl-gym-generator.rst": [
        (
            "<|im_start|>system",
            "Observation2<|im_end|>",
            "test_seeds_skyrl_verl.py::test_skyrl_both_layouts_of_a_conversation",
        ),
        (
            "<|im_start|>system",
            "<observation>Observation2",
            "test_seeds_skyrl_verl.py::test_skyrl_both_layouts_of_a_conversation",
        ),
        (
            "chat_template:",
            "name_or_path:",
            f"{CONVERT}::test_the_configuration_of_skyrls_document",
        ),
        (
            "self.base_conversation = [",
            ")",
            "test_seeds_skyrl_verl.py::test_skyrl_observations_are_the_ids_that_we_append",
        ),
        (
            "observation_ids =",
            "loss_mask +=",
            "test_seeds_skyrl_verl.py::test_skyrl_observations_are_the_ids_that_we_append",
        ),
        (
            "<|im_start|>system\\n",
            "<|im_start|>user\\n",
            "test_seeds.py::test_skyrls_fixed_base_is_the_text_of_the_document",
        ),
        (
            "if self.tokenizer.eos_token_id",
            "self.base_conversation_token_ids = self.base_conversation_token_ids[:",
            "test_seeds_skyrl_verl.py::test_skyrl_observations_are_the_ids_that_we_append",
        ),
    ],
    "verl-multi-turn.md": [
        (
            "actor_rollout_ref:",
            'name: "sglang"',
            f"{CONVERT}::test_the_configurations_of_verls_document",
        ),
        (
            "tools:",
            "tool_schema:",
            "test_seeds_skyrl_verl.py::test_verl_the_skeleton_of_a_configuration_and_a_filled_one",
        ),
        (
            "actor_rollout_ref:",
            "tools_config_file:",
            f"{CONVERT}::test_the_configurations_of_verls_document",
        ),
        (
            "async def create(",
            "return ToolResponse(",
            "test_seeds_skyrl_verl.py::test_verl_images_and_videos_with_late_imports",
        ),
        (
            "actor_rollout_ref:",
            "default_agent_loop:",
            f"{CONVERT}::test_the_configurations_of_verls_document",
        ),
        (
            "from verl.tools.function_tool",
            "return str(eval(",
            "test_seeds_skyrl_verl.py::test_verl_function_tools",
        ),
        (
            "# When using tokenizer",
            "loss_mask +=",
            "test_seeds_skyrl_verl.py::test_verl_deltas_of_replies_are_the_ids_that_we_sample",
        ),
        (
            "# When using processor",
            "loss_mask +=",
            "test_seeds_skyrl_verl.py::test_verl_deltas_with_a_processor_are_the_ids_that_we_sample",
        ),
        (
            "actor_rollout_ref:",
            "tokenization_sanity_check_mode:",
            f"{CONVERT}::test_the_configurations_of_verls_document",
        ),
        (
            "messages = [",
            "]",
            "test_seeds_skyrl_verl.py::test_verl_deltas_of_replies_are_the_ids_that_we_sample",
        ),
        (
            "<|im_start|>system",
            "<think>The tool",
            "test_seeds.py::test_verls_conversation_as_its_two_models_render_it",
        ),
        (
            "<|im_start|>system",
            "The sum of two and two is four because it is a basic arithmetic operation.<|im_end|>",
            "test_seeds.py::test_verls_conversation_as_its_two_models_render_it",
        ),
        (
            "BASE_CHAT_HISTORY = [",
            "loss_mask +=",
            "test_seeds_skyrl_verl.py::test_verl_deltas_of_replies_are_the_ids_that_we_sample",
        ),
        (
            "pip install",
            "hf download",
            "test_seeds.py::test_verls_commands_fetch_the_revision_that_a_recipe_names",
        ),
        (
            "actor_rollout_ref.rollout",
            "actor_rollout_ref.rollout",
            f"{CONVERT}::test_the_override_of_verls_document_has_spaces",
        ),
    ],
    "ms-swift-multi-turn.md": [
        (
            "--multi_turn_scheduler xxx",
            "--max_turns xxx",
            f"{CONVERT}::test_the_command_of_swifts_document",
        ),
        (
            "class MultiTurnScheduler(ABC):",
            "return False",
            "test_seeds_swift.py::test_the_printed_base_class_with_a_step",
        ),
        (
            "class Scheduler():",
            "infos = kwargs.get",
            "test_seeds_swift.py::test_the_printed_skeletons",
        ),
        (
            "RolloutInferRequest(",
            ")",
            "test_seeds_swift.py::test_the_printed_request_and_result_are_what_step_receives",
        ),
        (
            "RolloutResponseChoice(",
            "messages=None)",
            "test_seeds_swift.py::test_the_printed_request_and_result_are_what_step_receives",
        ),
        ("swift rollout", "--max_turns xxx", f"{CONVERT}::test_the_command_of_swifts_document"),
        (
            "class Reward(ORM):",
            "...",
            "test_seeds_swift.py::test_the_printed_reward_reads_its_columns",
        ),
    ],
}
"""First and last line of each block, in order, and its test."""
READ_FROM_THE_DOCUMENT = ("RolloutInferRequest(", "RolloutResponseChoice(")
"""Blocks whose test takes them from the document itself."""
CODE = re.compile(
    r"^\s*(async def |def |class |from \S+ import|import |@\w+|return \S+$|return .*[\](),]|self\.|\w+ \+?= |<\|im|</?tool_"  # noqa: E501
    r"|</?think|--\w|\w+\($|[)\]}]$|pip install|hf download|swift rollout|if .*:$|for .*:$|elif |else:|\w+: *(\S+)?$"  # noqa: E501
    r"|- class_name: |\w+(\.\w+)+ = |loss_mask|\{\")"
)
PROSE = re.compile(
    r"^(Path|Note|References|Overview|Last updated|Multi-round training script references|In pseudocode).*:?$|^It's a"  # noqa: E501
)


def blocks(name):
    """Yield (lines, test) of each block, and the number of its first line."""
    lines = (SEEDS / name).read_text(encoding="utf-8").splitlines()
    at = 0
    for first, last, test in BLOCKS[name]:
        start = next(
            number for number in range(at, len(lines)) if lines[number].strip().startswith(first)
        )
        end = next(
            number for number in range(start, len(lines)) if lines[number].strip().startswith(last)
        )
        yield start, lines[start : end + 1], test
        at = end + 1


def bare(lines):
    return "\n".join(line.strip() for line in lines if line.strip())


def test_each_block_names_a_test_that_exists():
    for name, rows in BLOCKS.items():
        for first, _, test in rows:
            file, _, function = test.partition("::")
            tree = ast.parse((HERE / file).read_text())
            assert function in {
                one.name for one in tree.body if isinstance(one, ast.FunctionDef)
            }, (name, first)


@pytest.mark.skipif(not SEEDS.is_dir(), reason="the documents are not beside the checkout")
@pytest.mark.parametrize("name", BLOCKS)
def test_the_file_of_each_test_holds_the_block(name):
    for _, lines, test in blocks(name):
        path = HERE / test.partition("::")[0]
        held = [
            one.value
            for one in ast.walk(ast.parse(path.read_text()))
            if isinstance(one, ast.Constant)
        ]
        held = [one for one in held if isinstance(one, str)] + [
            (HERE / "users/slime/seed_generate.txt").read_text()
        ]
        if not lines[0].startswith(READ_FROM_THE_DOCUMENT):
            assert any(bare(lines) in bare(one.splitlines()) for one in held), (lines[0], lines[-1])


@pytest.mark.skipif(not SEEDS.is_dir(), reason="the documents are not beside the checkout")
@pytest.mark.parametrize("name", BLOCKS)
def test_no_block_is_forgotten(name):
    """Fenced and directive blocks are counted; elsewhere no line outside of the
    blocks reads as code."""
    found = list(blocks(name))
    inside = {number for start, lines, _ in found for number in range(start, start + len(lines))}
    text = (SEEDS / name).read_text(encoding="utf-8").splitlines()
    if fences := [number for number, line in enumerate(text) if line.startswith("```")]:
        assert [start for start, _, _ in found] == [start + 1 for start in fences[::2]]
        return
    if directives := [number for number, line in enumerate(text) if ".. code-block::" in line]:
        assert len(found) == len(directives)
        assert all(
            sum(at < start for start, _, _ in found) == len(found) - n
            for n, at in enumerate(directives)
        )
        return
    left = [
        line
        for number, line in enumerate(text)
        if number not in inside and CODE.match(line) and not PROSE.match(line)
    ]
    assert left == []


def words(text):
    """A text without white space, which documents lose and add."""
    return "".join(text.split())


def test_slimes_preamble_is_what_a_template_writes_before_tools():
    """Up to white space and a mistyped bracket; it stands at the beginning once, however
    many observations follow."""
    block = PREAMBLE.replace("<|im start]>", "<|im_start|>").rpartition("...")[0]
    tool = {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
    }
    system = "You are a helpful assistant that can use tools to get information for the user."
    messages = [Message("system", system), Message("user", "Look.")]
    text = ChatTemplate(template_source("qwen3_with_thinking")).try_render(messages, tools=[tool])
    assert words(text).startswith(words(block))


def test_skyrls_fixed_base_is_the_text_of_the_document():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe(), eos_token="<|im_end|>")
    tokenizer.chat_template = CHATML
    base = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "I am a user."},
    ]
    ids = tokenizer.apply_chat_template(
        base, tokenize=True, add_generation_prompt=False, return_dict=False
    )
    assert tokenizer.decode(ids) == FIXED_BASE_TEXT.replace("\n", "").replace("\\n", "\n")


def printed_messages():
    """Return the conversation that verl's document prints, whose call has no name."""
    from test_seeds_skyrl_verl import MESSAGES

    names = {}
    exec(MESSAGES, names)
    for message in names["messages"]:
        for one in message.get("tool_calls", ()):
            one["function"] = {"name": "", "arguments": one.pop("arguments")}
    return names["messages"]


def test_verls_conversation_as_its_two_models_render_it():
    """QwQ keeps the last reply's thinking, Qwen3 that of the replies since the last question;
    equal up to white space."""
    messages = printed_messages()
    text = ChatTemplate(template_source("qwen3_without_thinking")).try_render(
        [Message.of(one) for one in messages]
    )
    assert words(text) == words(QWQ)
    for one in messages:
        if one["role"] == "assistant":
            thinking, _, one["content"] = (
                one["content"].removeprefix("<think>").partition("</think>")
            )
            one["reasoning_content"] = thinking
    text = ChatTemplate(TEMPLATES["strips_on_user"]).try_render(
        [Message.of(one) for one in messages]
    )
    assert words(text) == words(QWEN3)


COMMIT = "a" * 40


class Hub(http.server.BaseHTTPRequestHandler):
    """A hub with one file in one revision."""

    def do_GET(self):
        found = {
            "/api/models/Qwen/QwQ-32B/revision/refs%2Fpr%2F81": {
                "id": "Qwen/QwQ-32B",
                "sha": COMMIT,
                "siblings": [],
            }
        }
        found[f"/api/models/Qwen/QwQ-32B/tree/{COMMIT}"] = [
            {"type": "file", "path": "config.json", "size": 2, "oid": "b" * 40}
        ]
        found[f"/Qwen/QwQ-32B/resolve/{COMMIT}/config.json"] = {}
        path = self.path.partition("?")[0]
        found["/api/models/Qwen/QwQ-32B/revision/refs%2Fpr%2F81"]["siblings"] = [
            {"rfilename": "config.json"}
        ]
        body = json.dumps(found.get(path, {})).encode()
        self.send_response(200 if path in found else 404)
        for name, value in {
            "Content-Length": len(body),
            "ETag": f'"{"b" * 40}"',
            "X-Repo-Commit": COMMIT,
        }.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *args):
        pass


def test_verls_commands_fetch_the_revision_that_a_recipe_names(tmp_path):
    """`hf` of this environment against a hub of our own; `pip install` of what is
    installed changes nothing."""
    hf = Path(sys.executable).with_name("hf")
    if not hf.is_file():
        pytest.skip("the environment has no hf command")
    install, download = (shlex.split(line) for line in DOWNLOAD.strip().splitlines())
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    env = {
        **os.environ,
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(tmp_path),
        "NO_PROXY": "*",
        "no_proxy": "*",
        "PIP_NO_INDEX": "1",
    }
    env.pop("HF_HUB_OFFLINE", None)
    try:
        if importlib.util.find_spec("pip"):
            subprocess.run(
                [sys.executable, "-m", *install],
                env=env,
                check=True,
                capture_output=True,
                timeout=120,
            )
        subprocess.run(
            [str(hf), *download[1:]], env=env, check=True, capture_output=True, timeout=120
        )
    finally:
        server.shutdown()
        server.server_close()
    repository = tmp_path / "hub/models--Qwen--QwQ-32B"
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'[model]\npath = "{repository}"\nrevision = "{download[-1]}"\n[[env]]\nuse = "hop"\n'
    )
    assert load(recipe).config.model.directory == repository / "snapshots" / COMMIT

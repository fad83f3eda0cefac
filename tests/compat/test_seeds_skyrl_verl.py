"""The code blocks of the documents of SkyRL's generator and of verl's multi-turn rollouts, as
they are written there."""

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from kit.rollouts import bpe, renderer
from kit.stand_ins import USERS
from kit.vision import tiny_vlm_directory
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer

import turnwright as tw
from turnwright.config.schema import EnvConfig
from turnwright.envs.resolve import as_env_spec, resolve_env
from turnwright.errors import ConfigError
from turnwright.renderers import CHATML, ChatTemplate
from turnwright.renderers.template import template_source
from turnwright.types import Message
from turnwright_compat.verl.adapter import FRAMEWORK

LIMITS = tw.Limits(turns=6, turn_tokens=2000)


@pytest.fixture(scope="module")
def tokenizer():
    """Our tokenizer as one of transformers, whose releases of then returned ids."""
    from transformers import PreTrainedTokenizerFast

    class Of2025(PreTrainedTokenizerFast):
        def apply_chat_template(self, *args, **kwargs):
            return super().apply_chat_template(*args, **{"return_dict": False, **kwargs})

    made = Of2025(tokenizer_object=bpe(), eos_token="<|im_end|>", pad_token="<|im_end|>")
    made.chat_template = CHATML
    return made


# SkyRL: SkyRLGymGenerator

CONVERSATION = """\
<|im_start|>system
System prompt here<|im_end|>
<|im_start|>user
Question here<|im_end|>
<|im_start|>assistant
Response1<|im_end|>
<|im_start|>user
Observation1<|im_end|>
<|im_start|>assistant
Response2<|im_end|>
<|im_start|>user
Observation2<|im_end|>
"""

ONE_MESSAGE = """\
<|im_start|>system
System prompt here<|im_end|>
<|im_start|>user
Question here<|im_end|>
<|im_start|>assistant
Response1
<observation>Observation1</observation>
Response2
<observation>Observation2</observation>
"""

TALKS = """
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

class Talks(BaseTextEnv):
    def __init__(self, env_config=None, extras={}):
        super().__init__()
        self.form = extras["form"]

    def step(self, action):
        self.turns += 1
        text = self.form.format(self.turns)
        return BaseTextEnvStepOutput(
            observations=[{"role": "user", "content": text}], reward=0.0, done=self.turns == 3, metadata={}
        )
"""  # noqa: E501


@pytest.mark.parametrize(
    ("history", "form", "text"),
    [
        ("append", "Observation{}", CONVERSATION),
        ("inline", "\n<observation>Observation{}</observation>\n", ONE_MESSAGE),
    ],
)
def test_skyrl_both_layouts_of_a_conversation(tmp_path, history, form, text):
    (tmp_path / "talks.py").write_text(TALKS)
    made = resolve_env(EnvConfig(use="talks.py:Talks"), base=tmp_path)
    messages = [
        {"role": "system", "content": "System prompt here"},
        {"role": "user", "content": "Question here"},
    ]
    (found,) = tw.rollout(
        made.factory,
        [tw.Task(messages, info={"form": form})],
        tw.ScriptedEngine(["Response1", "Response2", "Response3"]),
        renderer=renderer("bpe"),
        limits=LIMITS,
        history=history,
        stop=["Response1", "Response2"] if history == "inline" else (),
    )
    assert found.error is None, found.error
    context = renderer("bpe").decode(found.prompt_ids(2))
    assert context == text + ("<|im_start|>assistant\n" if history == "append" else "")


def test_skyrl_chat_template_by_name():
    block = """
    chat_template:
      source: "name"
      name_or_path: "qwen3_without_thinking"
    """
    name = yaml.safe_load(block)["chat_template"]["name_or_path"]
    messages = [
        ("user", "One?"),
        ("assistant", "<think>\na\n</think>\n\n1"),
        ("user", "Two?"),
        ("assistant", "<think>\nb\n</think>\n\n2"),
    ]
    text = ChatTemplate(template_source(name)).try_render([Message(*one) for one in messages])
    assert text is not None
    assert ("a\n</think>" in text, "b\n</think>" in text) == (False, True)


BASE = """
self.base_conversation = [
  {"role": "system", "content": "You are a helpful assistant."},
  {"role": "user", "content": "I am a user."},
]
self.base_conversation_token_ids = tokenizer.apply_chat_template(
  self.base_conversation,
  add_generation_prompt=False,
  tokenize=True,
)
"""

CUT = """
if self.tokenizer.eos_token_id in self.base_conversation_token_ids:
    last_eos_token_index = (
        len(self.base_conversation_token_ids)
        - 1
        - self.base_conversation_token_ids[::-1].index(self.tokenizer.eos_token_id)
    )
    self.base_conversation_token_ids = self.base_conversation_token_ids[: last_eos_token_index + 1]
"""

OBSERVE = """
observation_ids = self.tokenizer.apply_chat_template(
    [*self.base_conversation, *new_obs],
    add_generation_prompt=True,
    tokenize=True,
)[len(self.base_conversation_token_ids) :]
input_ids += observation_ids
loss_mask += [0] * len(observation_ids)
"""


def test_skyrl_observations_are_the_ids_that_we_append(tokenizer):
    """The three blocks, in the order in which they run, give the ids
    between two replies of ours."""

    class Two(tw.Env):
        def reset(self, task, *, seed=None):
            return "Question here"

        def step(self, action):
            return tw.Step(
                [{"role": "user", "content": "Observation here"}],
                terminated=action.text == "Response2",
            )

    engine = tw.ScriptedEngine(["Response1", "Response2"])
    (found,) = tw.rollout(Two, [tw.Task()], engine, renderer=renderer("bpe"), limits=LIMITS)
    reply_end = found.spans[found.turns[0].spans[-1]].end
    names = {
        "self": SimpleNamespace(tokenizer=tokenizer),
        "tokenizer": tokenizer,
        "new_obs": [{"role": "user", "content": "Observation here"}],
        "input_ids": found.prompt_ids(1)[:reply_end],
        "loss_mask": [],
    }
    for block in (BASE, CUT, OBSERVE):
        exec(block, names)
    assert renderer("bpe").decode(names["observation_ids"]) == (
        "\n<|im_start|>user\nObservation here<|im_end|>\n<|im_start|>assistant\n"
    )
    assert names["input_ids"] == found.prompt_ids(1)
    assert names["loss_mask"] == [0] * len(names["observation_ids"])


# verl: multi-turn rollouts

TOOLS = """
tools:
  - class_name: ""
    config:
        type: native
    tool_schema:
"""

FUNCTIONS = '''
from verl.tools.function_tool import function_tool

@function_tool
def get_weather(city: str) -> dict:
    """Get the current weather for a city.

    Args:
        city: The city to look up, e.g. "Tokyo" or "San Francisco".
    """
    return {"temperature_c": 17.3, "condition": "drizzle"}

@function_tool("calculator")  # explicit name overrides the function name
def calculator(expression: str) -> str:
    """Evaluate a Python-style arithmetic expression.

    Args:
        expression: A Python-style arithmetic expression, e.g. "(3+4)*5".
    """
    return str(eval(expression, {"__builtins__": {}}, {}))
'''

MEDIA = """
async def create(self, ...) -> tuple[str, ToolResponse]:
    ...
    from verl.utils.dataset.vision_utils import process_image, process_video

    img1 = process_image(img1)
    video1 = process_video(video1)

    # due to the (image | video) key is ("image" | "video") instead of ("images" | "videos") in vllm, we need to use ("image" | "video") to specify list of images/videos
    # link: https://github.com/vllm-project/vllm/blob/3c545c0c3b98ee642373a308197d750d0e449403/vllm/multimodal/parse.py#L205
    return instance_id, ToolResponse(image=[img1, ...], video=[video1, ...], text="...")

async def execute(self, ...) -> Tuple[str | Dict[str, Any], float, dict]:
    ...
    from verl.utils.dataset.vision_utils import process_image, process_video

    img1 = process_image(img1)
    video1 = process_video(video1)

    # due to the (image | video) key is ("image" | "video") instead of ("images" | "videos") in vllm, we need to use ("image" | "video") to specify list of images/videos
    # link: https://github.com/vllm-project/vllm/blob/3c545c0c3b98ee642373a308197d750d0e449403/vllm/multimodal/parse.py#L205
    return ToolResponse(image=[img1, ...], video=[video1, ...], text="..."), 0, {}
"""  # noqa: E501

MESSAGES = """
messages = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "<think>user asked about a simple math question.</think> 2 + 2 = 4."},
    {"role": "user", "content": "Explain why."},
    {"role": "assistant", "content": "<think>user wants to know the reasoning behind the answer. Search for a good explanation</think>",
     "tool_calls": [{"id": "tool1", "type": "search", "arguments": {"query": "Why is 2 + 2 = 4?"}}]},
    {"role": "tool", "content": "The sum of two and two is four because it is a basic arithmetic operation."},
    {"role": "assistant", "content": "<think>The tool provided a good explanation.</think>The sum of two and two is four because it is a basic arithmetic operation."}
]
"""  # noqa: E501

DELTA = """
# When using tokenizer
# Exclude the assistant prompt (e.g., "<|im_start|>assistant") from the loss by setting add_generation_prompt=True
prev = tokenizer.apply_chat_template(messages[:i], add_generation_prompt=True, tokenize=False)
curr = tokenizer.apply_chat_template(messages[:i+1], add_generation_prompt=False, tokenize=False)
token_ids += tokenizer.encode(curr[len(prev):], add_special_tokens=False)
loss_mask += [1] * len(token_ids)  # Mask only the new assistant tokens
"""  # noqa: E501

PROCESSOR = """
# When using processor
# Exclude the assistant prompt (e.g., "<|im_start|>assistant") from the loss by setting add_generation_prompt=True
prev = processor.apply_chat_template(messages[:i], add_generation_prompt=True, tokenize=False)
prev_model_inputs = processor(text=prev, images=images, videos=videos, return_tensors="pt")[0].tolist()
curr = processor.apply_chat_template(messages[:i+1], add_generation_prompt=False, tokenize=False)
curr_model_inputs = processor(text=curr, images=images, videos=videos, return_tensors="pt")[0].tolist()
token_ids += curr_model_inputs["input_ids"][len(prev_model_inputs["input_ids"]):]
loss_mask += [1] * len(token_ids)  # Mask only the new assistant tokens
"""  # noqa: E501

FIXED_BASE = """
BASE_CHAT_HISTORY = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "I am a user."}
]
prev = tokenizer.apply_chat_template(BASE_CHAT_HISTORY, add_generation_prompt=True, tokenize=False)
curr = tokenizer.apply_chat_template([*BASE_CHAT_HISTORY, messages[i]], add_generation_prompt=False, tokenize=False)
token_ids += tokenizer.encode(curr[len(prev):], add_special_tokens=False)
loss_mask += [1] * len(token_ids)
"""  # noqa: E501


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def verl_env(base, **args):
    return as_env_spec(FRAMEWORK.find("tools"), where="verl:tools", args=args, base=base)


def test_verl_the_skeleton_of_a_configuration_and_a_filled_one(tmp_path):
    (tmp_path / "tools.yaml").write_text(TOOLS)
    with pytest.raises(ConfigError, match=r"tools\[0\]: class_name is ''; write module\.Class"):
        verl_env(tmp_path, tool_config_path="tools.yaml")
    schema = (
        "{type: function, function: {name: check, description: Check., parameters: "
        "{type: object, properties: {}}}}"
    )
    filled = TOOLS.replace('""', "flat_tool.FlatTool").replace(
        "tool_schema:", f"tool_schema: {schema}"
    )
    (tmp_path / "tools.yaml").write_text(filled)
    (tmp_path / "flat_tool.py").write_text((USERS / "verl/flat_tool.py").read_text())
    made = verl_env(tmp_path, tool_config_path="tools.yaml")
    assert [source.name for source in made.factory.kit.sources] == ["check"]


def test_verl_function_tools(tmp_path):
    (tmp_path / "your_tools.py").write_text(FUNCTIONS)
    made = verl_env(tmp_path, function_tool_path="your_tools.py")
    replies = [call("get_weather", city="Tokyo") + call("calculator", expression="(3+4)*5"), "35"]
    (found,) = tw.rollout(made.factory, [tw.Task("Go.")], tw.ScriptedEngine(replies), limits=LIMITS)
    texts = [message.text for message in found.messages if message.role == "tool"]
    assert texts == ['{"temperature_c": 17.3, "condition": "drizzle"}', "35"]


@pytest.mark.parametrize("lifetime", ["trajectory", "call"])
def test_verl_images_and_videos_with_late_imports(tmp_path, lifetime):
    """The document leaves out arguments and where the pictures come from: these places, written
    `...`, are filled in."""
    start = "    from PIL import Image\n    pixels = Image.new('RGB', (32, 32), (9, 0, 0))\n"
    start += (
        "    img1, video1, instance_id = pixels, {'video': [pixels, pixels], 'fps': 2.0}, 'one'\n"
    )
    block = MEDIA.replace("(self, ...)", "(self, *args, **kwargs)").replace(", ...]", "]")
    block = re.sub(r"^    \.\.\.\n", lambda _: start, block, flags=re.MULTILINE)
    body = "".join(f"    {line}\n" for line in block.splitlines())
    head = "from typing import Any, Dict, Tuple\nfrom verl.tools.base_tool import BaseTool\n"
    head += "from verl.tools.schemas import ToolResponse\n\nclass Look(BaseTool):\n"
    (tmp_path / "look.py").write_text(head + body)
    schema = (
        "{type: function, function: {name: look, description: Look., parameters: {type: "
        "object, properties: {}}}}"
    )
    (tmp_path / "tools.yaml").write_text(
        TOOLS.replace('""', "look.Look").replace("tool_schema:", f"tool_schema: {schema}")
    )
    made = verl_env(tmp_path, tool_config_path="tools.yaml", lifetime=lifetime)
    sees = tw.load_renderer(tiny_vlm_directory(tmp_path / "vlm", "qwen3_vl", weights=False))
    engine = tw.ScriptedEngine([call("look"), "red"])
    (found,) = tw.rollout(made.factory, [tw.Task("Go.")], engine, renderer=sees, limits=LIMITS)
    assert found.error is None, found.error
    (sample,) = found.samples()
    assert len(sample.media) == 4


def test_verl_deltas_of_replies_are_the_ids_that_we_sample(tokenizer):
    """Both ways of the document: by the messages before, and by a fixed base; ours has the end
    token, and what follows it."""
    names: dict = {}
    exec(MESSAGES, names)
    made = [message for message in names["messages"] if "tool_calls" not in message]
    for block in (DELTA, FIXED_BASE):
        for i, message in enumerate(made):
            if message["role"] != "assistant":
                continue
            space = {
                "tokenizer": tokenizer,
                "messages": made,
                "i": i,
                "token_ids": [],
                "loss_mask": [],
            }
            exec(block, space)
            ours = [*renderer("bpe").encode_reply(message["content"])]
            newline = tokenizer.encode("\n", add_special_tokens=False)
            assert space["token_ids"] == [*ours, *newline]
            assert space["loss_mask"] == [1] * len(space["token_ids"])


class Processor:
    """The tokenizer and the image processor of a model; its calls return what the document reads:
    rows that become dicts."""

    def __init__(self, path):
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.images = AutoImageProcessor.from_pretrained(path, backend="pil")

    def apply_chat_template(self, messages, **kwargs):
        return self.tokenizer.apply_chat_template(messages, **kwargs)

    def __call__(self, text, images, videos, return_tensors):
        assert (videos, return_tensors) == (None, "pt")
        sizes = (
            self.images(images=images, return_tensors="pt")["image_grid_thw"].prod(-1)
            // self.images.merge_size**2
        )
        pads = iter(sizes.tolist())
        text = re.sub(r"<\|image_pad\|>", lambda pad: pad.group() * next(pads), text)
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return [SimpleNamespace(tolist=lambda: {"input_ids": ids})]


def test_verl_deltas_with_a_processor_are_the_ids_that_we_sample(tmp_path):
    """The ids of the model's own processor before a reply are our context, and its delta is the
    reply that we sample."""
    path = tiny_vlm_directory(tmp_path / "vlm", "qwen3_vl", weights=False)
    sees, picture = tw.load_renderer(path), Image.new("RGB", (96, 64), (9, 0, 0))
    content = [{"type": "image", "image": picture}, {"type": "text", "text": "Which color?"}]

    class Look(tw.Env):
        def reset(self, task, *, seed=None):
            return [{"role": "user", "content": content}]

        def step(self, action):
            return tw.Step("Again?", terminated=action.text == "red")

    (found,) = tw.rollout(
        Look, [tw.Task()], tw.ScriptedEngine(["blue", "red"]), renderer=sees, limits=LIMITS
    )
    assert found.error is None, found.error
    said = [("assistant", "blue"), ("user", "Again?"), ("assistant", "red")]
    messages = [
        {"role": "user", "content": content},
        *({"role": role, "content": text} for role, text in said),
    ]
    for turn, i in enumerate((1, 3)):
        space = {
            "processor": Processor(path),
            "messages": messages,
            "i": i,
            "images": [picture],
            "videos": None,
        }
        space |= {"token_ids": [], "loss_mask": []}
        exec(PROCESSOR, space)
        assert space["prev_model_inputs"]["input_ids"] == found.prompt_ids(turn)
        newline = space["processor"].tokenizer.encode("\n", add_special_tokens=False)
        assert space["token_ids"] == [*sees.encode_reply(messages[i]["content"]), *newline]
        assert space["loss_mask"] == [1] * len(space["token_ids"])


SEEDS = Path(
    os.environ.get("TURNWRIGHT_SEEDS") or Path(__file__).parents[2].parent / "shared/seeds"
)
BLOCKS = {
    "skyrl-gym-generator.rst": (CONVERSATION, ONE_MESSAGE, BASE, CUT, OBSERVE),
    "verl-multi-turn.md": (TOOLS, FUNCTIONS, MEDIA, MESSAGES, DELTA, PROCESSOR, FIXED_BASE),
}


def bare(text):
    """Return the lines of a text without indentation and empty ones."""
    return "".join(f"{line.strip()}\n" for line in text.splitlines() if line.strip())


@pytest.mark.skipif(not SEEDS.is_dir(), reason="the documents are not beside the checkout")
@pytest.mark.parametrize("name", BLOCKS)
def test_the_blocks_are_those_of_the_documents(name):
    text = bare((SEEDS / name).read_text(encoding="utf-8"))
    assert [block for block in BLOCKS[name] if bare(block) not in text] == []


def test_verl_templates_that_strip_reasoning():
    """Reasoning before the last question is not rendered, that after it is, as the
    document shows for Qwen3."""
    names: dict = {}
    exec(MESSAGES, names)
    messages = []
    for message in names["messages"]:
        for one in message.get("tool_calls", ()):
            one["function"] = {"name": "search", "arguments": one.pop("arguments")}
        messages.append(Message.of(message))
    assert messages[4].tool_calls[0].arguments == {"query": "Why is 2 + 2 = 4?"}
    text = ChatTemplate(template_source("qwen3_without_thinking")).try_render(messages)
    assert text is not None
    assert "user asked about a simple math question" not in text
    assert "2 + 2 = 4." in text
    assert "The tool provided a good explanation." in text

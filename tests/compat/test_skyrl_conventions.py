"""User code of SkyRL by its conventions: the list that `init` returned goes on, images of rows,
constructors that pass on."""

import base64
import io
import json
import textwrap

import pytest
from kit.vision import tiny_vlm_directory

import turnwright as tw
from turnwright.config.schema import EnvConfig
from turnwright.envs.resolve import resolve_env
from turnwright.errors import ConfigError

HEAD = """
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput


def out(*texts, done=False, reward=0.0, **more):
    observations = [{"role": "user", "content": text} for text in texts]
    return BaseTextEnvStepOutput(observations=observations, reward=reward, done=done, metadata={}, **more)
"""  # noqa: E501


def played(folder, source, use, replies, row=None, *, args=None, renderer=None, **options):
    (folder / "user.py").write_text(HEAD + textwrap.dedent(source))
    (folder / "rows.jsonl").write_text(json.dumps(row or {"prompt": "Go."}))
    spec = resolve_env(
        EnvConfig(use=f"user.py:{use}", args=args or {}, tasks="rows.jsonl"), base=folder
    )
    renderer = renderer or tw.byte_renderer()
    (found,) = tw.rollout(
        spec.agent_function or spec.factory,
        spec.tasks("train"),
        tw.ScriptedEngine(list(replies)),
        renderer=renderer,
        limits=tw.Limits(turns=8, turn_tokens=200),
        **options,
    )
    assert found.error is None, found.error
    return found


def contexts(found, renderer=None):
    """Return the texts of the messages before each reply."""
    return [
        [message.text for message in found.conversation(number)[:-1]]
        for number in range(len(found.turns))
    ]


HISTORY = """
class Env(BaseTextEnv):
    def __init__(self, env_config=None, extras={}):
        super().__init__()

    def init(self, prompt):
        self.history = [*prompt, {"role": "user", "content": "hint 0"}]
        return self.history, {}

    def step(self, action):
        self.turns += 1
        self.change()
        return out(f"hint {self.turns}", done=self.turns == 3, reward=1.0)
"""
CHANGES = {
    "nothing": (
        "pass",
        [
            ["Go.", "hint 0"],
            ["Go.", "hint 0", "a", "hint 1"],
            ["Go.", "hint 0", "a", "hint 1", "b", "hint 2"],
        ],
    ),
    "the last message is taken back": (
        "self.history.pop()",
        [["Go.", "hint 0"], ["Go.", "a", "hint 1"], ["Go.", "a", "b", "hint 2"]],
    ),
    "an earlier one goes": (
        "del self.history[0]",
        [["Go.", "hint 0"], ["hint 0", "a", "hint 1"], ["a", "hint 1", "b", "hint 2"]][:2],
    ),
    "a text changes": (
        "self.history[0] = {'role': 'user', 'content': f'turn {self.turns}'}",
        [
            ["Go.", "hint 0"],
            ["turn 1", "hint 0", "a", "hint 1"],
            ["turn 2", "hint 0", "a", "hint 1", "b", "hint 2"],
        ],
    ),
    "a text changes in place": (
        "self.history[0]['content'] = f'turn {self.turns}'",
        [
            ["Go.", "hint 0"],
            ["turn 1", "hint 0", "a", "hint 1"],
            ["turn 2", "hint 0", "a", "hint 1", "b", "hint 2"],
        ],
    ),
    "one is added": (
        "self.history.insert(1, {'role': 'user', 'content': f'note {self.turns}'})",
        [
            ["Go.", "hint 0"],
            ["Go.", "note 1", "hint 0", "a", "hint 1"],
            ["Go.", "note 2", "note 1", "hint 0", "a", "hint 1", "b", "hint 2"],
        ],
    ),
    "a summary": (
        "self.history[1:] = [{'role': 'user', 'content': 'so far'}]",
        [["Go.", "hint 0"], ["Go.", "so far", "a", "hint 1"], ["Go.", "so far", "b", "hint 2"]],
    ),
    "a list of its own": (
        "self.history = list(self.history)[:1]",
        [
            ["Go.", "hint 0"],
            ["Go.", "hint 0", "a", "hint 1"],
            ["Go.", "hint 0", "a", "hint 1", "b", "hint 2"],
        ],
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_list_that_init_returned_goes_on(change, tmp_path):
    code, expected = CHANGES[change]
    source = HISTORY + f"\n    def change(self):\n        {code}\n"
    if change == "an earlier one goes":
        source = source.replace("self.turns == 3", "self.turns == 2")
    found = played(tmp_path, source, "Env", "abc")
    assert contexts(found) == expected
    assert found.reward == float(len(expected))
    assert (
        sum(sum(1 for weight in row.weights if weight) for row in found.samples())
        == found.sampled_tokens
    )
    renderer = tw.byte_renderer()
    for number in range(len(expected)):
        complete = renderer.open(found.conversation(number)[:-1], ())
        assert list(found.prompt_ids(number)) == list(complete.ids)


def test_a_replaced_reply_is_in_the_list_as_it_was_replaced(tmp_path):
    source = """
    class Env(BaseTextEnv):
        def __init__(self, env_config=None, extras={}):
            super().__init__()

        def init(self, prompt):
            self.history = list(prompt)
            return self.history, {}

        def step(self, action):
            self.turns += 1
            seen = [message["content"] for message in self.history]
            if self.turns == 1:
                assert seen == ["Go."], seen
            else:
                assert seen == ["Go.", "A", "on"], seen
            return out("on", done=self.turns == 2, reward=1.0, postprocessed_action=action.upper())
    """
    assert played(tmp_path, source, "Env", "ab").reward == 2.0


PICTURE = """
class Look(BaseTextEnv):
    def __init__(self, env_config=None, extras={}):
        super().__init__()

    def init(self, prompt):
        parts = prompt[-1]["content"]
        kinds = [part["type"] for part in parts]
        assert kinds.count("image_url") == 1, kinds
        (url,) = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
        assert url.startswith("data:"), url[:20]
        import json
        json.dumps(prompt)
        return prompt, {}

    def step(self, action):
        return out(done=True, reward=float("green" in action))
"""


def png(size):
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", size, "green").save(buffer, format="PNG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def vlm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vlm")
    tiny_vlm_directory(folder)
    return tw.load_renderer(folder)


def rows(folder):
    data = png((84, 56))
    (folder / "g.png").write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    return {
        "a data URL": {
            "prompt": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": url}},
                        {"type": "text", "text": "?"},
                    ],
                }
            ]
        },
        "a column": {"prompt": [{"role": "user", "content": "<image>?"}], "images": ["g.png"]},
    }


@pytest.mark.parametrize("kind", ["a data URL", "a column"])
def test_the_picture_of_a_row_is_in_the_context(kind, vlm, tmp_path):
    found = played(tmp_path, PICTURE, "Look", ["green"], rows(tmp_path)[kind], renderer=vlm)
    assert found.reward == 1.0
    (block,) = found.media_placements(found.turns[0].prompt)
    assert (block.media.width, block.media.height) == (84, 56)


GENERATORS = """
from skyrl.train.generators.base import GeneratorInterface


class Base(GeneratorInterface):
    def __init__(self, generator_cfg, skyrl_gym_cfg, inference_engine_client, tokenizer, bonus=0.0):
        self.client, self.tokenizer, self.bonus = inference_engine_client, tokenizer, bonus

    async def generate(self, input_batch, disable_tqdm=False):
        (prompt,) = input_batch["prompts"]
        ids = self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=False)
        out = await self.client.generate({"prompt_token_ids": [ids], "sampling_params": None})
        return {
            "prompt_token_ids": [ids], "response_ids": out["response_ids"], "rewards": [1.0 + self.bonus],
            "loss_masks": [[1] * len(out["response_ids"][0])], "stop_reasons": out["stop_reasons"], "rollout_metrics": None,
        }


class Any(Base):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


class Named(Base):
    def __init__(self, scale, **kwargs):
        super().__init__(**kwargs)
        self.bonus *= scale


class Twice(Any):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
"""  # noqa: E501


@pytest.mark.parametrize(
    ("use", "args", "reward"),
    [
        ("Base", {}, 1.0),
        ("Any", {}, 1.0),
        ("Twice", {"bonus": 0.5}, 1.5),
        ("Any", {"bonus": 0.5}, 1.5),
        ("Named", {"scale": 2, "bonus": 1.0}, 3.0),
    ],
)
def test_a_generator_gets_what_skyrl_passes(use, args, reward, tmp_path):
    assert played(tmp_path, GENERATORS, use, "a", args=args).reward == reward


def test_an_argument_that_no_constructor_takes_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"bonsu.*bonus"):
        played(tmp_path, GENERATORS, "Any", "a", args={"bonsu": 1.0})

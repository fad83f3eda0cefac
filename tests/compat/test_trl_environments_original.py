"""Environments of users under TRL's own trainer: our episodes against its tool-calling
loop. `make test-compat`."""

import importlib
import json
import os
from pathlib import Path

import pytest
from kit import originals
from kit.rollouts import bpe
from kit.stand_ins import USERS
from turnwright.envs.stand_ins.trl import rewards as stand_in

import turnwright as tw
from turnwright.config.schema import EnvConfig
from turnwright.envs.resolve import load_object, resolve_env
from turnwright.renderers import ChatRenderer, ChatTemplate, HFTokenizer

pytestmark = pytest.mark.compat
HOME = USERS / "trl"


@pytest.fixture(scope="module")
def trl():
    originals.use()
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    importlib.import_module("trl.rewards")
    return pytest.importorskip("trl")


@pytest.fixture(scope="module")
def template(trl):
    """The chat template of Qwen2.5, whose calls TRL can parse."""
    return (Path(trl.__file__).parent / "chat_templates/qwen2_5.jinja").read_text()


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def load(name):
    return load_object(name, base=HOME)


class Trainer:
    """TRL's trainer whose model says what a script holds; keeps contexts, rows and rewards."""

    def __init__(
        self,
        trl,
        template,
        folder,
        replies,
        row,
        renderer,
        *,
        factory=None,
        rewards=(),
        tools=(),
        turns=None,
    ):
        from datasets import Dataset
        from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=bpe(), eos_token="<|im_end|>", pad_token="<|endoftext|>"
        )
        tokenizer.chat_template = template
        size = {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        }
        model = AutoModelForCausalLM.from_config(
            Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=2, **size)
        )
        args = trl.GRPOConfig(
            output_dir=str(folder),
            per_device_train_batch_size=2,
            num_generations=2,
            max_completion_length=4096,
            max_tool_calling_iterations=turns,
            report_to=[],
            use_cpu=True,
            beta=0.0,
        )
        self.trainer = trl.GRPOTrainer(
            model,
            list(rewards) or None,
            args,
            train_dataset=Dataset.from_list([row]),
            processing_class=tokenizer,
            tools=list(tools) or None,
            environment_factory=factory,
        )
        self.contexts, self.replies, self.renderer = [], replies, renderer
        self.trainer._generate_single_turn = self.reply
        self._wrap("_generate")
        self._wrap("_calculate_rewards")
        self.trainer.current_gradient_accumulation_steps = 1
        self.trainer._generate_and_score_completions([dict(row), dict(row)])

    def _wrap(self, name):
        real = getattr(self.trainer, name)

        def kept(*args):
            found = real(*args)
            setattr(self, name, found)
            return found

        setattr(self.trainer, name, kept)

    def reply(self, prompt_ids, images, fields, num_generations, has_tool_images=False):
        self.contexts.append(list(prompt_ids[0]))
        ids = list(self.renderer.encode_reply(self.replies[len(self.contexts) - 1]))
        return [list(ids) for _ in prompt_ids], None


def both(
    trl,
    template,
    tmp_path,
    replies,
    row,
    *,
    use="trl:GRPOTrainer",
    faithful=True,
    args=None,
    answer=None,
    **theirs,
):
    """Play both; compare contexts, ids, mask and rewards."""
    renderer = ChatRenderer(HFTokenizer(bpe()), ChatTemplate(template))
    prompt = [{"role": "user", "content": "Go."}]
    columns = row if answer is None else {**row, "answer": answer}
    expected = Trainer(
        trl, template, tmp_path, replies, {"prompt": prompt, **columns}, renderer, **theirs
    )
    spec = resolve_env(EnvConfig(use=use, args=args or {}, faithful=faithful), base=HOME)
    limits = tw.Limits(turns=spec.max_turns or 8, turn_tokens=2048)
    task = tw.Task(prompt, answer, info=row)
    (found,) = tw.rollout(
        spec.factory, [task], tw.ScriptedEngine(replies), renderer=renderer, limits=limits
    )
    assert found.error is None, found.error
    (sample,) = found.samples()
    prompt_ids, completion_ids = (expected._generate[number][0] for number in range(2))
    tool_mask = expected._generate[2] and expected._generate[2][0]  # None without tools
    start = found.turns[0].context
    assert [found.prompt_ids(number) for number in range(len(found.turns))] == expected.contexts
    assert sample.ids[:start] == prompt_ids
    assert sample.ids[start:] == list(completion_ids)
    assert sample.mask[start:] == list(tool_mask or [1] * len(completion_ids))
    rewards = dict(
        zip(
            expected.trainer.reward_func_names, expected._calculate_rewards[0].tolist(), strict=True
        )
    )
    assert found.rewards == pytest.approx(
        {name: value for name, value in rewards.items() if value == value}
    )
    return found


def test_tools_of_a_class_and_its_reward(trl, template, tmp_path):
    replies = [
        call("guess", number=3) + "\n" + call("ask", question="even?"),
        call("guess", number=4),
        "done",
    ]
    row = {"secret": 4, "hint": " Think.", "level": 2}
    given = {"use": "guess.py:Guess", "factory": load("guess.py:Guess")}
    found = both(trl, template, tmp_path, replies, row, **given)
    assert found.messages[0].text == "Go. Between 0 and 9. Think."
    assert found.reward == 0.5
    both(trl, template, tmp_path, [call("guess", number=4), "done"], row, faithful=False, **given)


def test_words_of_trl(trl, template, tmp_path):
    replies = [
        call("nope") + "\n" + call("guess", wrong=1),
        call("guess", number=4),
        call("guess", number=4),
        "done",
    ]
    given = {"use": "guess.py:Guess", "factory": load("guess.py:Guess")}
    found = both(trl, template, tmp_path, replies, {"secret": 4}, **given)
    assert (
        next(message.text for message in found.messages if message.role == "tool")
        == "{'error': 'Tool nope not found.'}"
    )


def test_the_most_tool_calling_iterations(trl, template, tmp_path):
    replies = [call("guess", number=1), call("guess", number=2), call("guess", number=4)]
    given = {"use": "guess.py:Guess", "factory": load("guess.py:Guess")}
    found = both(
        trl,
        template,
        tmp_path,
        replies,
        {"secret": 4},
        turns=2,
        args={"max_tool_calling_iterations": 2},
        **given,
    )
    assert (found.reward, len(found.turns)) == (0.0, 3)


def test_asynchronous_tools_and_reward(trl, template, tmp_path):
    replies = [call("pay", amount=2.5) + "\n" + call("total"), call("total"), "done"]
    found = both(
        trl,
        template,
        tmp_path,
        replies,
        {"goal": 2.5},
        use="ledger.py:Ledger",
        factory=load("ledger.py:Ledger"),
    )
    assert found.reward == 1.0


@pytest.mark.parametrize("name", ["echo", "guess"])
def test_a_row_chooses_its_environment(trl, template, tmp_path, name):
    args = {"reward_funcs": ["rewards.py:said", "rewards.py:calls"]}
    given = {
        "factory": load("several.py:ENVIRONMENTS"),
        "rewards": [load("rewards.py:said"), load("rewards.py:calls")],
    }
    row = {"environment": name, "word": "x", "secret": 3, "hint": ""}
    first = call("say", text="hello") if name == "echo" else call("guess", number=3)
    found = both(
        trl,
        template,
        tmp_path,
        [first, "done"],
        row,
        use="several.py:ENVIRONMENTS",
        args=args,
        **given,
    )
    assert found.reward == 2.0


def test_tools_and_rewards_without_an_environment(trl, template, tmp_path):
    names = ["rewards.py:exact", "rewards.py:brief"]
    given = {"tools": [load("rewards.py:multiply")], "rewards": [load(name) for name in names]}
    args = {"tools": ["rewards.py:multiply"], "reward_funcs": names}
    both(
        trl,
        template,
        tmp_path,
        [call("multiply", a=6, b=7), "42"],
        {},
        answer="42",
        args=args,
        **given,
    )


def test_one_turn_without_tools(trl, template, tmp_path):
    args = {"reward_funcs": ["trl.rewards:think_format_reward", "rewards.py:brief"]}
    rewards = [trl.rewards.think_format_reward, load("rewards.py:brief")]
    found = both(trl, template, tmp_path, ["<think>a</think>b"], {}, args=args, rewards=rewards)
    assert found.rewards["think_format_reward"] == 1.0


def test_our_rewards_of_its_names(trl):
    texts = [
        "<think>a</think>b",
        "<think>a\n</think>",
        "<think><think>a</think>",
        "a<think>b</think>",
        "<think>a",
        "",
        "<think></think>",
    ]
    completions = [[{"content": text}] for text in texts]
    assert stand_in.think_format_reward(completions) == trl.rewards.think_format_reward(completions)
    ids = [[0] * size for size in (0, 70, 80, 81, 99, 100, 101, 150)]
    ours, theirs = (home.get_soft_overlong_punishment(100, 20) for home in (stand_in, trl.rewards))
    assert ours(ids) == theirs(ids)

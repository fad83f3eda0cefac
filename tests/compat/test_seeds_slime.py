"""The encoding of observations that slime's document prints, run on our episodes."""

import os
from pathlib import Path

import pytest
from kit.rollouts import bpe, renderer
from transformers import PreTrainedTokenizerFast

import turnwright as tw
from turnwright.renderers import CHATML

SEED = (
    Path(os.environ.get("TURNWRIGHT_SEEDS") or Path(__file__).parents[2].parent / "shared/seeds")
    / "slime-vlm-multi-turn.md"
)
DELTA = """
dummy = apply_chat_template(DUMMY_MESSAGES, tools=tools, add_generation_prompt=False)
full  = apply_chat_template(DUMMY_MESSAGES + [obs_msg], tools=tools, add_generation_prompt=True)

trim = len(encode(dummy))
obs_ids = encode(full)[trim:]   # delta tokens only
"""
DUMMY_MESSAGES = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "I am a user."},
]


def count(word: str) -> str:
    """Count letters.

    Args:
        word: A word.
    """
    return str(len(word))


@pytest.mark.skipif(not SEED.is_file(), reason="the document is not there")
def test_the_block_is_that_of_the_document():
    assert DELTA in SEED.read_text(encoding="utf-8")


def test_the_printed_delta_is_the_observation_that_we_append():
    """With a tool; the line break after the end token, which the printed way loses, is ours."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe(), eos_token="<|im_end|>")
    tokenizer.chat_template = CHATML
    call = '<tool_call>{"name": "count", "arguments": {"word": "geese"}}</tool_call>'
    made = tw.tool_env(tools=[count])
    (found,) = tw.rollout(
        made,
        [tw.Task("Go.")],
        tw.ScriptedEngine([call, call, "5"]),
        renderer=renderer("bpe"),
        limits=tw.Limits(turns=4),
    )
    assert found.error is None, found.error
    names = {
        "DUMMY_MESSAGES": DUMMY_MESSAGES,
        "tools": list(made().tools),
        "obs_msg": {"role": "tool", "content": "5"},
        "apply_chat_template": lambda *args, **kwargs: tokenizer.apply_chat_template(
            *args, tokenize=False, **kwargs
        ),
        "encode": lambda text: tokenizer.encode(text, add_special_tokens=False),
    }
    exec(DELTA, names)
    for turn in (0, 1):
        before = found.prompt_ids(turn) + renderer("bpe").encode_reply(call)
        appended = found.prompt_ids(turn + 1)[len(before) :]
        assert found.prompt_ids(turn + 1)[: len(before)] == before
        assert appended == [*names["encode"]("\n"), *names["obs_ids"]]
    assert renderer("bpe").decode(found.prompt_ids(2)).count("# Tools") == 1
    assert "# Tools" in names["dummy"]

"""Sampling parameters of a framework's engine call reach our engine by our names,
whatever form a stop has."""

import asyncio
from types import SimpleNamespace

import pytest

from turnwright.envs.user_imports import import_foreign
from turnwright.types import Image
from turnwright_compat.sampled_rows import sampling_options
from turnwright_compat.skyrl.generator import EngineClient
from turnwright_compat.slime.engine import EngineServer
from turnwright_compat.swift.engine import PROTOCOL, Episode
from turnwright_compat.verl.agent_loop import ServerManager


class OptionsSeen(Exception):
    """Ends a call with the options that the engine got."""


class SeesOptions:
    """Takes the options of a call instead of sampling."""

    async def generate(self, prompt, *, tools=(), **options):
        raise OptionsSeen(options)


def skyrl(model, given):
    return EngineClient(model).generate({"prompt_token_ids": [[1]], "sampling_params": given})


def slime(model, given):
    return EngineServer(model).answer(
        "http://localhost/generate", {"input_ids": [1], "sampling_params": given}
    )


def swift(model, given):
    request = SimpleNamespace(
        messages=[{"role": "user", "content": "Go."}], images=[], audios=[], videos=[], tools=None
    )
    return Episode(model, "a").infer(request, import_foreign(PROTOCOL).RequestConfig(**given))


def verl(model, given):
    return ServerManager(model).generate("a", prompt_ids=[1], sampling_params=given)


@pytest.mark.parametrize("framework", [skyrl, slime, swift, verl])
@pytest.mark.parametrize(
    ("stop", "kept"),
    [("###", ("###",)), (["###", "end"], ("###", "end")), (None, None), ([], None)],
)
def test_a_stop_is_a_text_or_a_list_of_texts(framework, stop, kept):
    with pytest.raises(OptionsSeen) as seen:
        asyncio.run(framework(SeesOptions(), {"stop": stop, "temperature": 0.5, "top_k": -1}))
    (options,) = seen.value.args
    assert options == {"temperature": 0.5, "top_k": 0} | ({"stop": kept} if kept else {})


@pytest.mark.parametrize("length", ["max_tokens", "max_new_tokens", "max_generate_length"])
def test_all_names_of_the_frameworks(length):
    given = {length: 7, "top_p": 0.9, "min_p": 0.0, "stop_token_ids": 5, "logprobs": 1}
    assert sampling_options(given, ["image"]) == {
        "max_tokens": 7,
        "top_p": 0.9,
        "min_p": 0.0,
        "stop_ids": (5,),
        "media": (Image("data:image;base64,image"),),
    }

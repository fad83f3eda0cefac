"""Images of our episodes in other trainers: what their engines are asked,
and what they train on."""

import asyncio
import io
import json
from argparse import Namespace
from base64 import b64decode

import numpy as np
import pytest
import torch
from kit.outbound import Server, check_row, run
from kit.vision import tiny_vlm_directory
from PIL import Image
from test_outbound_skyrl import Client as SkyRLClient
from test_outbound_skyrl import config as skyrl_config
from test_outbound_slime import Sample
from test_outbound_verl import config as verl_config
from transformers import AutoImageProcessor, AutoTokenizer

import turnwright as tw
from turnwright.errors import UsageError
from turnwright_compat.skyrl.rollout import SkyRLEpisodes, TurnwrightGenerator
from turnwright_compat.slime.rollout import ROUTING_KEY, SlimeEpisodes, make_generate
from turnwright_compat.verl.rollout import TurnwrightAgentLoop, VerlEpisodes

LIMITS = tw.Limits(turns=2, turn_tokens=8, on_turn_length="continue")


def picture(seed, width=64, height=48):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


class Looks(tw.Env):
    """Shows a picture, and another one after the first reply."""

    def reset(self, task, *, seed=None):
        self.left, self.number = 2, int(task.id)
        return [{"role": "user", "content": [tw.Image(picture(self.number)), "Look."]}]

    def step(self, action):
        self.left -= 1
        if not self.left:
            return tw.Step(reward=1.0, terminated=True)
        return tw.Step(
            [{"role": "user", "content": ["Again:", tw.Image(picture(100 + self.number, 32, 96))]}]
        )

    @staticmethod
    def tasks(split, n, seed):
        return [tw.Task("Look.", id=str(number)) for number in range(n)]


class Films(Looks):
    def reset(self, task, *, seed=None):
        return [{"role": "user", "content": [tw.Video([picture(1), picture(2)], fps=2.0), "Look."]}]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_vlm_directory(tmp_path_factory.mktemp("vlm") / "m", "qwen2_5_vl")


class VerlClient:
    def __init__(self, server):
        self.server, self.images = server, {}

    async def generate(self, request_id, *, prompt_ids, sampling_params, image_data=None, **kwargs):
        params = sampling_params
        self.images[request_id] = image_data
        ids, logprobs, _ = await self.server.sample(
            request_id,
            prompt_ids,
            params["max_tokens"],
            params["stop_token_ids"],
            images=image_data or (),
        )
        return Namespace(
            token_ids=ids, log_probs=logprobs, stop_reason="completed", extra_fields={}
        )


def verl_outputs(path, play, client):
    tokenizer = AutoTokenizer.from_pretrained(path)
    given = {"prompt_length": 256, "response_length": 256}

    async def work():
        loops = [
            TurnwrightAgentLoop(verl_config(path, **given), client, tokenizer, episodes=play)
            for _ in play.rows()
        ]
        params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
        rows = ({**row, "raw_prompt": row.pop("prompt")} for row in play.rows())
        return await asyncio.gather(
            *(loop.run(params, **row) for loop, row in zip(loops, rows, strict=True))
        )

    return run(work())


def processed(path, images):
    """The inputs that the model's own processor makes of images."""
    found = AutoImageProcessor.from_pretrained(path, backend="pil")(
        images=list(images), return_tensors="pt"
    )
    return found["pixel_values"], found["image_grid_thw"]


def test_verl_gets_the_images_of_every_turn_with_their_ids(path):
    client, play = VerlClient(Server(path)), VerlEpisodes(Looks, n_tasks=3, limits=LIMITS)
    for number, output in enumerate(verl_outputs(path, play, client)):
        calls = check_row(
            client.server.calls,
            output.prompt_ids,
            output.response_ids,
            output.response_mask,
            output.response_logprobs,
        )
        assert len(calls) == 2
        first, second = (np.asarray(image) for image in output.multi_modal_data["images"])
        assert np.array_equal(first, picture(number))
        assert np.array_equal(second, picture(100 + number, 32, 96))
        _, grids = processed(path, output.multi_modal_data["images"])
        pad = json.loads((path / "config.json").read_text())["image_token_id"]
        assert [*output.prompt_ids, *output.response_ids].count(pad) == int(
            (grids.prod(-1) // 4).sum()
        )
    assert sorted(len(images) for images in client.images.values()) == [2, 2, 2]


def test_slime_trains_on_the_pixel_values_of_the_models_own_processor(path, monkeypatch):
    server = Server(path)

    async def post(url, payload, headers=None):
        files = [b64decode(one.partition(",")[2]) for one in payload["image_data"]]
        images = [np.asarray(Image.open(io.BytesIO(file))) for file in files]
        params = payload["sampling_params"]
        ids, logprobs, finish = await server.sample(
            headers[ROUTING_KEY],
            payload["input_ids"],
            params["max_new_tokens"],
            params["stop_token_ids"],
            images=images,
        )
        rows = [[one, token, None] for one, token in zip(logprobs, ids, strict=True)]
        return {
            "text": "",
            "meta_info": {"finish_reason": {"type": finish}, "output_token_logprobs": rows},
        }

    play = SlimeEpisodes(Looks, n_tasks=3, limits=LIMITS)
    generate = make_generate(play, post=post)
    args = Namespace(sglang_router_ip="a", sglang_router_port=1, hf_checkpoint=str(path))
    samples = [Sample(index=at, metadata=row["metadata"]) for at, row in enumerate(play.rows())]

    async def work():
        params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
        return await asyncio.gather(*(generate(args, sample, params) for sample in samples))

    for number, sample in enumerate(run(work())):
        start = len(sample.tokens) - sample.response_length
        columns = (
            sample.tokens[:start],
            sample.tokens[start:],
            sample.loss_mask,
            sample.rollout_log_probs,
        )
        assert len(check_row(server.calls, *columns)) == 2
        values, grids = processed(path, [picture(number), picture(100 + number, 32, 96)])
        assert torch.equal(sample.multimodal_train_inputs["pixel_values"], values)
        assert torch.equal(sample.multimodal_train_inputs["image_grid_thw"], grids)


def test_what_a_trainer_does_not_take_is_named(path):
    client = SkyRLClient(Server(path))
    with pytest.raises(UsageError, match="images in SkyRL"):
        TurnwrightGenerator(
            SkyRLEpisodes(Looks, n_tasks=1),
            skyrl_config(path),
            AutoTokenizer.from_pretrained(path),
            client,
        )
    with pytest.raises(
        Exception, match="verl takes no videos from Turnwright; give their frames as images"
    ):
        verl_outputs(path, VerlEpisodes(Films, n_tasks=1, limits=LIMITS), VerlClient(Server(path)))

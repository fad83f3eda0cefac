"""Images through each dialect with a real model: a program plays radar over 16
turns as the loop plays it."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import httpx2
import pytest

pytest.importorskip("torch")
from kit.proxy import account, contexts
from kit.proxy_programs import PROGRAMS, ChatProgram
from kit.sight import Gallery

import turnwright as tw
from turnwright.config import ModelConfig
from turnwright.engines.local import LocalEngine
from turnwright.envs.builtin.radar import Radar
from turnwright.media.images import encode_png
from turnwright.rollouts import Rollout, make_episode_specs
from turnwright.rollouts.rollout_settings import RolloutSettings
from turnwright.training import create_tiny_model
from turnwright_serve import program
from turnwright_serve.proxy.programs import ProgramEndpoint

pytestmark = pytest.mark.filterwarnings(
    "ignore:local engine. on this machine the last bits:UserWarning"
)
TURNS, SEED = 16, 0
LIMITS = tw.Limits(turns=TURNS, turn_tokens=2, on_turn_length="continue")


class LongRadar(Radar):
    """Radar whose goal moves on when it is reached, for a fixed number of turns."""

    max_turns = TURNS

    async def reset(self, task: tw.Task, *, seed: int | None = None) -> Any:
        opening = await super().reset(task, seed=seed)
        self.max_turns = self._moves = TURNS
        return opening

    async def step(self, action: tw.Action) -> tw.Step:
        found = await super().step(action)
        if self._goal == (0, 0):
            self._goal = (self._reach, 1)
            return tw.Step(self._observe(), terminated=not self._moves)
        return found


class Bare:
    """A program without system message and tools, whose first message is an image and
    whose replies may be cut."""

    statuses = ("completed", "incomplete")

    def body(self) -> dict[str, Any]:
        body = super().body()  # type: ignore[misc]
        return {
            name: value
            for name, value in body.items()
            if name not in ("tools", "instructions", "system")
        }


def program_of(kind: type[ChatProgram]) -> Any:
    """Return a black box in one dialect: it sees images and says moves, and knows no ids."""

    async def agent(endpoint: ProgramEndpoint) -> str:
        program, radar = type("Bare", (Bare, kind), {})(stream=False), LongRadar()
        # Responses and Messages send the system message elsewhere, so their
        # histories begin after it.
        program.messages = [] if kind is ChatProgram else program.messages[:1]
        message = (await radar.reset(endpoint.task))[0]
        async with httpx2.AsyncClient(
            base_url=endpoint.root, trust_env=False, verify=False, timeout=60
        ) as http:
            while True:
                (image,) = message.content
                program.show(base64.b64encode(encode_png(image.value)).decode())
                response = await http.post(program.path, json=program.body())
                assert response.status_code == 200, response.text
                program.take(response.text)
                step = await radar.step(
                    tw.Action(said(program.messages[-1]), tw.Message("assistant", ""))
                )
                if step.terminated:
                    return "reached" if step.reward else "no"
                message = step.observation

    return program(agent, score=lambda result: float(result.output == "reached"))


def said(message: dict[str, Any]) -> str:
    """Return the text of a reply in any dialect."""
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


@pytest.fixture(scope="module")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> Gallery:
    sizes = ModelConfig(hidden=64, heads=4, vision=True, image_side=32)
    return Gallery(
        create_tiny_model(
            sizes, Radar().texts(200, 0) * 20, tmp_path_factory.mktemp("vlm") / "model"
        )
    )


def play(vlm: Gallery, target: Any, *, blank: bool = False) -> tuple[list[tw.Trajectory], int]:
    """Play four episodes; return them and how many images the engine encoded."""
    engine = LocalEngine(vlm.module, renderer=vlm.renderer, context=2048, slots=4)
    specs = make_episode_specs(target, Radar().tasks("train", 4, 0), phase="rollout", step=0)

    async def work() -> list[tw.Trajectory]:
        try:
            return await Rollout(
                engine, vlm.renderer, RolloutSettings(limits=LIMITS, seed=SEED)
            ).play(specs, blank=blank)
        finally:
            await engine.close()

    return asyncio.run(work()), engine.media_encoded


def facts(trajectory: tw.Trajectory) -> Any:
    rows = [(row.ids, row.mask, row.logprobs, row.weights) for row in trajectory.samples()]
    images = [[block.media.sha256 for block in row.media] for row in trajectory.samples()]
    return rows, images, trajectory.reward


@pytest.fixture(scope="module")
def loop(vlm: Gallery) -> dict[bool, tuple[list[tw.Trajectory], int]]:
    """The loop's own episodes, seeing and blind."""
    return {blank: play(vlm, LongRadar, blank=blank) for blank in (False, True)}


@pytest.mark.parametrize("kind", PROGRAMS)
def test_a_program_sees_what_the_loop_shows(
    kind: type[ChatProgram], vlm: Gallery, loop: Any
) -> None:
    found, encoded = play(vlm, program_of(kind))
    for one in found:
        assert one.error is None, one.error.traceback
        assert len(one.turns) == TURNS
        assert one.branches == {}
        assert one.metrics["media_shown"] == TURNS
        account(one)
    plain, plain_encoded = loop[False]
    assert [facts(one) for one in found] == [facts(one) for one in plain]
    assert [contexts(one) for one in found] == [contexts(one) for one in plain]
    shown = {sha for one in found for image in facts(one)[1] for sha in image}
    assert encoded == plain_encoded == len(shown)


@pytest.mark.parametrize("kind", PROGRAMS)
def test_a_blind_program_sees_gray_images(kind: type[ChatProgram], vlm: Gallery, loop: Any) -> None:
    found, encoded = play(vlm, program_of(kind), blank=True)
    assert [facts(one) for one in found] == [facts(one) for one in loop[True][0]]
    assert len({sha for one in found for image in facts(one)[1] for sha in image}) == encoded == 1
    pairs = zip(found, loop[False][0], strict=True)
    logprobs = [[row.logprobs for row in one.samples()] for pair in pairs for one in pair]
    assert all(a != b for a, b in zip(logprobs[::2], logprobs[1::2], strict=True))

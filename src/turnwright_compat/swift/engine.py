"""The engine that ms-swift's schedulers call, over ours: the ids of a request, and
which of them are trained.

`Episode.infer` samples a reply: to messages where all replies are as they were, else to ids, so
that what was sampled and edited keeps its ids. `set_weights` finds the replies in the rows that
the scheduler returns, and sets their weights.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from turnwright.envs.user_imports import import_foreign
from turnwright.errors import EnvError
from turnwright.types import NO_AUDIO, Image, Video, VideoRef
from turnwright.types.messages import read_part
from turnwright_compat.sampled_rows import image_of, sampling_options
from turnwright_compat.swift.scales import LossScales

PROTOCOL = "swift.infer_engine.protocol"


class InferEngine:
    """`infer_engine` of a scheduler, which is one object for all episodes: each call goes to
    the episode that makes it.

    It has no `engine` and no `template`: ms-swift's schedulers look for unknown attributes there,
    and default without them.
    """

    def __init__(self) -> None:
        self._episode: ContextVar[Episode] = ContextVar("episode")

    def enter(self, episode: Episode) -> None:
        """Send the calls of the current task, and of those that it starts, to an episode."""
        self._episode.set(episode)

    @property
    def episode(self) -> Episode:
        """The episode of the current task; `AttributeError` outside of one, so that `getattr`
        with a default works."""
        episode = self._episode.get(None)
        if episode is None:
            raise AttributeError("the engine belongs to an episode; use it in run, step or a hook")
        return episode

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the run."""
        return self.episode.model.tokenizer

    async def infer_async(self, infer_request: Any, request_config: Any = None, **_: Any) -> Any:
        """Sample a reply to a request."""
        return await self.episode.infer(infer_request, request_config)


class Episode:
    """One trajectory: its calls, and the ids of the texts that they made."""

    def __init__(self, model: Any, id: str) -> None:
        self.model = model
        self.id = id
        self.calls: list[tuple[list[int], Any]] = []
        """Ids of the message before each reply, and the reply."""
        self.queries: list[tuple[int, Any]] = []
        """For each call, the number of messages of the user, and the last one."""
        self.contexts: list[list[tuple[str, str]]] = []
        """Roles and texts of the messages before each reply."""
        self.infos: dict[str, list[Any]] = {}
        """What each `step` of release 3.6 returned besides its request."""
        self.rollout_infos: dict[str, Any] = {}
        """What the hooks returned so far."""
        self._last: tuple[Any, Any] | None = None
        """Request and response of the last call."""
        self._sampled: list[_SampledMessage] = []
        """Messages of the assistant so far."""

    async def infer(self, request: Any, config: Any) -> Any:
        """Sample a reply: to the messages where all replies are unchanged, else to their ids."""
        messages = [dict(message) for message in request.messages]
        if (
            len(messages) > 1
            and messages[-1]["role"] == "assistant"
            and not messages[-1]["content"]
        ):
            messages.pop()  # an empty one is the place of the next reply
        if request.audios:
            raise EnvError(f"the request has audios: {NO_AUDIO}")
        media = _place_media(messages, list(request.images or ()), list(request.videos or ()))
        tools = tuple(_plain_tool(tool) for tool in request.tools or ())

        opened = self._open(messages[-1]["content"]) if messages[-1]["role"] == "assistant" else []
        complete = messages[:-1] if opened else messages
        own_messages, is_edited = self._own_messages(complete)
        options = {} if config is None else sampling_options(vars(config))
        if opened or is_edited:
            ids = {number: message.ids for number, message in own_messages.items()}
            if opened:
                ids[len(messages) - 1] = opened
            for number in ids:
                messages[number]["content"] = "x"  # its ids are used
            prompt = await self.model.render(messages, ids, tools)
            reply = await self.model.generate(prompt, tools=tools, media=media, **options)
        else:
            conversation: list[Any] = list(messages)
            for number, message in own_messages.items():
                conversation[number] = message.reply.message
            reply = await self.model.generate(conversation, tools=tools, **options)

        text = self._text(reply)
        opened_text = self.model.tokenizer.decode(opened) if opened else ""
        self.calls.append((opened, reply))
        queries = [message["content"] for message in request.messages if message["role"] == "user"]
        self.queries.append((len(queries), queries[-1] if queries else None))
        self.contexts.append(self.texts(request.messages))
        self._sampled.append(
            _SampledMessage(opened_text + text, [*opened, *reply.ids], None if opened else reply)
        )
        response = _response(reply, text, self.id)
        self._last = request, response
        return response

    def cut(self) -> list[Any]:
        """Return the row of an episode that a limit ended, as far as it was played; none
        before the first reply."""
        if self._last is None:
            return []

        request, response = self._last
        messages = list(request.messages)
        while messages and (messages[-1]["role"] != "assistant" or not messages[-1]["content"]):
            messages.pop()
        choice = replace(response.choices[0], finish_reason="length")
        output = import_foreign(PROTOCOL).RolloutOutput(
            response=replace(response, choices=[choice]),
            messages=messages,
            rollout_infos={**self.rollout_infos, "num_turns": len(self.calls)},
        )
        return [output]

    def rows(self) -> list[tuple[list[int], list[int]]]:
        """Return ids and masks of the messages as they were continued, for a scheduler
        that does not say them."""
        rows: list[tuple[list[int], list[int]]] = []
        for opened, reply in self.calls:
            ids = [*opened, *reply.ids]
            sampled = [1] * len(reply.ids)
            if opened and rows:
                last_ids, last_mask = rows[-1]
                kept = _shared(last_ids, opened)
                rows[-1] = ids, [*last_mask[:kept], *[0] * (len(opened) - kept), *sampled]
            else:
                rows.append((ids, [0] * len(opened) + sampled))
        return rows

    def texts(self, messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
        """Return roles and texts of messages; contents that are ids are decoded."""
        texts = []
        for message in messages:
            content = message["content"]
            if _is_ids(content):
                content = self.model.tokenizer.decode(self._without_end(content))
            if not isinstance(content, str):
                content = repr(content)
            texts.append((str(message["role"]), content))
        return texts

    def leads_to(self, number: int, texts: Sequence[tuple[str, str]]) -> bool:
        """Return whether the context of a call is the beginning of a conversation."""
        context = self.contexts[number]
        if not context or context[-1][0] != "assistant":
            return list(texts[: len(context)]) == context

        *before, (role, opened) = context  # a message that goes on
        size = len(before)
        return (
            list(texts[:size]) == before
            and len(texts) > size
            and texts[size][0] == role
            and texts[size][1].startswith(opened)
        )

    def scaled(self, scales: LossScales) -> Iterator[list[float]]:
        """Yield the loss scales of each reply's ids."""
        last = max((number for number, _ in self.queries), default=0)
        for (opened, reply), (number, query) in zip(self.calls, self.queries, strict=True):
            if scales.last_round and number < last:
                yield [0.0] * len(reply.ids)
                continue
            ids = list(reply.ids)
            ends = self._without_end(ids) != ids
            yield scales.weights(self.model.tokenizer.decode, opened, ids, ends, query)

    def _text(self, reply: Any) -> str:
        """Return the text of a reply without its end token."""
        return str(self.model.tokenizer.decode(self._without_end(list(reply.ids))))

    def _without_end(self, ids: list[int]) -> list[int]:
        return ids[:-1] if ids and ids[-1] in self.model.tokenizer.all_special_ids else ids

    def _open(self, content: Any) -> list[int]:
        """Return the ids of a message that is continued: those of a known text as far as it is the
        same, then the text's."""
        if isinstance(content, list):
            return list(content)

        kept: list[int] = []
        kept_text = ""
        for message in reversed(self._sampled):
            if _shared(message.text, content) <= len(kept_text):
                continue
            ids, text = self._cut(self._without_end(message.ids), content)
            if len(text) > len(kept_text):
                kept, kept_text = ids, text
        rest = content[len(kept_text) :]
        return [*kept, *self.model.tokenizer.encode(rest, add_special_tokens=False)]

    def _cut(self, ids: list[int], content: str) -> tuple[list[int], str]:
        """Return the most ids whose text begins a content, and that text."""
        decode = self.model.tokenizer.decode
        for size in range(len(ids), 0, -1):
            text = decode(ids[:size])
            if content.startswith(text):
                return ids[:size], text
        return [], ""

    def _own_messages(
        self, messages: Sequence[Mapping[str, Any]]
    ) -> tuple[dict[int, _SampledMessage], bool]:
        """Return the messages that this episode sampled, by index, and whether one of them is
        not a reply as it was."""
        own: dict[int, _SampledMessage] = {}
        left = list(self._sampled)
        is_edited = False
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue

            content = message["content"]
            same = next((at for at, sampled in enumerate(left) if sampled.has(content)), None)
            if same is not None:
                own[number] = left[same]
                is_edited = is_edited or left[same].reply is None
                del left[: same + 1]
            elif _is_ids(content):
                own[number] = _SampledMessage("", list(content), None)
                is_edited = True
        return own, is_edited


@dataclass(frozen=True, slots=True)
class _SampledMessage:
    """A message of the assistant, of which at least a part was sampled."""

    text: str
    ids: list[int]
    reply: Any
    """The reply, if that is the complete message; else None."""

    def has(self, content: Any) -> bool:
        """Whether a content, a text or ids, is that of this message."""
        return bool((self.text if isinstance(content, str) else self.ids) == content)


def set_weights(
    outputs: Sequence[Any], episode: Episode, scales: LossScales | None = None
) -> list[tuple[Any, ...]]:
    """Set the weights of the replies by `response_token_ids` and
    `response_loss_mask`, times the loss scales.

    Ids that the outputs lack are not trained. Return the replies that each output trains; one that
    several outputs have, as the paths of a tree do, is in all of them.

    Raises:
        EnvError: for a mask of another length than its ids, or one that trains an id which
            the engine did not sample.
    """
    paths = [_path_of(output, episode, alone=len(outputs) == 1) for output in outputs]
    texts: dict[int, list[tuple[str, str]]] = {}
    if len(outputs) > 1:
        for number, output in enumerate(outputs):
            if output.messages is not None:
                texts[number] = episode.texts(output.messages)

    weights = [[0.0] * len(reply.ids) for _, reply in episode.calls]
    trained: list[list[Any]] = [[] for _ in outputs]
    for call, (opened, reply) in enumerate(episode.calls):
        matches = [path.find(opened, list(reply.ids)) for path in paths]
        for owner in _owners(call, matches, texts, episode):
            match = matches[owner]
            assert match is not None
            trained[owner].append(reply)
            mask = paths[owner].take(match)
            for place in range(match.size):
                weight = 1.0 if mask is None else float(mask[len(opened) + place])
                weights[call][place] = max(weights[call][place], weight)

    first_row = 0
    for path in paths:
        path.check_masks(first_row)
        first_row += len(path.rows)

    if scales is not None:
        weights = [
            [weight * scale for weight, scale in zip(of_reply, scales_of_reply, strict=True)]
            for of_reply, scales_of_reply in zip(weights, episode.scaled(scales), strict=True)
        ]
    for (_, reply), of_reply in zip(episode.calls, weights, strict=True):
        if any(weight != 1.0 for weight in of_reply):
            episode.model.weigh(reply, of_reply)
    return [tuple(replies) for replies in trained]


def _path_of(output: Any, episode: Episode, *, alone: bool) -> _Path:
    """Return the rows of an output; where it has none, those of the episode, or of several outputs
    its last reply."""
    rows = list(_rows_of(output))
    if not rows and not alone:
        rows = [(list(output.response.choices[0].token_ids or ()), None)]
    return _Path(rows or list(episode.rows()))


def _owners(
    call: int,
    matches: Sequence[_Match | None],
    texts: Mapping[int, Sequence[tuple[str, str]]],
    episode: Episode,
) -> list[int]:
    """Return the numbers of the outputs that have the reply of a call."""
    # A path that has less of the reply has another one, which begins alike; of equal
    # ones, the context tells.
    most = max((match.size for match in matches if match is not None), default=0)
    longest = [
        number for number, match in enumerate(matches) if match is not None and match.size == most
    ]
    with_context = [
        number for number in longest if number in texts and episode.leads_to(call, texts[number])
    ]
    return with_context or longest


@dataclass(frozen=True, slots=True)
class _Match:
    """Where an output has a reply: the row, and the number of its ids that are there."""

    row: int
    size: int


class _Path:
    """The rows of ids and masks of one output, in which the episode's
    replies are found in order."""

    def __init__(self, rows: Sequence[tuple[list[int], list[int] | None]]) -> None:
        self.rows = rows
        self.last = -1
        """Row of the last reply."""
        self._sampled: set[tuple[int, int]] = set()

    def find(self, opened: list[int], ids: list[int]) -> _Match | None:
        """Find a reply: after the last one, or in its row if it goes on there; else anywhere."""
        start = len(opened)
        first = self.last if start else self.last + 1
        order = [*range(first, len(self.rows)), *range(len(self.rows))]
        row = next(
            (row for row in order if row >= 0 and _continues(self.rows[row][0], opened, ids)), None
        )
        if row is None:
            return None

        size = _shared(self.rows[row][0][start:], ids)
        self._sampled |= {(row, start + offset) for offset in range(size)}
        return _Match(row, size)

    def take(self, match: _Match) -> list[int] | None:
        """Go on after a reply that was found; return its row's mask."""
        self.last = match.row
        return self.rows[match.row][1]

    def check_masks(self, first_row: int) -> None:
        """Check that masks train sampled ids alone; `first_row` is the number of this
        path's first row among all."""
        for row, (_, mask) in enumerate(self.rows):
            for position, weight in enumerate(mask or ()):
                if weight and (row, position) not in self._sampled:
                    raise EnvError(
                        f"response_loss_mask[{first_row + row}][{position}] is {weight}, and the "
                        "engine did not sample that id there; write 0"
                    )


def _rows_of(output: Any) -> Iterator[tuple[list[int], list[int] | None]]:
    """Yield ids and mask of each message that an output has."""
    masks = list(output.response_loss_mask or ())
    for turn, ids in enumerate(output.response_token_ids or ()):
        if masks and (turn >= len(masks) or len(masks[turn]) != len(ids)):
            raise EnvError(
                f"turn {turn}: {len(ids)} response_token_ids and another number of "
                "response_loss_mask"
            )
        yield list(ids), list(masks[turn]) if masks else None


def _continues(row: list[int], opened: list[int], ids: list[int]) -> bool:
    start = len(opened)
    return row[:start] == opened and row[start : start + 1] == ids[:1]


def _shared(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the length of the beginning that two sequences have in common."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(first), len(second)))


def _is_ids(content: Any) -> bool:
    """Whether the content of a message is a list of ids."""
    return isinstance(content, list) and bool(content) and isinstance(content[0], int)


FRAMES_PER_SECOND = 2.0
"""Rate of a video that is given as frames alone, as Qwen's processors assume it."""
PLACES = {"<image>": "images", "<video>": "videos"}
"""Places in texts, and the list of the request whose next item belongs there."""


def _place_media(messages: list[dict[str, Any]], images: list[Any], videos: list[Any]) -> list[Any]:
    """Replace `<image>` and `<video>` in texts by the media of the request, in order;
    return those that were placed.

    A text is left as it is where the request has no media of that kind.
    """
    left = {"<image>": list(images), "<video>": list(videos)}
    pattern = "|".join(place for place in PLACES if left[place])
    if not pattern:
        return []

    placed: list[Any] = []
    for message in messages:
        content = message["content"]
        if message["role"] == "assistant" or not isinstance(content, str):
            continue
        if not re.search(pattern, content):
            continue

        parts: list[Any] = []
        for piece in re.split(f"({pattern})", content):
            if piece not in PLACES:
                if piece:
                    parts.append({"type": "text", "text": piece})
                continue
            if not left[piece]:
                count = len(images if piece == "<image>" else videos)
                raise EnvError(
                    f"the messages have more {piece} than the request has {PLACES[piece]} ({count})"
                )
            item = left[piece].pop(0)
            placed.append(image_of(item) if piece == "<image>" else _video_of(item))
            parts.append(placed[-1])
        message["content"] = parts

    if left["<video>"]:
        raise EnvError(
            f"the request has {len(videos)} videos; write <video> in its messages at the place of "
            "each"
        )
    return placed


def _video_of(value: Any) -> Any:
    """Return a video of a request as a part of a message: its frames, or an
    object that holds them."""
    if isinstance(value, (Video, VideoRef)):
        return value
    if isinstance(value, (str, bytes, Path)):
        raise EnvError(
            "the request has a video file; give its frames, as a list of images: files are not "
            "decoded here"
        )
    if isinstance(value, Mapping):
        return read_part({"type": "video", **value})
    frames = [image_of(frame) if isinstance(frame, (str, Mapping)) else frame for frame in value]
    return Video(frames, fps=FRAMES_PER_SECOND)


def given_image(part: Any) -> Any:
    """Return an image of a row as ms-swift gives it to user code: a path, base64 text, or
    the object of a library."""
    value = part.value if isinstance(part, Image) else part
    if isinstance(value, Path):
        return str(value)
    return b64encode(value).decode("ascii") if isinstance(value, bytes) else value


def _plain_tool(tool: Any) -> Any:
    return tool if "function" in tool else {"type": "function", "function": tool}


def _response(reply: Any, text: str, id: str) -> Any:
    protocol = import_foreign(PROTOCOL)
    logprobs = [{"logprob": logprob} for logprob in reply.logprobs if logprob is not None]
    choice = protocol.ChatCompletionResponseChoice(
        index=0,
        message=protocol.ChatMessage(role="assistant", content=text, tool_calls=None),
        finish_reason=reply.finish,
        logprobs={"content": logprobs} if len(logprobs) == len(reply.ids) else None,
        token_ids=list(reply.ids),
    )
    usage = protocol.UsageInfo(0, len(reply.ids), len(reply.ids))
    return protocol.ChatCompletionResponse(model="", choices=[choice], usage=usage, id=id)

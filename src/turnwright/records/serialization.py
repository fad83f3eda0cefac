"""Serialization of trajectories and journal events as JSON.

`*_row` functions write, `read_*` functions read what they wrote. Two forms of an episode are made
of the same rows:

- events of the journal, which `rollouts/episode_journal.py` composes; `apply_event` applies one to
  a trajectory and `rebuild_trajectories` reads a whole journal;
- one line of `trajectories.jsonl` for each finished episode, with texts of its tokens
  (`trajectory_row`, `read_trajectory`).

The files themselves are in `run_dir.py`.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Protocol

import orjson

from turnwright.errors import TraceError, TurnwrightError
from turnwright.records.run_dir import read_json_lines
from turnwright.types import (
    ROUTES,
    EpisodeKey,
    ExpertRoutes,
    Failure,
    ImageRef,
    Media,
    MediaPlacement,
    Message,
    Origin,
    RowReward,
    SamplingDistribution,
    Span,
    StopReason,
    Task,
    ToolCall,
    Trajectory,
    Turn,
    VideoRef,
)
from turnwright.types.trajectory import is_json

SCHEMA = 1
"""Version of the record format; raised whenever an old reader would misread a new record."""

REWOUND = "rewound"
"""Untrained reason: the environment removed these ids from the context and excluded them from
training."""
INVALID = "invalid_action"
"""Untrained reason: the environment rejected the reply and the model was asked again."""
BANNED = "banned_id"
"""Untrained reason: ids from the first banned id on; a trainer's softmax excludes it."""
NO_LOGPROB = "no_logprob"
"""Untrained reason: the engine returned no logprob, where `missing_logprobs` is `mask`."""

Event = dict[str, Any]
"""An event of a journal; `e` is its kind, `k` the key of its episode."""

_KEY = tuple(field.name for field in fields(EpisodeKey))


def key_row(key: EpisodeKey) -> list[Any]:
    """Return a key as in every event."""
    return [key.phase, key.step, key.task, key.sample, key.attempt]


def span_row(span: Span) -> dict[str, Any]:
    """Return one span as JSON, without empty fields."""
    row: dict[str, Any] = {
        "origin": span.origin,
        "parent": span.parent,
        "start": span.start,
        "ids": span.ids,
    }

    # Of sampled spans.
    if span.logprobs is not None:
        row["logprobs"] = span.logprobs
        row["version"] = span.version
        if span.cache_version is not None:
            row["cache_version"] = span.cache_version
        if span.alternatives:
            row["alternatives"] = span.alternatives
    if span.sampling is not None:
        row["sampling"] = span.sampling.to_dict()

    if span.agent != "main":
        row["agent"] = span.agent
    if span.untrained is not None:
        row["untrained"] = span.untrained
        if span.untrained_from:
            row["untrained_from"] = span.untrained_from

    if span.media:
        row["media"] = [
            {
                "start": block.start,
                "length": block.length,
                "grid": block.grid,
                "compact": block.compact,
                "media": block.media.to_dict(),
            }
            for block in span.media
        ]
    return row


def read_media(part: Mapping[str, Any]) -> Media:
    """Return the media reference of a content part."""
    if part["type"] == "video":
        return VideoRef(
            tuple(_read_image(frame) for frame in part["frames"]),
            tuple(part["times"]),
            part.get("alt"),
        )
    return _read_image(part)


def _read_image(part: Mapping[str, Any]) -> ImageRef:
    return ImageRef(
        part["image"],
        part.get("width", 0),
        part.get("height", 0),
        part.get("max_pixels", 0),
        part.get("alt"),
    )


def message_row(message: Message) -> dict[str, Any]:
    """Return one message in OpenAI's format, with the errors of its calls."""
    row = message.to_dict()
    for number, call in enumerate(message.tool_calls):
        call_row = row["tool_calls"][number]
        if call.error is not None:
            call_row["error"] = call.error
        if call.cause is not None:
            call_row["cause"] = call.cause
        call_row["function"]["arguments"] = _arguments_row(call.arguments)
    if message.calls_in_thinking:
        row["calls_in_thinking"] = message.calls_in_thinking
    return row


def _arguments_row(arguments: Mapping[str, Any]) -> dict[str, Any] | str:
    """Return arguments as an object, or as JSON text where a record cannot hold the values.

    Such values are integers over 64 bits and halves of surrogate pairs. From the text they are read
    back exactly.
    """
    values = dict(arguments)
    try:
        orjson.dumps(values)
    except TypeError:
        try:
            return json.dumps(values)
        except (TypeError, ValueError, RecursionError):
            return values  # made by user code, without a form in JSON
    return values


def read_message(row: Mapping[str, Any]) -> Message:
    """Return the message that `message_row` wrote, media by reference."""
    others = {key: value for key, value in row.items() if key not in ("content", "tool_calls")}
    message = Message.of({**others, "content": ""})
    content = row["content"]
    if not isinstance(content, str):
        content = tuple(
            part["text"] if part["type"] == "text" else read_media(part) for part in content
        )
    return replace(
        message,
        content=content,
        tool_calls=tuple(map(_read_call, row.get("tool_calls", ()))),
        calls_in_thinking=row.get("calls_in_thinking", 0),
    )


def _read_call(row: Mapping[str, Any]) -> ToolCall:
    arguments = row["function"]["arguments"]
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return ToolCall(
        row["function"]["name"], arguments, row.get("id", ""), row.get("error"), row.get("cause")
    )


def turn_row(turn: Turn, *, routes: bool = True) -> dict[str, Any]:
    """Return one turn as JSON.

    `routes` are the experts of its positions, as base64 of compressed bytes.
    """
    row: dict[str, Any] = {
        "agent": turn.agent,
        "prompt": turn.prompt,
        "context": turn.context,
        "spans": turn.spans,
        "parent": turn.parent,
        "messages": [message_row(message) for message in turn.messages],
        "reply": message_row(turn.reply),
        "finish": turn.finish,
        "reward": turn.reward,
        "info": turn.info,
        "retries": turn.retries,
        "generate_s": turn.generate_s,
        "env_s": turn.env_s,
    }

    # What few turns have.
    if turn.cached:
        row["cached"] = turn.cached
    if turn.weights is not None:
        row["weights"] = turn.weights
    if turn.grown is not None:
        row["inserted"] = turn.inserted
        row["kept"] = turn.kept
        row["grown"] = message_row(turn.grown)
    if routes and ROUTES in turn.extras:
        start, reported = turn.extras[ROUTES]
        row["routes"] = _routes_row(start, ExpertRoutes.of(reported))
    return row


def _routes_row(start: int, routes: ExpertRoutes) -> dict[str, Any]:
    # Expert indices hardly repeat: level 1 compresses synthetic ones to 0.80, level 9 to 0.79.
    compressed = zlib.compress(routes.data, 1)
    return {
        "start": start,
        "layers": routes.layers,
        "k": routes.k,
        "width": routes.width,
        "zlib": base64.b64encode(compressed).decode(),
    }


def task_row(task: Task) -> dict[str, Any]:
    """Return one task as JSON."""
    row = {
        "id": task.id,
        "messages": [message_row(message) for message in task.messages],
        "answer": task.answer,
        "info": task.info,
    }
    if task.env:
        row["env"] = task.env
    if task.is_text:
        row["is_text"] = True
    if task.other_columns:
        row["other_columns"] = {
            key: value for key, value in task.other_columns.items() if is_json(value)
        }
    return row


def failure_row(failure: Failure | None) -> dict[str, Any] | None:
    """Return a failure as JSON."""
    if failure is None:
        return None
    row: dict[str, Any] = {
        "type": failure.type,
        "message": failure.message,
        "phase": failure.phase,
        "traceback": failure.traceback,
    }

    if failure.kind:
        row["kind"] = failure.kind
    if failure.place:
        row["place"] = failure.place
    if failure.recovery:
        row["recovery"] = failure.recovery
    if failure.turn >= 0:
        row["turn"] = failure.turn
    return row


def outcome_row(trajectory: Trajectory) -> dict[str, Any]:
    """Return the outcome of an episode as JSON.

    Its fields are in the record of the episode and in the last event of its journal.
    """
    row: dict[str, Any] = {
        "stop": trajectory.stop,
        "reward": trajectory.reward,
        "rewards": trajectory.rewards,
        "error": failure_row(trajectory.error),
        "final": [message_row(message) for message in trajectory.final],
        "metrics": trajectory.metrics,
        "branches": trajectory.branches,
        "wall_s": trajectory.wall_s,
        "reward_s": trajectory.reward_s,
    }

    # What few episodes have.
    if trajectory.row_rewards:
        row["row_rewards"] = [
            [row_reward.reward, row_reward.turns] for row_reward in trajectory.row_rewards
        ]
    if trajectory.agent_rewards:
        row["agent_rewards"] = trajectory.agent_rewards
    if trajectory.agent_groups:
        row["agent_groups"] = trajectory.agent_groups
    if trajectory.failures:
        row["failures"] = [failure_row(failure) for failure in trajectory.failures]
    return row


class IdDecoder(Protocol):
    """Decodes ids to text; renderers implement it."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each id."""


def trajectory_row(trajectory: Trajectory, decoder: IdDecoder) -> dict[str, Any]:
    """Return a line of trajectories.jsonl: the record of an episode, without expert routes.

    `decoder` gives the texts of spans and of sampled tokens.
    """
    span_rows = []
    for span in trajectory.spans:
        # Spans of a record have all of these fields, those of a journal only what is set.
        recorded_span = {"logprobs": None, "version": None} | span_row(span)
        recorded_span["mask"] = int(span.sampled)
        recorded_span["agent"] = span.agent
        recorded_span["text"] = decoder.decode(span.ids)
        if span.sampled:
            recorded_span["tokens"] = decoder.token_texts(span.ids)
        if span.alternatives:
            recorded_span["alternative_tokens"] = [
                decoder.token_texts([id_ for id_, _ in alternatives])
                for alternatives in span.alternatives
            ]
        span_rows.append(recorded_span)

    row = {
        "schema": SCHEMA,
        "key": dict(zip(_KEY, key_row(trajectory.key), strict=True)),
        "task": task_row(trajectory.task),
        **outcome_row(trajectory),
        "template": trajectory.template,
        "spans": span_rows,
        "turns": [turn_row(turn, routes=False) for turn in trajectory.turns],
    }
    if trajectory.failed_turns:
        row["failed_turns"] = [turn_row(turn, routes=False) for turn in trajectory.failed_turns]
    return row


def read_span(row: Mapping[str, Any]) -> Span:
    """Return the span that `span_row` wrote, media by reference."""
    placements = tuple(_read_placement(block) for block in row.get("media", ()))

    logprobs = row.get("logprobs")
    if logprobs is not None:
        logprobs = tuple(logprobs)

    alternatives = tuple(
        tuple((id_, logprob) for id_, logprob in of_id) for of_id in row.get("alternatives", ())
    )
    sampling = None
    if "sampling" in row:
        sampling = SamplingDistribution.from_dict(row["sampling"])

    return Span(
        Origin(row["origin"]),
        tuple(row["ids"]),
        parent=row["parent"],
        start=row["start"],
        logprobs=logprobs,
        version=row.get("version"),
        media=placements,
        agent=row.get("agent", "main"),
        untrained=row.get("untrained"),
        untrained_from=row.get("untrained_from", 0),
        sampling=sampling,
        cache_version=row.get("cache_version"),
        alternatives=alternatives,
    )


def _read_placement(block: Mapping[str, Any]) -> MediaPlacement:
    grid = tuple(tuple(line) for line in block["grid"])
    compact = tuple(block["compact"])
    media = read_media(block["media"])
    return MediaPlacement(media, block["start"], block["length"], grid, compact)


def read_turn(row: Mapping[str, Any]) -> Turn:
    """Return the turn that `turn_row` wrote."""
    # The fields of a row are those of `Turn`: one that `Turn` lacks is an error, not dropped.
    values = dict(row)
    for name in ("reply", "grown"):
        if name in row:
            values[name] = read_message(row[name])
    values["spans"] = tuple(row["spans"])
    values["messages"] = tuple(read_message(message) for message in row["messages"])
    if "weights" in row:
        values["weights"] = tuple(row["weights"])
    if "routes" in row:
        values["extras"] = {ROUTES: _read_routes(values.pop("routes"))}
    return Turn(**values)


def _read_routes(row: Mapping[str, Any]) -> tuple[int, ExpertRoutes]:
    data = zlib.decompress(base64.b64decode(row["zlib"], validate=True))
    return int(row["start"]), ExpertRoutes(data, row["layers"], row["k"], row["width"])


def rebuild_trajectories(
    events: Iterable[Event],
    tasks: Callable[[str], Task | None],
    given_up: Callable[[Trajectory], None] = lambda trajectory: None,
) -> dict[EpisodeKey, Trajectory]:
    """Return the finished episodes of a journal's events.

    Unfinished episodes, and those whose task `tasks` does not find by its id, are dropped.
    `given_up` receives each finished episode that was played again later; the later play counts.

    Raises `TraceError` when an event does not fit those before it.
    """
    running: dict[EpisodeKey, Trajectory] = {}
    finished: dict[EpisodeKey, Trajectory] = {}
    for event in events:
        kind = event.get("e")
        if kind not in ("opened", "turn", "failed_attempt", "closed"):
            continue

        key = EpisodeKey(*event["k"])
        if kind == "opened":
            task = tasks(key.task)
            if task is not None:
                running[key] = Trajectory(task, key, template=event.get("template", ""))
            if key in finished:
                given_up(finished.pop(key))
        elif key in running:
            with reading(event):
                apply_event(running[key], event)
            if kind == "closed":
                finished[key] = running.pop(key)
    return finished


@contextmanager
def reading(event: Event) -> Iterator[None]:
    """Report an error in the data of an event."""
    try:
        yield
    except (IndexError, KeyError, TypeError, ValueError, zlib.error) as error:
        raise TraceError(
            f"the journal of episode {event['k']} has an event that does not fit ({error!r})"
        ) from error


def apply_event(trajectory: Trajectory, event: Event) -> None:
    """Apply one event of an episode, except its first, to its trajectory.

    Raises `TraceError` when a turn is missing before it.
    """
    if event["e"] == "turn" and event["n"] != len(trajectory.turns):
        raise TraceError(
            f"the journal of episode {event['k']} misses turn {len(trajectory.turns)}: the file "
            "was edited"
        )

    # What changed in the turns and spans before this event.
    for number, reward, info, env_s, *retries in event.get("answers", ()):
        turn = trajectory.turns[number]
        turn.reward = reward
        turn.info = info
        turn.env_s = env_s
        turn.retries = sum(retries)
    for number, weights in event.get("weights", ()):
        turn = trajectory.turns[number]
        turn.weights = tuple(weights)
    for number, start, *reason in event.get("rewound", ()):
        span = trajectory.spans[number]
        span.untrained = reason[0] if reason else REWOUND
        span.untrained_from = start

    # What it adds.
    trajectory.spans.extend(read_span(row) for row in event["spans"])
    if event["e"] == "turn":
        trajectory.turns.append(read_turn(event["turn"]))
        return

    # It ends the attempt, or the episode.
    if "retries" in event:
        trajectory.turns[-1].retries = event["retries"]
    if event["e"] == "failed_attempt":
        trajectory.fail_attempt()
        return
    trajectory.stop = StopReason(event["stop"])
    _read_outcome(trajectory, event)


def _read_outcome(trajectory: Trajectory, row: Mapping[str, Any]) -> None:
    """Set what `outcome_row` wrote, except the stop reason."""
    trajectory.reward = row["reward"]
    trajectory.rewards = row["rewards"]
    trajectory.row_rewards = [
        RowReward(reward, tuple(turns)) for reward, turns in row.get("row_rewards", ())
    ]
    trajectory.agent_rewards = row.get("agent_rewards", {})
    trajectory.agent_groups = row.get("agent_groups", {})
    trajectory.error = Failure(**row["error"]) if row["error"] else None
    trajectory.final = tuple(read_message(message) for message in row["final"])
    trajectory.metrics = row["metrics"]
    trajectory.branches = row["branches"]
    trajectory.wall_s = row["wall_s"]
    trajectory.reward_s = row.get("reward_s", 0.0)
    trajectory.failures = [Failure(**failure) for failure in row.get("failures", ())]


def read_trajectory(row: Mapping[str, Any]) -> Trajectory:
    """Return the trajectory that `trajectory_row` wrote, without engine extras.

    Raises `TraceError` for any other record.
    """
    if row.get("schema") != SCHEMA:
        raise TraceError(f"a record of schema {row.get('schema')!r}; this version reads {SCHEMA}")
    try:
        key = EpisodeKey(**{name: row["key"][name] for name in _KEY})
        spans = [read_span(span) for span in row["spans"]]
        turns = [read_turn(turn) for turn in row["turns"]]
        task = read_task(row["task"])
        trajectory = Trajectory(task, key, spans, turns, template=row.get("template", ""))
        trajectory.stop = StopReason(row["stop"]) if row["stop"] else None
        _read_outcome(trajectory, row)

        hash(key)  # a key is looked up, so its values must not be lists
        _check_parents("span", [span.parent for span in spans])
        _check_parents("turn", [turn.parent for turn in turns])
    except Exception as error:  # records may come from anyone, and have any shape
        raise TraceError(f"an incomplete record ({type(error).__name__}: {error})") from error
    return trajectory


def _check_parents(name: str, parents: Sequence[Any]) -> None:
    """Raise `ValueError` for a parent that is not before its row.

    Paths to the root would have no end.
    """
    for number, parent in enumerate(parents):
        if type(parent) is not int or not -1 <= parent < number:
            raise ValueError(f"{name} {number} has the parent {repr(parent)[:40]}")


@contextmanager
def using(run: Path, trajectory: Trajectory) -> Iterator[None]:
    """Report an error in what is made of a record.

    Such a record has the fields of one, with values that do not fit together.
    """
    try:
        yield
    except (TurnwrightError, OSError):
        raise
    except Exception as error:
        name = trajectory.key.label
        why = f"the record of {name:.200} does not fit together ({type(error).__name__}: {error})"
        raise TraceError(f"{run / 'trajectories.jsonl'}: {why}") from error


def read_task(row: Mapping[str, Any]) -> Task:
    """Return the task of a record, without images that only its environment has."""
    return Task(
        tuple(read_message(message) for message in row["messages"]),
        id=row["id"],
        answer=row["answer"],
        info=row.get("info") or {},
        env=row.get("env") or "",
        other_columns=row.get("other_columns"),
        is_text=bool(row.get("is_text")),
    )


def read_trajectories(run: Path) -> Iterator[Trajectory]:
    """Yield the finished trajectories of a run, in file order.

    Raises `TraceError` if there are none, or a line is not a record.

    Example::

        for trajectory in read_trajectories(Path("runs/first")):
            print(trajectory.reward, trajectory.final_text)
    """
    path = run / "trajectories.jsonl"
    if not path.is_file():
        raise TraceError(
            f"{path}: is not there; name the directory of a run that has played episodes"
        )
    for number, row in enumerate(read_json_lines(path), 1):
        try:
            yield read_trajectory(row)
        except TraceError as error:
            raise TraceError(f"{path}, line {number}: {error}") from error


def read_tasks(run: Path) -> dict[str, Task]:
    """Return the tasks of a run's finished trajectories, by id; empty if there is no such file."""
    tasks: dict[str, Task] = {}
    for number, row in enumerate(read_json_lines(run / "trajectories.jsonl"), 1):
        try:
            task = row["task"]
            if task["id"] not in tasks:
                tasks[task["id"]] = read_task(task)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise TraceError(
                f"{run / 'trajectories.jsonl'}, line {number}: a task that cannot be read "
                f"({error!r})"
            ) from error
    return tasks

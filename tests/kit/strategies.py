"""Hypothesis strategies for what episodes leave behind, shared by all test folders."""

from __future__ import annotations

from hypothesis import strategies as st

from turnwright.types import EpisodeKey, Failure, Group, Origin, Span, StopReason, Task, Trajectory

AGENTS = ("main", "planner", "worker")
REASONS = ("failed_attempt", "rewound", "stale")
FAILURES = tuple(reason for reason in StopReason if reason.failed)
ENDINGS = tuple(reason for reason in StopReason if not reason.failed)


@st.composite
def forests(
    draw: st.DrawFn,
    *,
    vocabulary: int = 50,
    max_spans: int = 9,
    sampled_roots: bool = False,
    missing_logprobs: bool = False,
    untrained: bool = True,
) -> list[Span]:
    """Spans of one trajectory: several roots, branches that cut their parent's tail or
    reach above it, empty spans.

    Ids are drawn at random, so they are not what a tokenizer would make of their text.

    Args:
        sampled_roots: whether a path may begin with a sampled id, which nothing predicts.
        missing_logprobs: whether a sampled id may lack its logprob.
        untrained: whether sampled spans may carry a reason for weight 0.
    """
    spans: list[Span] = []
    for _ in range(draw(st.integers(1, max_spans))):
        root = not spans or draw(st.integers(0, 9)) == 0
        parent = -1 if root else draw(st.integers(0, len(spans) - 1))
        end = 0 if root else spans[parent].end
        # Nearly always an append; sometimes a rewrite from some position on, but
        # never of a root's first id.
        rewrite = not root and end > 1 and draw(st.integers(0, 3)) == 0
        start = draw(st.integers(1, end - 1)) if rewrite else end
        sampled = draw(st.booleans()) and (start > 0 or sampled_roots)
        ids = draw(st.lists(st.integers(0, vocabulary - 1), min_size=0 if start else 1, max_size=6))
        agent = spans[parent].agent if not root else draw(st.sampled_from(AGENTS))
        if not sampled:
            origin = (
                Origin.PROMPT
                if root
                else draw(st.sampled_from((Origin.ENV, Origin.TEMPLATE, Origin.PROMPT)))
            )
            spans.append(Span(origin, ids, parent, start, agent=agent))
            continue
        logprob = st.floats(-9.0, -0.01)
        logprobs = draw(
            st.lists(
                st.none() | logprob if missing_logprobs else logprob,
                min_size=len(ids),
                max_size=len(ids),
            )
        )
        why = draw(st.sampled_from(REASONS)) if untrained and draw(st.integers(0, 5)) == 0 else None
        version = draw(st.integers(0, 3))
        spans.append(
            Span(Origin.MODEL, ids, parent, start, logprobs, version, agent=agent, untrained=why)
        )
    return spans


@st.composite
def trajectories(
    draw: st.DrawFn,
    *,
    task: str = "task",
    sample: int = 0,
    vocabulary: int = 50,
    max_spans: int = 9,
    failures: bool = True,
    sampled_roots: bool = False,
    missing_logprobs: bool = False,
    untrained: bool = True,
) -> Trajectory:
    """One trajectory over a random forest: finished with a reward, or
    failed, or without a reward."""
    spans = draw(
        forests(
            vocabulary=vocabulary,
            max_spans=max_spans,
            sampled_roots=sampled_roots,
            missing_logprobs=missing_logprobs,
            untrained=untrained,
        )
    )
    trajectory = Trajectory(Task(task, id=task), EpisodeKey("train", 0, task, sample), spans)
    kind = (
        draw(st.sampled_from(("done", "done", "done", "failed", "unrewarded")))
        if failures
        else "done"
    )
    if kind == "failed":
        trajectory.stop = draw(st.sampled_from(FAILURES))
        trajectory.error = Failure("RuntimeError", "broke", "step")
        # What a world paid before it broke is there, and must not be used.
        trajectory.reward = draw(st.none() | st.just(1.0))
    else:
        trajectory.stop = draw(st.sampled_from(ENDINGS))
        trajectory.reward = (
            None if kind == "unrewarded" else draw(st.sampled_from((0.0, 0.25, 1.0)))
        )
    return trajectory


@st.composite
def groups(
    draw: st.DrawFn, *, max_groups: int = 3, max_size: int = 4, **settings: bool | int
) -> list[Group]:
    """Groups of uneven sizes, empty ones too; `settings` as for `trajectories`."""
    made = []
    for index in range(draw(st.integers(1, max_groups))):
        task = f"task-{index}"
        size = draw(st.integers(0, max_size))
        made.append(
            Group(
                Task(task, id=task),
                [
                    draw(trajectories(task=task, sample=sample, **settings))
                    for sample in range(size)
                ],  # type: ignore[arg-type]
            )
        )
    return made

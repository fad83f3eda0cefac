"""What becomes of sampled ids for which an engine gave no logprob, where it was allowed by name to give none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from turnwise.engine import Generation
from turnwise.rollout.tally import add_counts
from turnwise.trace.record import NO_LOGPROB
from turnwise.types import Origin, SamplingDistribution, Span, Trajectory


def reply_spans(
    generation: Generation, trajectory: Trajectory, start: int, agent: str, sampling: SamplingDistribution | None = None
) -> Sequence[Span]:
    """A reply as spans whose ids share a fate, in order; their parents are for the caller to set.

    With `mask`, ids without a logprob are spans of their own, untrained; otherwise the reply is one span. Either way the ids
    without one are counted in the episode's metrics, as `logprobs_masked` or `logprobs_recomputed`.

    Args:
        start: how many ids stand before the reply on its path.
        sampling: distribution that the reply was sampled from.
    """
    ids, logprobs = tuple(generation.ids), tuple(generation.logprobs)
    if None not in logprobs:
        return (Span(Origin.MODEL, ids, -1, start, logprobs, generation.version, (), agent, sampling=sampling),)
    spans = []
    for begin, end, untrained in _runs(generation, trajectory):
        span = Span(Origin.MODEL, ids[begin:end], -1, start + begin, logprobs[begin:end], generation.version, (), agent)
        span.untrained, span.sampling = untrained, sampling
        spans.append(span)
    return spans


def _runs(generation: Generation, trajectory: Trajectory) -> Iterator[tuple[int, int, str | None]]:
    """Where runs of ids that share a fate begin and end, and why they are not trained, in a reply that lacks logprobs."""
    lost = [logprob is None for logprob in generation.logprobs]
    mask = generation.missing_logprobs == "mask"
    add_counts(trajectory, "logprobs_masked" if mask else "logprobs_recomputed", by=sum(lost))
    if not mask:
        yield 0, len(lost), None
        return
    begin = 0
    for gone, run in groupby(lost):
        end = begin + sum(1 for _ in run)
        yield begin, end, NO_LOGPROB if gone else None
        begin = end

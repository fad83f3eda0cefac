"""Stop texts: where a reply ends by what it says, found in ids as they are sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from turnwise.errors import UsageError

Decode = Callable[[Sequence[int]], str]


class StopText:
    """Some texts, the first of which to be complete ends a reply, and how to find them in ids.

    A text may begin and end inside tokens, and may be spread over any number of them, bytes of one character included. What
    was sampled stays as it is: ids are never cut inside, nothing is added.

    Example::

        stop = StopText(["</search>"], renderer.decode)
        while not stop.ends(ids):
            ids.append(sample())
    """

    __slots__ = ("_before", "_decode", "_last", "_may_end", "_most", "texts")

    def __init__(self, texts: Sequence[str], decode: Decode) -> None:
        """
        Args:
            texts: as they are decoded; a control token's text stands for the token too.
            decode: the text of ids, of the model that samples.

        Raises:
            UsageError: for no text, an empty one, or one that no reply can be seen to hold.
        """
        self.texts = (texts,) if isinstance(texts, str) else tuple(texts)
        if not self.texts:
            raise UsageError("stop texts: there is none; leave stop out instead")
        for text in self.texts:
            if not isinstance(text, str) or not text or "\ufffd" in text:
                raise UsageError(f"stop text {text!r}: write a text that replies hold, such as '</search>'")
        self._decode = decode
        self._before: tuple[int, ...] = ()
        self._most = max(len(text.encode("utf-8", "replace")) for text in self.texts)
        # A printable ASCII character is decoded from its own byte in whatever company; others have to be looked for.
        last = {text[-1] for text in self.texts}
        self._last = last if all("!" <= char <= "~" for char in last) else None
        self._may_end: dict[int, bool] = {}

    def continued_after(self, ids: Sequence[int]) -> StopText:
        """The same for ids that go on behind these, of one reply (an aborted call, continued)."""
        other = object.__new__(StopText)
        other.texts, other._decode, other._most = self.texts, self._decode, self._most
        other._last, other._may_end = self._last, self._may_end
        other._before = (*self._before, *ids)
        return other

    def completes(self, ids: Sequence[int]) -> bool:
        """Whether the last of the ids completes a text, where none was complete before it."""
        return bool(ids) and self._ends(ids, len(ids))

    def first_completion(self, ids: Sequence[int]) -> int:
        """How many of the ids it takes to complete a text; 0 where none is complete."""
        return next((count for count in range(1, len(ids) + 1) if self._ends(ids, count)), 0)

    def _ends(self, ids: Sequence[int], count: int) -> bool:
        if not self._can_end(ids[count - 1]):
            return False
        window = self._most + 2
        while True:
            missing = window - count
            tail = [*(self._before[-missing:] if missing > 0 else ()), *ids[max(0, count - window) : count]]
            said = self._decode(tail)
            if any(text in said for text in self.texts):
                return True
            # Ids that say nothing by themselves let a text begin further back than one id per byte.
            if len(tail) < window or len(self._decode(tail[1:-1])) >= self._most:
                return False
            window *= 2

    def cut(self, text: str) -> str:
        """A text up to right behind the stop text that is complete first; all of it where there is none."""
        ends = [text.index(stop) + len(stop) for stop in self.texts if stop in text]
        return text[: min(ends)] if ends else text

    def _can_end(self, last: int) -> bool:
        """Whether a text may end in this id, by its last character."""
        if self._last is None:
            return True
        known = self._may_end.get(last)
        if known is None:
            said = self._decode([last])
            known = self._may_end[last] = any(char in said for char in self._last)
        return known

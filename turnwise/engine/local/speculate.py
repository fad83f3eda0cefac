"""Speculative decoding by look-up: what followed the last ids of a context before is drafted to follow them again.

A pass feeds the drafted ids behind the last one, as rows of a prompt are fed, and so has the distribution behind each. Every
position is then drawn from its own distribution with its own noise, (seed, position), as without drafts; a row counts while
the ids before it are the drafted ones. So nothing is accepted or rejected by chance of its own: what is drawn is what would
have been drawn, and a draft decides only how many ids one pass draws. The look-up is that of Saxena's prompt look-up decoding
(2023); the check of a draft in one pass is Leviathan et al. (2023), for a draft without a distribution of its own.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from turnwise.engine.base import Request

LENGTHS = (3, 2)
"""How many last ids are looked for; longer ones first, since what followed them is the better guess."""


class Drafter:
    """Drafts for one reply.

    Args:
        prompt: the ids before the reply.
        most: most ids of one draft; at least 1.
    """

    def __init__(self, prompt: Sequence[int], most: int) -> None:
        self._ids = list(prompt)
        self._prompt = len(self._ids)
        self._most = most
        self._reach = most
        self._known = min(LENGTHS)
        """Positions before this one are in `_behind`."""
        self._behind: dict[tuple[int, ...], int] = {}
        """Some ids in a row -> the position behind the last place where they stand, itself not the end."""
        self.open: list[int] = []
        """What was drafted and is not told yet."""
        self.drafted = 0
        """Ids drafted so far; `accepted` of them were drawn."""
        self.accepted = 0

    def propose(self, reply: Sequence[int], room: int, barred: Sequence[Container[int]] = ()) -> list[int]:
        """What may follow a reply, kept as `open` until `told`.

        Args:
            reply: its ids so far; a longer one each time.
            room: most ids.
            barred: a draft ends before an id that is in one of these.
        """
        self._ids += reply[len(self._ids) - self._prompt :]
        self._learn()
        draft: list[int] = []
        at, ids = self._place(), self._ids
        if at is not None:
            for step in range(min(room, self._reach)):
                # Behind the end the draft goes on with itself: what repeats every few ids is drafted for many.
                found = ids[at + step] if at + step < len(ids) else draft[at + step - len(ids)]
                if any(found in some for some in barred):
                    break
                draft.append(found)
        self.open = draft
        return draft

    def record_accepted(self, accepted: int) -> None:
        """How many of the last draft were drawn. Drafts get shorter where they are wrong and longer where they are right."""
        count, self.open = len(self.open), []
        if not count:
            return
        self.drafted += count
        self.accepted += accepted
        if accepted == count:
            self._reach = min(self._most, 2 * self._reach)
        elif 2 * accepted < count:
            self._reach = max(1, self._reach // 2)

    def stop(self) -> None:
        """Draft no more."""
        self._most = self._reach = 0

    def _learn(self) -> None:
        """Take up the places of what stands in the context, its end left out."""
        ids, behind = self._ids, self._behind
        for at in range(self._known, len(ids)):
            for length in LENGTHS:
                if at >= length:
                    behind[tuple(ids[at - length : at])] = at
        self._known = max(self._known, len(ids))

    def _place(self) -> int | None:
        """Behind which position the last ids stood before."""
        for length in LENGTHS:
            found = self._behind.get(tuple(self._ids[-length:]))
            if found is not None:
                return found
        return None


def excluded_from_drafts(request: Request) -> tuple[Container[int], ...]:
    """Ids that no draft of a reply holds: those never drawn, and those behind which nothing is."""
    return request.banned_ids, request.stop_ids

"""Names of draws: what differs has numbers of its own, and evaluations share theirs."""

from dataclasses import replace

from turnwright.types import EpisodeKey
from turnwright.types.seeds import episode_seed

KEY = EpisodeKey("train", 3, "t", 1)


def test_every_part_of_a_key_has_numbers_of_its_own():
    others = [
        replace(KEY, phase="gate"),
        replace(KEY, step=4),
        replace(KEY, task="u"),
        replace(KEY, sample=2),
        replace(KEY, attempt=1),
        replace(KEY, phase="eval-before-sampled"),
    ]
    assert len({episode_seed(0, key) for key in (KEY, *others)} | {episode_seed(1, KEY)}) == 8


def test_evaluations_of_a_run_draw_the_same_numbers():
    before, after = (
        EpisodeKey("eval-before-sampled", 0, "t", 1),
        EpisodeKey("eval-after-sampled", 80, "t", 1),
    )
    assert (
        episode_seed(5, before)
        == episode_seed(5, after)
        == episode_seed(5, replace(before, phase="eval-sampled"))
    )
    assert episode_seed(5, before) != episode_seed(5, replace(after, sample=2))
    assert episode_seed(5, before) != episode_seed(6, after)

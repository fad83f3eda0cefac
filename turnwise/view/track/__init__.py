"""Trackers: figures of a run sent to trackio, wandb, tensorboard or one's own, by processes that training never waits for."""

from turnwise.view.track.base import TRACKERS, Tracker
from turnwise.view.track.start import Followers, follow_once

__all__ = ["TRACKERS", "Followers", "Tracker", "follow_once"]

"""Trackers: figures of a run sent to trackio, wandb, tensorboard or one's own, by processes that training never waits for."""

from turnwise.view.track.base import TRACKERS, Tracker
from turnwise.view.track.start import TrackerProcesses, follow_once

__all__ = ["TRACKERS", "Tracker", "TrackerProcesses", "follow_once"]

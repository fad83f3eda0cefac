"""The viewer of a run: a page on loopback, or one file that can be sent."""

"""The loop run again against what was recorded."""

"""What an episode is worth: reward functions, judges, and where they run."""

"""verl: its tools, interactions, agent loops and rewards, rollouts for its trainer,
and its launch scripts."""

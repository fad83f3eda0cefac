"""slime and Miles: their agent, reward and filter functions, rollouts for their trainers, and
their launch scripts."""

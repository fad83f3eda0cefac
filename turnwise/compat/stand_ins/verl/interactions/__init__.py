"""Interface of verl 0.9.1 that tools, interactions and rewards are written against."""

"""User code of other frameworks, run unchanged: one module for each, found by `turnwright.envs.foreign`."""

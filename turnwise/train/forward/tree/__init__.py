"""Token trees: what rows share at their beginnings is computed once."""

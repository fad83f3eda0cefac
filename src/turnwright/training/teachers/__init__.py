"""Teachers: models whose probabilities of the sampled ids are a signal, beside rewards or alone."""

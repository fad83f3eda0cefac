"""Functions that a model may call: their schemas, their lifetime, what comes of a call."""

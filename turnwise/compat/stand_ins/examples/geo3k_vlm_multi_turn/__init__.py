"""Names that user code imports from the examples of slime and Miles."""

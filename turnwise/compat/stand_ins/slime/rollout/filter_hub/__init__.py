"""Names that user code imports from slime."""

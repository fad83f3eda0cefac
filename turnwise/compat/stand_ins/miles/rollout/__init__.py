"""Names that user code imports from Miles."""

"""Names of release 3.6."""

"""Interface of skyrl 0.3.0 that generators are written against."""

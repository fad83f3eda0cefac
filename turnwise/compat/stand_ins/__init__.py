"""Interfaces of other frameworks, importable by user code under their names where the framework is not installed."""

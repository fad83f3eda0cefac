"""Modules of verl that are not released as stable."""

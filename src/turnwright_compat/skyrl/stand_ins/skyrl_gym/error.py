"""Exceptions of the registry."""


class Error(Exception):
    """Unknown environment id."""


class RegistrationError(Error):
    """Id that is registered already."""

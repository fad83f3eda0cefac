"""The version, which modules below `turnwright` need."""

__version__ = "0.1.0"

"""Functions by path, as slime's."""

from slime.utils.misc import SingletonMeta, load_function

__all__ = ["SingletonMeta", "load_function"]

"""Interface of skyrl-gym 0.4.0 that environments are written against."""

from . import error
from .core import Env
from .envs.registration import make, pprint_registry, register, registry, spec

from . import envs, tools  # isort: skip

__all__ = ["Env", "envs", "error", "make", "pprint_registry", "register", "registry", "spec", "tools"]

"""Interface of skyrl-gym 0.4.0 that environments are written against."""

from skyrl_gym import error
from skyrl_gym.core import Env
from skyrl_gym.envs.registration import make, pprint_registry, register, registry, spec

from skyrl_gym import envs, tools  # isort: skip

__all__ = ["Env", "envs", "error", "make", "pprint_registry", "register", "registry", "spec", "tools"]

"""User code of other frameworks, run unchanged, and our rollouts inside their trainers: a
folder for each framework.

`adapter.py` of a folder takes the framework's code in, `rollout.py` takes ours out, `convert.py`
reads its launch scripts, and `stand_ins.py` lists what user code imports where the framework is not
installed: the interfaces of verl 0.9.1, skyrl 0.3.0, skyrl-gym 0.4.0, slime, Miles, and ms-swift
4.6.0 with the module names of 3.6. The modules that it names are written in the framework's terms.
"""

from typing import TYPE_CHECKING

from turnwright._lazy import lazy_names

if TYPE_CHECKING:
    from turnwright_compat.openenv.adapter import openenv_env as openenv_env
    from turnwright_compat.verifiers.adapter import verifiers_env as verifiers_env

if not TYPE_CHECKING:
    __all__, __getattr__ = lazy_names(__name__, __file__)

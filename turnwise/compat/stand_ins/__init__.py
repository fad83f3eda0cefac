"""Interfaces of other frameworks, which user code imports under their names where the framework is not installed.

`verl/tools/base_tool.py` is `verl.tools.base_tool` to user code and to the files here. See `turnwise.envs.user_imports`.
"""

from turnwise.envs import user_imports as _user_imports  # noqa: F401  # finds the modules below

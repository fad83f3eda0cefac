"""Interfaces of other frameworks, which user code imports under their names where the framework is not installed.

`verl/tools/base_tool.py` is `verl.tools.base_tool` to user code and to the files here. See `turnwright.envs.user_imports`.
The interfaces are of verl 0.9.1, skyrl 0.3.0, skyrl-gym 0.4.0, slime, Miles, and ms-swift 4.6.0 with the module names of 3.6.
"""

from turnwright.envs import user_imports as _user_imports  # noqa: F401  # finds the modules below

SAME = {
    "miles": "slime",
    "examples.geo3k_vlm": "examples",
    "examples.geo3k_vlm.multi_turn": "examples.geo3k_vlm_multi_turn",
    "swift.plugin.env": "swift.rollout.gym_env",
    "swift.plugin.multi_turn": "swift.rollout.multi_turn",
    "swift.plugin.orm": "swift.rewards.orm",
    "swift.plugin.rm_plugin": "swift.rewards.rm_plugin",
}
"""Modules whose names another module has, for which there is no file here, and so for the modules below them."""

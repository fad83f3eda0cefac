"""verl: tools (`BaseTool`, `@function_tool`, MCP), interactions and `compute_score` of users,
without its agent loop; and agent loops of users (`AgentLoopBase`).

`adapt` decides what a recipe names, and reads `[env.args]`, whose names are those of verl's
configuration. The episodes with tools are in `tools.py`, those of an agent loop in
`agent_loop.py`. What user code imports of verl is in `stand_ins.py`; its launch scripts are
converted in `convert.py`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from turnwright.envs.foreign import ForeignObject, Framework, import_object, refuse_faithful
from turnwright.envs.resolve import load_named
from turnwright.envs.tools.mcp import McpTools, mcp_tools
from turnwright.envs.tools.results import ResultLimit
from turnwright.envs.tools.stateful import parse_tools
from turnwright.envs.tools.tool import Tool
from turnwright.envs.tools.tool_schema import ToolSignature, nullable_parameters
from turnwright.envs.user_code import load_user_module
from turnwright.envs.user_imports import loaded_foreign
from turnwright.errors import ConfigError, suggest_or_list
from turnwright.files import resolved
from turnwright_compat.common import derives_from
from turnwright_compat.verl.agent_loop import make_agent_function
from turnwright_compat.verl.tools import (
    FunctionSource,
    Interaction,
    Lifetime,
    SharedTool,
    VerlEnv,
    VerlFactory,
    VerlOptions,
    dumped_schema,
)

__all__ = ["FRAMEWORK", "VerlEnv", "VerlFactory"]


class ToolsOfPaths:
    """What `use = "verl:tools"` names: tools and interactions by the paths in `[env.args]`."""


TOOLS = ToolsOfPaths()
BASES = ("BaseTool", "BaseInteraction")
PATHS = ("tool_config_path", "function_tool_path", "interaction_config_path")
KEEPS: Mapping[str, Literal["start", "ends", "end"]] = {
    "left": "end",
    "right": "start",
    "middle": "ends",
}
"""verl names the side that is kept after a cut `left` for the end of the text."""


def adapt(found: ForeignObject) -> Any:
    """Make a factory of tools and interactions (of paths, a YAML file, a class, or a registered
    function), or an agent function of a loop."""
    target = found.target
    args = dict(found.args)
    if derives_from(target, "verl", "AgentLoopBase"):
        return _adapt_loop(found, args)

    if _is_reward(target):
        args = {"reward": target, **args}
        target = TOOLS
    registered = _registered(target)
    if isinstance(target, Path) and target.suffix in (".yaml", ".yml"):
        is_interaction = "interaction" in _yaml(target, found.where)
        key = "interaction_config_path" if is_interaction else "tool_config_path"
        args = {key: str(target.resolve()), **args}
    elif not (
        isinstance(target, ToolsOfPaths)
        or registered is not None
        or any(derives_from(target, "verl", base) for base in BASES)
    ):
        return None

    options = _Arguments(found, args)
    tools: list[Any] = []
    interactions: dict[str, Interaction] = {}
    if registered is not None:
        tools.append(function_tool(registered))
    elif derives_from(target, "verl", "BaseTool"):
        config = options.take_config()
        tools.append(base_tool(target, config, None, options.lifetime, found.where, found.faithful))
    elif derives_from(target, "verl", "BaseInteraction"):
        interaction = _construct(target, found.where, config=options.take_config())
        interactions[interaction.name] = Interaction(interaction)

    tools += options.tools()
    interactions |= options.interactions()
    if not tools and not interactions and args.get("reward") is None:
        raise ConfigError(
            f"{found.where} has no tools; give {' or '.join(PATHS)} under [env.args], or a reward "
            "for one reply"
        )
    return options.factory(tools, interactions)


def _adapt_loop(found: ForeignObject, args: dict[str, Any]) -> Any:
    """Make an agent function of a loop class.

    Paths of tools are ours to read, unless the loop's constructor has a parameter of that name.
    """
    refuse_faithful(found)
    reward = _reward_function(args.pop("reward", None), args.pop("reward_kwargs", None), found)

    parameters = inspect.signature(found.target).parameters
    tool_paths: dict[str, Any] = {}
    for key in ("tool_config_path", "function_tool_path"):
        if key in args and key not in parameters:
            tool_paths[key] = args.pop(key)
    tools = _tools_of_loop(tool_paths, found)
    return make_agent_function(found.target, args, reward, found.where, tools)


class _Arguments:
    """`[env.args]` of an environment, by their names in verl's configuration."""

    known = (
        *PATHS,
        "reward",
        "reward_kwargs",
        "lifetime",
        "max_parallel_calls",
        "max_user_turns",
        "max_tool_response_length",
        "tool_response_truncate_side",
        "system",
    )

    def __init__(self, found: ForeignObject, args: dict[str, Any]) -> None:
        self._found = found
        self._args = args
        self._config_keys: set[str] = set()

        # verl calls `create` and `release` around each call.
        default: Lifetime = "call" if found.faithful else "trajectory"
        self.lifetime: Lifetime = args.get("lifetime") or default
        if self.lifetime not in ("trajectory", "call"):
            raise ConfigError(
                f'{found.where}: lifetime = {self.lifetime!r}; write "trajectory" or "call"'
            )

    def take_config(self) -> dict[str, Any]:
        """Return the arguments that are not ours: the `config` of a class."""
        config = {key: value for key, value in self._args.items() if key not in self.known}
        self._config_keys |= set(config)
        return config

    def tools(self) -> list[Any]:
        """Return the tools of both paths; two with one name are an error."""
        where = self._found.where
        config_path = self.path("tool_config_path")
        functions_path = self.path("function_tool_path")

        tools: list[Any] = []
        if config_path is not None:
            tools = _tools_of_yaml(config_path, self.lifetime, where, self._found.faithful)
        function_tools: list[Tool] = []
        if functions_path is not None:
            entries = _function_tools(functions_path, where)
            function_tools = [function_tool(entry) for entry in entries]
        # Beside sources of tools, a function is a source too, so that it keeps its place.
        tools += map(FunctionSource, function_tools) if tools else function_tools

        file_of_name: dict[str, str] = {}
        for tool in tools:
            is_function = isinstance(tool, (Tool, FunctionSource))
            file = str(functions_path if is_function else config_path)
            for name in (tool.name,) if isinstance(tool, Tool) else tool.names or ():
                if name in file_of_name:
                    raise ConfigError(
                        f"{where}: two tools are called {name!r}, in {file_of_name[name]} and "
                        f"{file}; rename one"
                    )
                file_of_name[name] = file
        return tools

    def interactions(self) -> dict[str, Interaction]:
        """Return the interactions of the path by name."""
        path = self.path("interaction_config_path")
        interactions: dict[str, Interaction] = {}
        if path is None:
            return interactions

        for row in _rows(path, "interaction", self._found.where):
            target = _class(row.get("class_name"), path.parent, f"{path}: interaction")
            class_name = target.__name__.lower()
            name = str(row.get("name") or class_name.removesuffix("interaction") or class_name)
            if name in interactions:
                raise ConfigError(f"{path}: two interactions are called {name!r}; rename one")
            config = {"name": name, **(row.get("config") or {})}
            interactions[name] = Interaction(_construct(target, str(path), config=config))
        return interactions

    def factory(self, tools: Sequence[Any], interactions: Mapping[str, Interaction]) -> VerlFactory:
        """Check the arguments that are left, and make the factory."""
        args = self._args
        where = self._found.where
        faithful = self._found.faithful

        for key in args:
            if key not in self.known and key not in self._config_keys:
                raise ConfigError(
                    f"{where} has no argument {key!r}; {suggest_or_list(key, self.known)}"
                )
        side = args.get("tool_response_truncate_side", "middle")
        if side not in KEEPS:
            raise ConfigError(
                f"{where}: tool_response_truncate_side = {side!r}; "
                f"{suggest_or_list(str(side), KEEPS)}"
            )
        parallel_calls = self._count("max_parallel_calls")
        user_turns = self._count("max_user_turns")
        response_length = self._count("max_tool_response_length")

        cut = ResultLimit(32_768, "start")
        if response_length is not None:
            cut = ResultLimit(response_length, KEEPS[side])
        options = VerlOptions(
            faithful=faithful,
            reward=_reward_function(args.get("reward"), args.get("reward_kwargs"), self._found),
            interactions=dict(interactions),
            max_parallel_calls=parallel_calls or (1 if faithful else None),
            max_user_turns=user_turns,
            response_length=response_length or 256,
            truncate_side=side,
        )
        return VerlFactory(
            system=args.get("system"),
            max_turns=None,
            tasks=None,
            solver=None,
            demonstrator=None,
            single_turn_best=None,
            reward=None,
            kit=parse_tools(tools, None, cut),
            options=options,
        )

    def _count(self, key: str) -> int | None:
        """Return an argument that is an integer of at least 1; None without it."""
        value: int | None = self._args.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(
                f"{self._found.where}: {key} = {value!r}; it is an integer of at least 1, or left "
                "out"
            )
        return value

    def path(self, key: str) -> Path | None:
        """Return the file that an argument names; None without the argument."""
        named = self._args.get(key)
        if named is None:
            return None
        path = resolved(str(named), self._found.base)
        if not path.is_file():
            raise ConfigError(
                f"{self._found.where}: {key} = {str(named)!r}: no such file; check the path"
            )
        return path


def _tools_of_loop(paths: dict[str, Any], found: ForeignObject) -> list[Any]:
    """Return verl's own objects of tools, which a loop calls itself."""
    options = _Arguments(found, paths)
    tools: list[Any] = []
    for source in options.tools():
        if isinstance(source, McpTools):
            raise ConfigError(
                f"{found.where}: an agent loop has no MCP tools here; give native tools and "
                "function tools"
            )
        if isinstance(source, SharedTool):
            tools.append(source.tool)

    functions_path = options.path("function_tool_path")
    if functions_path is not None:
        tools += _function_tools(functions_path, found.where)
    return tools


def _is_reward(target: Any) -> bool:
    """Whether a function takes what verl passes to a reward function by name."""
    if not inspect.isroutine(target):
        return False
    return {"solution_str", "ground_truth"} <= set(inspect.signature(target).parameters)


def _reward_function(named: Any, keywords: Any, found: ForeignObject) -> Callable[..., Any] | None:
    """Return the reward function that `[env.args]` names, with the keywords of `reward_kwargs`."""
    if isinstance(named, str) and named.endswith(".py"):
        named = f"{named}:compute_score"
    function: Callable[..., Any] | None = load_named(named, found, "reward")
    if keywords is None or function is None:
        return function
    if not isinstance(keywords, Mapping):
        raise ConfigError(
            f"{found.where}: reward_kwargs is {type(keywords).__name__}; write a table of keywords"
        )

    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for key in keywords:
        if key not in parameters and not takes_any:
            raise ConfigError(
                f"{found.where}: reward_kwargs: "
                f"{suggest_or_list(key, parameters) or 'the function takes none'}"
            )

    # A judge's function takes the tokenizer of the judge beside its address; here it has none.
    judge = {"reward_model_tokenizer": None} if "reward_router_address" in keywords else {}
    bound = {
        key: value for key, value in {**judge, **keywords}.items() if takes_any or key in parameters
    }
    return partial(function, **bound)


def _yaml(path: Path, where: str) -> Mapping[str, Any]:
    try:
        yaml: Any = importlib.import_module("yaml")
    except ImportError as error:
        raise ConfigError(
            f"{where}: reading {path.name} needs PyYAML; pip install pyyaml"
        ) from error

    try:
        document = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{path}: cannot be read as YAML: {' '.join(str(error).split())}"
        ) from error
    if not isinstance(document, Mapping):
        raise ConfigError(
            f"{path}: holds {type(document).__name__}; write a mapping, tools: [...] or "
            "interaction: [...]"
        )
    return document


def _rows(path: Path, key: str, where: str) -> list[Mapping[str, Any]]:
    rows = _yaml(path, where).get(key)
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise ConfigError(
            f"{path}: {key} is {type(rows).__name__}; write a list, each with class_name and config"
        )
    return rows


def _tools_of_yaml(path: Path, lifetime: Lifetime, where: str, faithful: bool) -> list[Any]:
    tools: list[Any] = []
    for number, row in enumerate(_rows(path, "tools", where)):
        place = f"{path}: tools[{number}]"
        config = row.get("config") or {}
        if not isinstance(config, Mapping):
            raise ConfigError(
                f"{place}: config is {type(config).__name__}; write a mapping, config: {{type: "
                "native}"
            )

        kind = config.get("type", "native")
        if kind == "mcp":
            tools += _mcp(config, path.parent, place)
        elif kind == "native":
            target = _class(row.get("class_name"), path.parent, place)
            if not callable(getattr(target, "execute", None)):
                raise ConfigError(
                    f"{place}: {target.__name__} has no execute; a tool derives from "
                    "verl.tools.base_tool.BaseTool"
                )
            schema = row.get("tool_schema")
            tools.append(base_tool(target, dict(config), schema, lifetime, place, faithful))
        else:
            raise ConfigError(f"{place}: config.type = {kind!r}; write native or mcp")
    return tools


def _class(name: Any, folder: Path, where: str) -> Any:
    """Return a class by its dotted name: from a file beside the YAML file or above it, else
    from an installed module."""
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"{where}: class_name is {name!r}; write module.Class, its file beside the YAML file "
            "or on the path"
        )

    module, _, attribute = name.rpartition(".")
    if module:
        parts = module.split(".")
        candidates = [base.joinpath(*parts) for base in (folder, *folder.parents[:6])]
        candidates.append(folder / parts[-1])
        for candidate in candidates:
            file = candidate.with_suffix(".py")
            if not file.is_file():
                continue
            target = getattr(load_user_module(file, str(file)), attribute, None)
            if target is None:
                raise ConfigError(f"{where}: {file} has no {attribute!r}")
            return target
    return import_object(name, where)


def _construct(target: Any, where: str, **arguments: Any) -> Any:
    try:
        return target(**arguments)
    except Exception as error:
        raise ConfigError(
            f"{where}: {target.__name__} cannot be made: {type(error).__name__}: {error}"
        ) from error


def base_tool(
    target: Any, config: dict[str, Any], schema: Any, lifetime: Lifetime, where: str, faithful: bool
) -> SharedTool:
    """Make the one object of a tool class that serves all episodes of a run."""
    nullable = nullable_properties(schema)
    if schema is not None:
        # The schema's class is of the same verl, installed or ours, as the tool's base class.
        bases = (base.__module__ for base in target.__mro__ if base.__name__ == "BaseTool")
        base_module = next(bases, "verl.tools.base_tool")
        schemas = sys.modules.get(f"{base_module.rpartition('.')[0]}.schemas")
        if schemas is not None:
            validate = schemas.OpenAIFunctionToolSchema.model_validate
            schema = _construct(validate, where, obj=schema)

    tool = _construct(target, where, config=config, tool_schema=schema)
    template = _template(getattr(tool, "tool_schema", None), where, nullable)
    return SharedTool(tool, template, lifetime, faithful)


def nullable_properties(schema: Any) -> frozenset[str]:
    """Return the parameters with OpenAPI's `nullable` in a tool's schema as a file has it; verl's
    objects leave it out."""
    properties = schema
    for key in ("function", "parameters", "properties"):
        properties = properties.get(key) if isinstance(properties, Mapping) else None
    if not isinstance(properties, Mapping):
        return frozenset()

    return frozenset(
        name
        for name, parameter in properties.items()
        if isinstance(parameter, Mapping) and parameter.get("nullable") is True
    )


def _template(schema: Any, where: str, nullable: frozenset[str]) -> Tool:
    """Return the tool as the model sees it; each episode puts a function of its own into it."""
    dumped = dumped_schema(schema)
    if not isinstance(dumped.get("function"), Mapping) or not dumped["function"].get("name"):
        raise ConfigError(
            f"{where}: the tool has no schema; give tool_schema, with function: {{name, "
            "description, parameters}"
        )
    return Tool(_not_bound, ToolSignature(dumped, {}, nullable=nullable), source=where)


def _not_bound() -> None:
    raise RuntimeError("the tool has no instance yet")


def function_tool(entry: Any) -> Tool:
    """Make a tool of a function that `@function_tool` registered.

    verl's schemas leave out `nullable`, which transformers writes for an `Optional` parameter. The
    model reads verl's schema; null is accepted wherever the function takes it.
    """
    signature = ToolSignature(
        dumped_schema(entry.tool_schema), {}, nullable=nullable_parameters(entry.fn)
    )
    return Tool(entry.fn, signature, source=f"{entry.fn.__module__}.{entry.fn.__name__}")


def _entries() -> list[Any]:
    """Return the function tools that files registered, in each verl that some file imported."""
    modules = loaded_foreign("verl.tools.function_tool")
    return [entry for module in modules for entry in module.FUNCTION_TOOL_REGISTRY.values()]


def _registered(target: Any) -> Any:
    """Return the entry of a function that `@function_tool` registered; None for another object."""
    if not callable(target):
        return None
    return next((entry for entry in _entries() if entry.fn is target), None)


def _function_tools(path: Path, where: str) -> tuple[Any, ...]:
    module_name = load_user_module(path, str(path)).__name__
    entries = _tools_of_module(module_name)
    if not entries:
        raise ConfigError(f"{where}: {path} has no @function_tool; decorate a function")
    return entries


@functools.cache
def _tools_of_module(name: str) -> tuple[Any, ...]:
    """Return the function tools of a module in verl's order, by name.

    Cached: a later file may register the same names.
    """
    entries = [entry for entry in _entries() if entry.fn.__module__ == name]
    return tuple(sorted(entries, key=lambda entry: str(entry.name)))


def _mcp(config: Mapping[str, Any], folder: Path, where: str) -> list[McpTools]:
    """Make sources of the MCP servers that a tool's configuration names."""
    settings = config.get("mcp") if isinstance(config.get("mcp"), Mapping) else config
    assert isinstance(settings, Mapping)
    servers_path = settings.get("mcp_servers_config_path")
    if not isinstance(servers_path, str):
        raise ConfigError(
            f"{where}: an MCP tool has config.mcp.mcp_servers_config_path, a JSON file with "
            "mcpServers"
        )

    path = folder / servers_path
    try:
        servers = json.loads(path.read_text("utf-8"))["mcpServers"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{where}: {path} has no mcpServers ({type(error).__name__}: {error})"
        ) from error

    only = list(settings.get("tool_selected_list") or ()) or None
    if only and len(servers) > 1:
        raise ConfigError(
            f"{where}: tool_selected_list with {len(servers)} servers is not clear; write one tool "
            "for each server"
        )
    return [_mcp_server(str(name), server, only, where) for name, server in servers]


def _mcp_server(
    name: str, server: Mapping[str, Any], only: Sequence[str] | None, where: str
) -> McpTools:
    if server.get("command"):
        command = [str(server["command"]), *map(str, server.get("args") or ())]
        return mcp_tools(
            command, name=name, only=only, env=server.get("env"), cwd=server.get("cwd")
        )
    if not server.get("url"):
        raise ConfigError(f"{where}: the MCP server {name!r} has neither command nor url")

    headers = dict(server.get("headers") or {})
    if server.get("auth_token"):
        headers.setdefault("Authorization", f"Bearer {server['auth_token']}")
    return mcp_tools(str(server["url"]), name=name, only=only, headers=headers or None)


def find(name: str) -> Any:
    """Return the target of `verl:name`; None for an unknown one."""
    return TOOLS if name == "tools" else None


FRAMEWORK = Framework("verl", adapt, find, lambda: ("tools",))

"""verl: tools (`BaseTool`, `@function_tool`, MCP), interactions and `compute_score` of users,
without its agent loop; and agent loops of users (`AgentLoopBase`)."""

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
    target, args = found.target, dict(found.args)
    if derives_from(target, "verl", "AgentLoopBase"):
        refuse_faithful(found)
        reward = _reward_function(args.pop("reward", None), args.pop("reward_kwargs", None), found)
        own = inspect.signature(target).parameters
        paths = {key: args.pop(key) for key in PATHS[:2] if key in args and key not in own}
        return make_agent_function(target, args, reward, found.where, _tools_of_loop(paths, found))
    if _is_reward(target):
        args = {"reward": target, **args}
        target = TOOLS
    registered = _registered(target)
    if isinstance(target, Path) and target.suffix in (".yaml", ".yml"):
        key = (
            "interaction_config_path"
            if "interaction" in _yaml(target, found.where)
            else "tool_config_path"
        )
        args = {key: str(target.resolve()), **args}
    elif not (
        isinstance(target, ToolsOfPaths)
        or registered is not None
        or any(map(partial(derives_from, target, "verl"), BASES))
    ):
        return None
    options = _Arguments(found, args)
    tools: list[Any] = []
    interactions: dict[str, Interaction] = {}
    if registered is not None:
        tools.append(function_tool(registered))
    elif derives_from(target, "verl", "BaseTool"):
        tools.append(
            base_tool(
                target, options.take_config(), None, options.lifetime, found.where, found.faithful
            )
        )
    elif derives_from(target, "verl", "BaseInteraction"):
        made = _made(target, found.where, config=options.take_config())
        interactions[made.name] = Interaction(made)
    tools += options.tools()
    interactions |= options.interactions()
    if not tools and not interactions and args.get("reward") is None:
        raise ConfigError(
            f"{found.where} has no tools; give {' or '.join(PATHS)} under [env.args], or a reward "
            "for one reply"
        )
    return options.factory(tools, interactions)


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
        self._found, self._args = found, args
        self.lifetime: Lifetime = args.get("lifetime") or (
            "call" if found.faithful else "trajectory"
        )
        self._taken: set[str] = set()
        if self.lifetime not in ("trajectory", "call"):
            raise ConfigError(
                f'{found.where}: lifetime = {self.lifetime!r}; write "trajectory" or "call"'
            )

    def take_config(self) -> dict[str, Any]:
        """Return the arguments that are not ours: the `config` of a class."""
        config = {key: value for key, value in self._args.items() if key not in self.known}
        self._taken |= set(config)
        return config

    def tools(self) -> list[Any]:
        """Return the tools of both paths; two with one name are an error."""
        where, faithful = self._found.where, self._found.faithful
        native, functions = self.path("tool_config_path"), self.path("function_tool_path")
        tools: list[Any] = (
            [] if native is None else _tools_of_yaml(native, self.lifetime, where, faithful)
        )
        added = (
            []
            if functions is None
            else [function_tool(one) for one in _function_tools(functions, where)]
        )
        tools += map(FunctionSource, added) if tools else added
        names: dict[str, str] = {}
        for tool in tools:
            for name in (tool.name,) if isinstance(tool, Tool) else tool.names or ():
                source = str(functions if isinstance(tool, (Tool, FunctionSource)) else native)
                if name in names:
                    raise ConfigError(
                        f"{where}: two tools are called {name!r}, in {names[name]} and {source}; "
                        "rename one"
                    )
                names[name] = source
        return tools

    def interactions(self) -> dict[str, Interaction]:
        """Return the interactions of the path by name."""
        path, where = self.path("interaction_config_path"), self._found.where
        found: dict[str, Interaction] = {}
        if path is None:
            return found
        for row in _rows(path, "interaction", where):
            target = _class(row.get("class_name"), path.parent, f"{path}: interaction")
            short = target.__name__.lower().removesuffix("interaction")
            name = str(row.get("name") or short or target.__name__.lower())
            if name in found:
                raise ConfigError(f"{path}: two interactions are called {name!r}; rename one")
            found[name] = Interaction(
                _made(target, str(path), config={"name": name, **(row.get("config") or {})})
            )
        return found

    def factory(self, tools: Sequence[Any], interactions: Mapping[str, Interaction]) -> VerlFactory:
        """Check the arguments that are left, and make the factory."""
        args, where, faithful = self._args, self._found.where, self._found.faithful
        for key in args:
            if key not in self.known and key not in self._taken:
                raise ConfigError(
                    f"{where} has no argument {key!r}; {suggest_or_list(key, self.known)}"
                )
        side = args.get("tool_response_truncate_side", "middle")
        if side not in KEEPS:
            raise ConfigError(
                f"{where}: tool_response_truncate_side = {side!r}; "
                f"{suggest_or_list(str(side), KEEPS)}"
            )
        numbers = {
            key: args.get(key)
            for key in ("max_parallel_calls", "max_user_turns", "max_tool_response_length")
        }
        for key, value in numbers.items():
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int) or value < 1
            ):
                raise ConfigError(
                    f"{where}: {key} = {value!r}; it is an integer of at least 1, or left out"
                )
        length = numbers["max_tool_response_length"]
        cut = ResultLimit(32_768, "start") if length is None else ResultLimit(length, KEEPS[side])
        options = VerlOptions(
            faithful=faithful,
            reward=_reward_function(args.get("reward"), args.get("reward_kwargs"), self._found),
            interactions=dict(interactions),
            max_parallel_calls=numbers["max_parallel_calls"] or (1 if faithful else None),
            max_user_turns=numbers["max_user_turns"],
            response_length=length or 256,
            truncate_side=side,
        )
        return VerlFactory(
            args.get("system"),
            None,
            None,
            None,
            None,
            None,
            None,
            parse_tools(tools, None, cut),
            options,
        )

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
    made: list[Any] = []
    for source in options.tools():
        if isinstance(source, McpTools):
            raise ConfigError(
                f"{found.where}: an agent loop has no MCP tools here; give native tools and "
                "function tools"
            )
        made += [source.tool] if isinstance(source, SharedTool) else []
    functions = options.path("function_tool_path")
    return [*made, *(() if functions is None else _function_tools(functions, found.where))]


def _is_reward(target: Any) -> bool:
    """Whether a function takes what verl passes to a reward function by name."""
    if not inspect.isroutine(target):
        return False
    return {"solution_str", "ground_truth"} <= set(inspect.signature(target).parameters)


def _reward_function(named: Any, given: Any, found: ForeignObject) -> Callable[..., Any] | None:
    """Return the reward function that `[env.args]` names, with the keywords of `reward_kwargs`."""
    use = f"{named}:compute_score" if isinstance(named, str) and named.endswith(".py") else named
    function: Callable[..., Any] | None = load_named(use, found, "reward")
    if given is None or function is None:
        return function
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"{found.where}: reward_kwargs is {type(given).__name__}; write a table of keywords"
        )
    # A judge's function takes the tokenizer of the judge beside its address; here it has none.
    judge = {"reward_model_tokenizer": None} if "reward_router_address" in given else {}
    keywords = {**judge, **given}
    parameters = inspect.signature(function).parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    for key in given:
        if key not in parameters and not takes_any:
            raise ConfigError(
                f"{found.where}: reward_kwargs: "
                f"{suggest_or_list(key, parameters) or 'the function takes none'}"
            )
    return partial(
        function,
        **{key: value for key, value in keywords.items() if takes_any or key in parameters},
    )


def _yaml(path: Path, where: str) -> Mapping[str, Any]:
    try:
        yaml: Any = importlib.import_module("yaml")
    except ImportError as error:
        raise ConfigError(
            f"{where}: reading {path.name} needs PyYAML; pip install pyyaml"
        ) from error
    try:
        found = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{path}: cannot be read as YAML: {' '.join(str(error).split())}"
        ) from error
    if not isinstance(found, Mapping):
        raise ConfigError(
            f"{path}: holds {type(found).__name__}; write a mapping, tools: [...] or interaction: "
            "[...]"
        )
    return found


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
            tools.append(
                base_tool(target, dict(config), row.get("tool_schema"), lifetime, place, faithful)
            )
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
    parts = module.split(".") if module else []
    places = [
        *(base.joinpath(*parts) for base in (folder, *folder.parents[:6])),
        *([folder / parts[-1]] if parts else []),
    ]
    for place in places:
        if parts and (file := place.with_suffix(".py")).is_file():
            found = getattr(load_user_module(file, str(file)), attribute, None)
            if found is None:
                raise ConfigError(f"{where}: {file} has no {attribute!r}")
            return found
    return import_object(name, where)


def _made(target: Any, where: str, **arguments: Any) -> Any:
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
        home = next(
            (base.__module__ for base in target.__mro__ if base.__name__ == "BaseTool"),
            "verl.tools.base_tool",
        )
        schemas = sys.modules.get(f"{home.rpartition('.')[0]}.schemas")
        if schemas is not None:
            schema = _made(schemas.OpenAIFunctionToolSchema.model_validate, where, obj=schema)
    made = _made(target, where, config=config, tool_schema=schema)
    return SharedTool(
        made, _template(getattr(made, "tool_schema", None), where, nullable), lifetime, faithful
    )


def nullable_properties(schema: Any) -> frozenset[str]:
    """Return the parameters with OpenAPI's `nullable` in a tool's schema as a file has it; verl's
    objects leave it out."""
    found = schema
    for key in ("function", "parameters", "properties"):
        found = found.get(key) if isinstance(found, Mapping) else None
    properties = found if isinstance(found, Mapping) else {}
    return frozenset(
        key
        for key, inner in properties.items()
        if isinstance(inner, Mapping) and inner.get("nullable") is True
    )


def _template(schema: Any, where: str, nullable: frozenset[str]) -> Tool:
    found = dumped_schema(schema)
    if not isinstance(found.get("function"), Mapping) or not found["function"].get("name"):
        raise ConfigError(
            f"{where}: the tool has no schema; give tool_schema, with function: {{name, "
            "description, parameters}"
        )
    return Tool(_not_bound, ToolSignature(found, {}, nullable=nullable), source=where)


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


def _registries() -> list[dict[str, Any]]:
    """Return the registries of function tools that files registered in: one of each verl
    that some file imported."""
    return [module.FUNCTION_TOOL_REGISTRY for module in loaded_foreign("verl.tools.function_tool")]


def _entries() -> list[Any]:
    return [entry for registry in _registries() for entry in registry.values()]


def _registered(target: Any) -> Any:
    return (
        next((entry for entry in _entries() if entry.fn is target), None)
        if callable(target)
        else None
    )


def _function_tools(path: Path, where: str) -> tuple[Any, ...]:
    name = load_user_module(path, str(path)).__name__
    found = _tools_of_module(name)
    if not found:
        raise ConfigError(f"{where}: {path} has no @function_tool; decorate a function")
    return found


@functools.cache
def _tools_of_module(name: str) -> tuple[Any, ...]:
    """Return the function tools of a module in verl's order, by name.

    Cached: a later file may register the same names.
    """
    entries = [entry for entry in _entries() if entry.fn.__module__ == name]
    return tuple(sorted(entries, key=lambda entry: str(entry.name)))


def _mcp(config: Mapping[str, Any], folder: Path, where: str) -> list[McpTools]:
    """Make sources of the MCP servers that a tool's configuration names."""
    given = config.get("mcp") if isinstance(config.get("mcp"), Mapping) else config
    assert isinstance(given, Mapping)
    named = given.get("mcp_servers_config_path")
    if not isinstance(named, str):
        raise ConfigError(
            f"{where}: an MCP tool has config.mcp.mcp_servers_config_path, a JSON file with "
            "mcpServers"
        )
    path = folder / named
    try:
        servers = json.loads(path.read_text("utf-8"))["mcpServers"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{where}: {path} has no mcpServers ({type(error).__name__}: {error})"
        ) from error
    only = list(given.get("tool_selected_list") or ()) or None
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

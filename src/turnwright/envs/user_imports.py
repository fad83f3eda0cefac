"""Imports of user code: modules around its file, and stand-ins for frameworks that are not
installed.

`import_for_user` is the `__import__` of user code, which `prepare` gives a module: it takes a
module beside the file, else an installed one, else our stand-in, else one around the file.
`import_foreign` imports for our adapters in the same way.

The modules found here have private names in `sys.modules`, so that files of one name do not
collide, and no library takes a stand-in for an installed framework. User code sees them through its
own `__import__`, for as long as it lives. `_PrivateFinder` finds them by these names.
"""

from __future__ import annotations

import atexit
import builtins
import functools
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from turnwright import plugins
from turnwright.envs.thread_alarm import SignalOfUserCode

STAND_INS = "turnwright.envs.stand_ins"
"""Package of the stand-ins; one has the name of its module below it."""

PACKAGE = "turnwright_package_"
"""Prefix of the names of private packages, each of which has a folder of user code."""

_PROJECT = (".git", "pyproject.toml", "setup.py", "setup.cfg")
"""What the root of a project has."""

_HOMES: dict[Path, None] = {}
"""Folders of the files that recipes name, in the order of their first use."""

_ON_PATH: dict[str, set[Path]] = {}
"""Packages of users that are importable by themselves, with entries of `sys.path`: they get the
imports of user code too."""


def import_foreign(name: str, near: Path | None = None, attribute: str = "") -> ModuleType:
    """Import a module of a framework, else our stand-in, else one around `near` or around a file
    that is loaded.

    A module directly beside one of those files comes first, as for an import statement of the file.
    Of a stand-in without `attribute` and a module around a file it is the latter, which is newer.

    Raises:
        ImportError: the framework's, where none of them has it.
    """
    is_new = _top(name) not in sys.modules
    if _comes_first(name):
        stand_in = importlib.import_module(f"{STAND_INS}.{name}")
        if not attribute or _offers(stand_in, name, attribute):
            return stand_in
    if is_new:
        package = _beside(name, near)
        if package is not None:
            return importlib.import_module(f"{package}.{name}")
        _adopt_around(name, near)

    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not _lacks(error, name):
            raise
        _forget_folder(name, is_new)
        module = _import_in_place(name, near, attribute)
        if module is None:
            raise
        return module


def _import_in_place(name: str, near: Path | None, attribute: str) -> ModuleType | None:
    """Import what takes the place of a module that is not installed; None where nothing does."""
    stand_in = stand_in_of(name)
    if stand_in is not None and (not attribute or _offers(stand_in, name, attribute)):
        return stand_in

    # The first module around a file, else the stand-in although it lacks the attribute.
    packages = [_around_file(file, name) for file in _files_around(near)]
    for package in packages:
        if package is not None:
            return importlib.import_module(f"{package}.{name}")
    return stand_in


def _files_around(near: Path | None) -> list[Path]:
    """Return the files around which modules are looked for: `near`, and one in each home."""
    files = [] if near is None else [near]
    return [*files, *(home / "_" for home in _HOMES)]


def _beside(name: str, near: Path | None) -> str | None:
    """Return the private package of the folder of a user's file that has a module, whose name is
    not a framework's."""
    top = _top(name)
    if top in sys.stdlib_module_names or _has_stand_in(top):
        return None
    folders = [] if near is None else [near.parent]
    for folder in (*folders, *_HOMES):
        if _has_module(folder, top):
            return _register(folder)
    return None


def _has_module(folder: Path, top: str) -> bool:
    """Return whether a folder has the file or the package of a name."""
    return (folder / f"{top}.py").is_file() or (folder / top / "__init__.py").is_file()


def _adopt_around(name: str, near: Path | None) -> None:
    """Adopt the package of a module that is around a user's file and on `sys.path`."""
    for file in _files_around(near):
        package = _around_file(file, name)
        if package is None:
            continue
        folder = Path(sys.modules[package].__path__[0])
        if folder in _installed():
            _adopt(folder, _top(name))
            return


def _adopt(folder: Path, top: str) -> None:
    """Give the modules of a package on `sys.path` the imports of user code, when they are
    loaded."""
    not_users = ("turnwright", *plugins.PACKAGES, *_stand_ins().ALWAYS)
    if folder.name not in ("site-packages", "dist-packages") and top not in not_users:
        _ON_PATH.setdefault(top, set()).add(folder)


def stand_in_of(name: str) -> ModuleType | None:
    """Return our stand-in for a module of a framework; None where there is none."""
    if not _has_stand_in(name):
        return None
    return importlib.import_module(f"{STAND_INS}.{name}")


def loaded_foreign(name: str) -> list[ModuleType]:
    """Return what something imported already of a framework's module: the installed one, its
    stand-in, those of trees."""
    suffix = f".{name}"
    modules = []
    for full_name, module in list(sys.modules.items()):
        if full_name == name or (full_name.endswith(suffix) and public_name(full_name) == name):
            modules.append(module)
    return modules


REGISTRIES = (
    ("skyrl_gym.envs.registration", "registry"),
    ("verl.tools.function_tool", "FUNCTION_TOOL_REGISTRY"),
    ("verl.experimental.agent_loop.agent_loop", "LOOPS"),
    ("verl.experimental.agent_loop.agent_loop", "_agent_loop_registry"),
    ("swift.rollout.multi_turn", "multi_turns"),
    ("swift.rollout.gym_env", "envs"),
    ("swift.rewards.orm", "orms"),
    ("swift.rewards.prm", "prms"),
    ("swift.rewards.rm_plugin", "rm_plugins"),
    ("swift.loss_scale", "loss_scale_map"),
    ("swift.loss_scale.mapping", "loss_scale_map"),
)
"""Modules of frameworks with the dicts in which user code registers what it defines."""


@contextmanager
def registrations_of_a_load(source: str) -> Iterator[None]:
    """Undo what a file registered if loading it fails, so that a second try neither finds half of
    it nor collides with it.

    `source` is the file's text: the registries of frameworks that it imports are loaded first, to
    know what they had.
    """
    imported = set(re.findall(r"^\s*(?:from|import)\s+(\w+)", source, re.MULTILINE))
    for module, _ in REGISTRIES:
        if _top(module) in imported:
            with suppress(Exception):  # the file's own import tells what is wrong
                import_foreign(module)

    registered_before = [(registry, dict(registry)) for registry in _registries()]
    for registry, _ in registered_before:
        # The file, or one that it imports, may have been executed already: under another name, or
        # from a copy of its tree.
        refused = [key for key, entry in registry.items() if _is_refused_twice(entry)]
        for key in refused:
            del registry[key]

    try:
        yield
    except BaseException:
        for registry, entries in registered_before:
            registry.clear()
            registry.update(entries)
        raise
    for registry, entries in registered_before:
        registry.update({**entries, **registry})


def _is_refused_twice(entry: Any) -> bool:
    """Whether an entry of a registry is the user's, in a framework that refuses a name that it has:
    SkyRL-Gym, verl's tools."""
    try:
        fields = vars(entry)
    except TypeError:
        return False
    source = fields.get("entry_point") or fields.get("fn")
    home = source.__module__ if callable(source) else source
    return isinstance(home, str) and not public_name(home).startswith(("skyrl_gym.", "verl."))


def _registries() -> Iterator[dict[Any, Any]]:
    """Yield the registries of `REGISTRIES` whose modules are imported."""
    for module_name, name in REGISTRIES:
        for module in loaded_foreign(module_name):
            registry = vars(module).get(name)
            if isinstance(registry, dict):
                yield registry


PROJECTS = {
    "swift": "ms-swift (pip install ms-swift)",
    "skyrl": "SkyRL (pip install skyrl)",
    "skyrl_train": "SkyRL (pip install skyrl)",
    "skyrl_gym": "SkyRL-Gym (pip install skyrl-gym)",
    "verl": "verl (pip install verl)",
    "trl": "TRL (pip install trl)",
    "slime": "slime (install it from its repository)",
    "miles": "Miles (install it from its repository)",
    "sglang": "SGLang (pip install sglang)",
    "vllm": "vLLM (pip install vllm)",
    "megatron": "Megatron-LM (install it from its repository)",
    "PIL": "Pillow (pip install pillow)",
    "cv2": "OpenCV (pip install opencv-python)",
    "sklearn": "scikit-learn (pip install scikit-learn)",
    "yaml": "PyYAML (pip install pyyaml)",
    "bs4": "Beautiful Soup (pip install beautifulsoup4)",
    "dotenv": "python-dotenv (pip install python-dotenv)",
}
"""Projects that ship a module whose name is not theirs on the package index, or is another
project's there."""


def missing_module(error: BaseException) -> tuple[str, str] | None:
    """Return what is missing, by the name that user code has for it, and the remedy; None for
    another error."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return None
    name = public_name(error.name)
    top = _top(name)
    if error.name != name:
        return name, f"there is no module {name} in the files around it; check the name"
    if _has_stand_in(top):
        name = vars(error).get("asked", name)
        return name, f"it is not among our stand-ins for {top}; install {PROJECTS.get(top, top)}"
    return name, f"install {PROJECTS.get(top, top)}, or place it beside the file"


def missing_name(error: BaseException) -> str | None:
    """Return what a stand-in lacks and the remedy; None for another error."""
    if not isinstance(error, ImportError) or not (error.name or "").startswith(f"{STAND_INS}."):
        return None
    name = re.search(r"cannot import name '(\w+)'", str(error))
    if name is None:
        return None
    module = public_name(error.name or "")
    top = _top(module)
    return (
        f"cannot import name {name[1]!r} from {module!r}; our stand-in lacks it, install "
        f"{PROJECTS.get(top, top)}"
    )


def public_name(module: str) -> str:
    """Return the name of a module in its framework, also for a stand-in and for a file of the
    framework's source tree."""
    if module.startswith(PACKAGE):
        return module.partition(".")[2]
    return module.removeprefix(f"{STAND_INS}.")


def private_package(path: Path) -> str:
    """Return the name of the package that the file's relative imports are relative to, and make its
    root importable.

    The root is the nearest directory upwards without `__init__.py`. Below a root on `sys.path` it
    is the installed package.
    """
    folder = path.parent
    inner: list[str] = []  # names of the packages between the root and the file
    while (folder / "__init__.py").is_file() and folder.name.isidentifier():
        inner.insert(0, folder.name)
        folder = folder.parent

    if inner and folder in _installed():
        _adopt(folder, inner[0])
        return ".".join(inner)
    root = _register(folder)
    _HOMES[path.parent] = None
    return ".".join((root, *inner))


def prepare(module: ModuleType) -> None:
    """Give a module that is about to be executed the imports of user code."""
    module.__dict__["__builtins__"] = {**vars(builtins), "__import__": import_for_user}


class _ImportlibOfUserCode(ModuleType):
    """`importlib` as user code sees it: what it imports by name or loads from a file is found as by
    an import statement."""

    def __init__(self, real: ModuleType, globals: Mapping[str, Any]) -> None:
        super().__init__(real.__name__, real.__doc__)
        self.__dict__.update(_real=real, _globals=globals)

    def __getattr__(self, key: str) -> Any:
        real = self.__dict__["_real"]
        globals = self.__dict__["_globals"]
        value = getattr(real, key)
        if value is importlib.import_module:
            return functools.partial(_import_module, globals)
        if value is importlib.util.spec_from_file_location:
            return _spec_of_user_file
        if value is importlib.util:
            return _ImportlibOfUserCode(value, globals)
        return value


def _import_module(globals: Mapping[str, Any], name: str, package: str | None = None) -> ModuleType:
    """Import a module for user code, as `importlib.import_module`."""
    if name.startswith("."):
        return importlib.import_module(name, package)
    # Asked for a name in it, `__import__` returns the module itself and not its first package.
    module: ModuleType = import_for_user(name, globals, None, ("__name__",))
    return module


def _spec_of_user_file(name: str, location: Any = None, **options: Any) -> Any:
    """Return the spec of a file, as `importlib.util.spec_from_file_location`; it is executed with
    the imports of user code."""
    spec = importlib.util.spec_from_file_location(name, location, **options)
    if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
        spec.loader = _UserFileLoader(spec.loader.name, spec.loader.path)
    return spec


def _register(folder: Path) -> str:
    """Make a directory the root of private modules; return the name of the package that holds
    them."""
    folder_bytes = str(folder).encode("utf-8", "surrogateescape")
    name = PACKAGE + hashlib.blake2b(folder_bytes, digest_size=6).hexdigest()
    if name not in sys.modules:
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        sys.modules.setdefault(name, importlib.util.module_from_spec(spec))
        publish(name, f"import turnwright.envs.user_imports\n\n__path__ = [{str(folder)!r}]\n")
    return name


_PUBLISHED: list[Path] = []
"""The directory of published modules; none before the first."""


def publish(name: str, source: str) -> None:
    """Make a private module importable in the processes that user code spawns: they get this one's
    `sys.path`, not its modules.

    `source` makes the module there. Here it is in `sys.modules` and the file is never read.
    """
    # Without room for temporary files, functions of the module cannot be sent to such a process.
    with suppress(OSError):
        if not _PUBLISHED:
            folder = Path(tempfile.mkdtemp(prefix="turnwright-modules-"))
            _PUBLISHED.append(folder)
            sys.path.append(str(folder))
            atexit.register(_unpublish, folder, os.getpid())
        (_PUBLISHED[0] / f"{name}.py").write_text(source, encoding="utf-8")


def _unpublish(folder: Path, process: int) -> None:
    if os.getpid() == process:  # not a fork of it
        shutil.rmtree(folder, ignore_errors=True)


def _installed() -> set[Path]:
    """Return the directories of `sys.path`."""
    return {Path(entry or ".").resolve() for entry in sys.path}


def import_for_user(
    name: str,
    globals: Mapping[str, Any] | None = None,
    locals: Mapping[str, Any] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> Any:
    """Import for user code, as `__import__`.

    Absolute names are those of modules beside the file, then installed ones, then stand-ins, then
    modules around the file.
    """
    if globals is None:
        globals = sys._getframe(1).f_globals
    names = tuple(fromlist or ())

    if level:  # a relative import
        base = globals.get("__package__") or ""
        if base.startswith(PACKAGE):
            return _named(importlib.util.resolve_name("." * level + name, base), "", names)
        globals = dict(globals, __name__=f"{base}._", __spec__=None)
        return builtins.__import__(name, globals, locals, names, level)

    # A file of a framework's own source tree has that tree's modules, also where another version is
    # installed.
    top = _top(name)
    is_new = top not in sys.modules
    package = None
    if top not in sys.stdlib_module_names:
        if is_new:
            package = _own_package(globals, name)
        elif _has_stand_in(top) and not _comes_first(name):
            package = _own_tree(globals, top)
    if package is not None:
        return _named(f"{package}.{name}", package, names)
    return _import_absolute(name, names, globals, locals)


def _import_absolute(
    name: str, names: tuple[str, ...], globals: Mapping[str, Any], locals: Mapping[str, Any] | None
) -> Any:
    """Import an installed module, else a stand-in, else a module around the file; see
    `import_for_user`."""
    top = _top(name)
    is_new = top not in sys.modules
    wanted = [attribute for attribute in names if attribute != "*"]

    # A few stand-ins come first, with what they lack from the installed module.
    first = None
    if _comes_first(name):
        first = _named(f"{STAND_INS}.{name}", STAND_INS, names)
        if all(hasattr(first, attribute) for attribute in wanted):
            if names or top not in sys.modules:
                return first
            return _Overlay(first, sys.modules[top])

    try:
        installed = builtins.__import__(name, globals, locals, names, 0)
    except ModuleNotFoundError as error:
        if not _lacks(error, name):
            raise
        _forget_folder(name, is_new)
        return _not_installed(name, globals, names, error)

    if first is not None:
        return _Overlay(first, installed)
    lacks_some = any(not hasattr(installed, attribute) for attribute in wanted)
    if lacks_some and _has_stand_in(name):
        return _Overlay(installed, _named(f"{STAND_INS}.{name}", STAND_INS, names))
    return _as_user_code_sees(installed, globals)


def _as_user_code_sees(module: ModuleType, globals: Mapping[str, Any]) -> Any:
    """Return a module that works in another way for user code, in a thread and around its own file;
    else the module."""
    if module in (importlib, importlib.util):
        return _ImportlibOfUserCode(module, globals)
    return _SIGNAL if module is signal else module


def _comes_first(name: str) -> bool:
    """Whether the stand-in for a module comes before an installed one."""
    return _top(name) in _stand_ins().ALWAYS and _has_stand_in(name) and "." in name


def _not_installed(
    name: str, globals: Mapping[str, Any], names: tuple[str, ...], error: ModuleNotFoundError
) -> ModuleType | _Overlay:
    """Import a stand-in or a module around the file, for user code."""
    package = _around(globals, name)
    top = _top(name)
    stand_in: ModuleType | None = None
    if _has_stand_in(name):
        stand_in = _named(f"{STAND_INS}.{name}", STAND_INS, names)
        lacks_some = any(
            attribute != "*" and not _offers(stand_in, name, attribute) for attribute in names
        )
        # Where it lacks some, the framework's own source may be around the file, and has more.
        if package is None or not lacks_some:
            if names or top not in sys.modules:
                return stand_in
            return _Overlay(sys.modules[top], stand_in)

    if package is None:
        error.__dict__["asked"] = name  # Python names only the first package that is missing
        raise error
    around: ModuleType = _named(f"{package}.{name}", package, names)
    if stand_in is not None and names and _comes_first(name):
        return _Overlay(stand_in, around)
    return around


def _top(name: str) -> str:
    return name.partition(".")[0]


def _forget_folder(name: str, is_new: bool) -> None:
    """Take out of `sys.modules` what a failed import found for the first part of its name, if that
    is a bare folder.

    A folder `examples` in the working directory, which Python takes for a package, shall not hide
    another one.
    """
    top = _top(name)
    package = sys.modules.get(top)
    if not is_new or package is None or getattr(package, "__file__", None) is not None:
        return
    modules = [module for module in sys.modules if f"{module}.".startswith(f"{top}.")]
    for module in modules:
        del sys.modules[module]


def _named(full_name: str, package: str, names: tuple[str, ...]) -> Any:
    """Return what an import of a private module binds: the module with `names`, else its first
    package below `package`."""
    if names:
        return builtins.__import__(full_name, None, None, names, 0)
    importlib.import_module(full_name)
    top = _top(full_name.removeprefix(f"{package}."))
    return sys.modules[f"{package}.{top}"]


class _Overlay(ModuleType):
    """A module, with what it lacks from another one: of an installed module and a stand-in."""

    def __init__(self, installed: ModuleType, stand_in: ModuleType) -> None:
        super().__init__(installed.__name__, installed.__doc__)
        self.__dict__.update(_installed=installed, _stand_in=stand_in)

    def __getattr__(self, key: str) -> Any:
        installed = self.__dict__["_installed"]
        stand_in = self.__dict__["_stand_in"]
        if not hasattr(installed, key):
            return getattr(stand_in, key)
        value = getattr(installed, key)
        other = getattr(stand_in, key, None)
        if isinstance(value, ModuleType) and isinstance(other, ModuleType):
            return _Overlay(value, other)
        return value


def _lacks(error: ModuleNotFoundError, name: str) -> bool:
    """Whether the module of an import, or a package of it, does not exist; otherwise one of its own
    imports failed."""
    return error.name is not None and f"{name}.".startswith(f"{error.name}.")


def _own_package(globals: Mapping[str, Any], name: str) -> str | None:
    """Return the private package that comes before installed ones: the file's own, or the folder of
    a file in a recipe."""
    root = _top(str(globals.get("__package__") or ""))
    if not root.startswith(PACKAGE):
        return None
    top = _top(name)
    tree = _own_tree(globals, top)
    if tree is not None:
        return tree

    file_folder = Path(str(globals.get("__file__") or "")).parent
    root_folder = Path(sys.modules[root].__path__[0])
    for folder in (file_folder, root_folder):
        if folder in _HOMES and _has_module(folder, top):
            return _register(folder)
    return None


def _own_tree(globals: Mapping[str, Any], top: str) -> str | None:
    """Return the private package above the package `top`, if the file is part of that."""
    root, _, inner = str(globals.get("__package__") or "").partition(".")
    if not root.startswith(PACKAGE):
        return None
    if _top(inner) == top:
        return root

    # A folder without __init__.py may lie between a file and its package.
    for folder in Path(str(globals.get("__file__") or "")).parents:
        is_package = folder.name == top and (folder / "__init__.py").is_file()
        if is_package and not (folder.parent / "__init__.py").is_file():
            return _register(folder.parent)
    return None


def _around(globals: Mapping[str, Any], name: str) -> str | None:
    """Return the private package of the nearest directory above a file that has a module, up to the
    root of its project.

    The root's `src`, and the projects beside each other in it, are searched too. Beyond that root
    only directories on the path of the file itself are found, such as `examples` of
    `examples.game.env`.
    """
    if not str(globals.get("__package__") or "").startswith(PACKAGE):
        return None
    return _around_file(Path(str(globals.get("__file__") or "")), name)


def _around_file(file: Path, name: str) -> str | None:
    """Return the private package of the nearest directory above a file that has a module; see
    `_around`."""
    file = file.resolve()
    in_project = True
    for folder in file.parents:
        is_on_path = folder / _top(name) in file.parents
        if (in_project or is_on_path) and _places(folder, name):
            return _register(folder)
        if in_project and any((folder / mark).exists() for mark in _PROJECT):
            for member in _members(folder):
                if _places(member, name):
                    return _register(member)
            in_project = False
        if folder == Path.home() or folder == folder.parent:
            break
    return None


def _members(root: Path) -> Iterator[Path]:
    """Yield the directories that the projects of a repository are installed from: its own `src`,
    and those of a workspace."""
    yield root / "src"
    for entry in sorted(root.iterdir()):
        if (entry / "pyproject.toml").is_file() or (entry / "setup.py").is_file():
            yield from (entry, entry / "src")


def _places(folder: Path, name: str) -> bool:
    """Return whether a folder has the file or the directory of a module."""
    place = folder.joinpath(*name.split("."))
    return place.with_suffix(".py").is_file() or place.is_dir()


def _offers(stand_in: Any, name: str, attribute: str) -> bool:
    """Whether a stand-in has an attribute, or a module of that name below it."""
    return hasattr(stand_in, attribute) or _has_stand_in(f"{name}.{attribute}")


def _stand_ins() -> Any:
    return importlib.import_module(STAND_INS)


def _has_stand_in(name: str) -> bool:
    return _is_listed(name) or _same_as(name) is not None


def _is_listed(name: str) -> bool:
    """Whether a table has a module, or one below it."""
    return name in _stand_ins().MODULES or _has_below(name, _stand_ins().MODULES)


def _has_below(package: str, names: Iterable[str]) -> bool:
    return any(name.startswith(f"{package}.") for name in names)


def _same_as(name: str) -> str | None:
    """Return the stand-in whose names another one has."""
    same = _stand_ins().SAME
    package = name
    below = ""  # the rest of the name, with its dot
    while package and package not in same:
        package, _, last = package.rpartition(".")
        below = f".{last}{below}"
    if not package:
        return None
    stand_in = same[package] + below
    return stand_in if _is_listed(stand_in) else None


class _PrivateFinder:
    """Finds stand-ins and the modules around user code, by their private names, and packages of
    users on `sys.path`."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        """Return the spec of a private module, whose loader prepares it."""
        roots = _ON_PATH.get(_top(name))
        if roots is not None:
            spec = importlib.machinery.PathFinder.find_spec(name, path, target)
            if spec is None or type(spec.loader) is not importlib.machinery.SourceFileLoader:
                return spec
            if not roots.isdisjoint(Path(spec.loader.path).resolve().parents):
                spec.loader = _PrivateLoader(spec.loader.name, spec.loader.path)
            return spec

        if name.startswith(f"{STAND_INS}."):
            return _spec_of_stand_in(name)
        if not name.startswith(PACKAGE):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _PrivateLoader(spec.loader.name, spec.loader.path)
        return spec


def _spec_of_stand_in(full_name: str) -> importlib.machinery.ModuleSpec | None:
    """Return the spec of a stand-in: of a table, or of one whose names another one has; None for
    neither."""
    name = public_name(full_name)
    if _is_listed(name):
        modules = _stand_ins().MODULES
        is_package = name in modules.get(name, ()) or _has_below(
            name, (*modules, *_stand_ins().SAME)
        )
        loader = _TableLoader(name)
        return importlib.machinery.ModuleSpec(full_name, loader, is_package=is_package)
    same = _same_as(name)
    if same is None:
        return None
    return importlib.machinery.ModuleSpec(full_name, _SameLoader(same), is_package=True)


class _PrivateLoader(importlib.machinery.SourceFileLoader):
    """Executes a private module.

    The `__init__.py` of a package may import what a module below it does not need, such as a
    framework's trainer. If such an import fails, the package is there without the names that its
    file did not reach; asking for one of them is the error.
    """

    def exec_module(self, module: ModuleType) -> None:
        prepare(module)
        try:
            super().exec_module(module)
        except Exception as error:
            if not self.is_package(module.__name__) or not _of_an_import(error, self.path):
                raise
            reason = error

            def missing(name: str) -> Any:
                if name.startswith("__"):
                    raise AttributeError(name)
                raise reason

            module.__dict__["__getattr__"] = missing


def _of_an_import(error: Exception, path: str) -> bool:
    """Whether an error that ended the execution of a file is one of what the file imported, not of
    its own code.

    Imports of a prepared module pass through `import_for_user`, which is in this file.
    """
    is_below_file = False
    is_import = False
    for frame, _ in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if file == path:
            is_below_file = True
            is_import = False
        elif is_below_file and file == __file__:
            is_import = True
    return is_import


class _UserFileLoader(importlib.machinery.SourceFileLoader):
    """Executes a file that user code loads itself."""

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__package__"] = private_package(Path(self.path).resolve())
        prepare(module)
        super().exec_module(module)


class _TableLoader(importlib.abc.Loader):
    """Makes a module of a framework out of the names that a table gives it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def exec_module(self, module: ModuleType) -> None:
        for source, listed in _stand_ins().MODULES.get(self._name, {}).items():
            pairs = _pairs(listed)
            if source == self._name:
                for name, _ in pairs:
                    importlib.import_module(f"{module.__name__}.{name}")
            elif _has_stand_in(source):
                names_there = tuple(name_there for _, name_there in pairs)
                other = import_for_user(source, {}, None, names_there)
                for name, name_there in pairs:
                    module.__dict__[name] = getattr(other, name_there)
            else:
                _fill_from_home(module, importlib.import_module(source), pairs)


def _fill_from_home(module: ModuleType, home: ModuleType, pairs: list[tuple[str, str]]) -> None:
    """Give a stand-in the names that its home, a module of ours, defines for it."""
    _name_as_in_tables(home)
    module.__dict__.update(_imported_by(home))
    for name, name_there in pairs:
        value = vars(home)[name_there]
        module.__dict__[name] = value

        # As an import statement would, for who looks at what is imported.
        owner = getattr(value, "__module__", None)
        if not isinstance(owner, str) or owner == module.__name__:
            continue
        if owner.startswith(f"{STAND_INS}."):
            importlib.import_module(owner)

    # Tools that look for the source of a class find it by its module's file.
    module.__dict__.setdefault("__file__", home.__file__)


def _imported_by(home: ModuleType) -> dict[str, Any]:
    """Return what a module imports of others than ours: annotations of its classes are evaluated
    with these names."""
    ours = ("turnwright", *plugins.PACKAGES)
    listed: set[str] = set()
    for sources in _stand_ins().MODULES.values():
        listed.update(name_there for _, name_there in _pairs(sources.get(home.__name__, "")))

    imported = {}
    for name, value in vars(home).items():
        source = getattr(value, "__module__", None)
        if isinstance(value, ModuleType):
            source = value.__name__
        is_others = isinstance(source, str) and _top(source) not in ours
        if is_others and name not in listed and not name.startswith("_"):
            imported[name] = value
    return imported


def _pairs(listed: str) -> list[tuple[str, str]]:
    """Return the names that a stand-in has with those of its home: of `name`, or of
    `name=name_there`."""
    pairs = []
    for entry in listed.split():
        name, _, name_there = entry.partition("=")
        pairs.append((name, name_there or name))
    return pairs


def _name_as_in_tables(home: ModuleType) -> None:
    """Name the classes and functions of a module after the first stand-in that has them.

    Objects of user code's base classes are recognized, pickled and shown by these names.
    """
    for stand_in, sources in _stand_ins().MODULES.items():
        for name, name_there in _pairs(sources.get(home.__name__, "")):
            thing = vars(home)[name_there]
            if isinstance(thing, (type, FunctionType)) and thing.__module__ == home.__name__:
                if name != name_there:
                    thing.__name__ = name
                    thing.__qualname__ = name
                _move(thing, home.__name__, f"{STAND_INS}.{stand_in}")


def _move(thing: Any, home: str, stand_in: str) -> None:
    """Set the module of a class or function, and of the methods of the class."""
    if isinstance(thing, (staticmethod, classmethod)):
        thing = thing.__func__
    if isinstance(thing, (type, FunctionType)) and thing.__module__ == home:
        thing.__module__ = stand_in
        if isinstance(thing, type):
            for inner in list(vars(thing).values()):
                _move(inner, home, stand_in)


class _SameLoader(importlib.abc.Loader):
    """Gives a module the names of another one, which is the installed one where there is one, as
    for user code."""

    def __init__(self, other: str) -> None:
        self.other = other

    def exec_module(self, module: ModuleType) -> None:
        for name, value in vars(import_for_user(self.other, {}, None, ("*",))).items():
            module.__dict__.setdefault(name, value)


_SIGNAL = SignalOfUserCode()

sys.meta_path.insert(0, _PrivateFinder)

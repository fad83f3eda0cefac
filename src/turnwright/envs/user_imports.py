"""Imports of user code: modules around its file, and stand-ins for
frameworks that are not installed.

The modules found here have private names in `sys.modules`, so that files of one name do not
collide, and no library takes a stand-in for an installed framework. User code sees them through its
own `__import__`, for as long as it lives.
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
PACKAGE = "turnwright_package_"
_PROJECT = (".git", "pyproject.toml", "setup.py", "setup.cfg")
_HOMES: dict[Path, None] = {}
"""Folders of the files that recipes name, in the order of their first use."""
_ON_PATH: dict[str, set[Path]] = {}
"""Packages of users that are importable by themselves, with entries of `sys.path`: they get the
imports of user code too."""


def import_foreign(name: str, near: Path | None = None, attribute: str = "") -> ModuleType:
    """Import a module of a framework, else our stand-in, else one around `near` or
    around a file that is loaded.

    A module directly beside one of those files comes first, as for an import statement of the file.
    Of a stand-in without `attribute` and a module around a file it is the latter, which is newer.

    Raises:
        ImportError: the framework's, where none of them has it.
    """
    new = _top(name) not in sys.modules
    if _comes_first(name):
        found = importlib.import_module(f"{STAND_INS}.{name}")
        if not attribute or _offers(found, name, attribute):
            return found
    if new:
        beside = _beside(name, near)
        if beside is not None:
            return importlib.import_module(f"{beside}.{name}")
        _adopt_around(name, near)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not _lacks(error, name):
            raise
        _forget_folder(name, new)
        stand_in = f"{STAND_INS}.{name}" if _has_stand_in(name) else None
        if stand_in is not None and (
            not attribute or _offers(importlib.import_module(stand_in), name, attribute)
        ):
            return importlib.import_module(stand_in)
        files = [near] if near is not None else []
        files += [home / "_" for home in _HOMES]
        names = [
            f"{package}.{name}"
            for file in files
            if (package := _around_file(file, name)) is not None
        ]
        names += [] if stand_in is None else [stand_in]
        if not names:
            raise
        return importlib.import_module(names[0])


def _beside(name: str, near: Path | None) -> str | None:
    """Return the private package of the folder of a user's file that has a module, whose name
    is not a framework's."""
    top = _top(name)
    if top in sys.stdlib_module_names or _has_stand_in(top):
        return None
    folders = [near.parent] if near is not None else []
    for folder in (*folders, *_HOMES):
        if (folder / f"{top}.py").is_file() or (folder / top / "__init__.py").is_file():
            return _register(folder)
    return None


def _adopt_around(name: str, near: Path | None) -> None:
    """Adopt the package of a module that is around a user's file and on `sys.path`."""
    for file in (near, *(home / "_" for home in _HOMES)):
        package = None if file is None else _around_file(file, name)
        if (
            package is not None
            and (folder := Path(sys.modules[package].__path__[0])) in _installed()
        ):
            _adopt(folder, _top(name))
            return


def _adopt(folder: Path, top: str) -> None:
    """Give the modules of a package on `sys.path` the imports of user code,
    when they are loaded."""
    not_users = ("turnwright", *plugins.PACKAGES, *_stand_ins().ALWAYS)
    if folder.name not in ("site-packages", "dist-packages") and top not in not_users:
        _ON_PATH.setdefault(top, set()).add(folder)


def stand_in_of(name: str) -> ModuleType | None:
    """Return our stand-in for a module of a framework; None where there is none."""
    return importlib.import_module(f"{STAND_INS}.{name}") if _has_stand_in(name) else None


def loaded_foreign(name: str) -> list[ModuleType]:
    """Return what something imported already of a framework's module: the installed one, its
    stand-in, those of trees."""
    suffix = f".{name}"
    return [
        module
        for full, module in list(sys.modules.items())
        if full == name or (full.endswith(suffix) and public_name(full) == name)
    ]


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

    `source` is the file's text: the registries of frameworks that it imports are loaded
    first, to know what they had.
    """
    imported = set(re.findall(r"^\s*(?:from|import)\s+(\w+)", source, re.MULTILINE))
    for module, _ in REGISTRIES:
        if _top(module) in imported:
            with suppress(Exception):  # the file's own import tells what is wrong
                import_foreign(module)
    before = [(registry, dict(registry)) for registry in _registries()]
    for registry, _ in before:
        # The file, or one that it imports, may have been executed before: under another name, or
        # from a copy of its tree.
        for key in [key for key, entry in registry.items() if _is_refused_twice(entry)]:
            del registry[key]
    try:
        yield
    except BaseException:
        for registry, known in before:
            registry.clear()
            registry.update(known)
        raise
    for registry, known in before:
        registry.update({**known, **registry})


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
    for module, name in REGISTRIES:
        for loaded in loaded_foreign(module):
            found = vars(loaded).get(name)
            if isinstance(found, dict):
                yield found


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
"""Projects that ship a module whose name is not theirs on the package index, or is
another project's there."""


def missing_module(error: BaseException) -> tuple[str, str] | None:
    """Return what is missing, by the name that user code has for it, and the remedy;
    None for another error."""
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
    name, top = (
        re.search(r"cannot import name '(\w+)'", str(error)),
        _top(public_name(error.name or "")),
    )
    if name is None:
        return None
    module = public_name(error.name or "")
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
    """Return the name of the package that the file's relative imports are relative to, and
    make its root importable.

    The root is the nearest directory upwards without `__init__.py`. Below a root on `sys.path` it
    is the installed package.
    """
    folder, inner = path.parent, list[str]()
    while (
        (folder / "__init__.py").is_file()
        and folder.name.isidentifier()
        and folder != folder.parent
    ):
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
    """`importlib` as user code sees it: what it imports by name or loads from a file is found
    as by an import statement."""

    def __init__(self, real: ModuleType, globals: Mapping[str, Any]) -> None:
        super().__init__(real.__name__, real.__doc__)
        self.__dict__.update(_real=real, _globals=globals)

    def __getattr__(self, key: str) -> Any:
        real, globals = self.__dict__["_real"], self.__dict__["_globals"]
        found = getattr(real, key)
        if found is importlib.import_module:
            return functools.partial(_import_module, globals)
        if found is importlib.util.spec_from_file_location:
            return _spec_of_user_file
        return _ImportlibOfUserCode(found, globals) if found is importlib.util else found


def _import_module(globals: Mapping[str, Any], name: str, package: str | None = None) -> ModuleType:
    """Import a module for user code, as `importlib.import_module`."""
    if name.startswith("."):
        return importlib.import_module(name, package)
    found: ModuleType = import_for_user(name, globals, None, ("__name__",))
    return found


def _spec_of_user_file(name: str, location: Any = None, **options: Any) -> Any:
    """Return the spec of a file, as `importlib.util.spec_from_file_location`; it is executed with
    the imports of user code."""
    spec = importlib.util.spec_from_file_location(name, location, **options)
    if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
        spec.loader = _UserFileLoader(spec.loader.name, spec.loader.path)
    return spec


def _register(folder: Path) -> str:
    """Make a directory the root of private modules; return the name of the
    package that holds them."""
    name = (
        PACKAGE
        + hashlib.blake2b(str(folder).encode("utf-8", "surrogateescape"), digest_size=6).hexdigest()
    )
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
    with suppress(OSError):
        # Without room for temporary files, functions of the module cannot be sent to such
        # a process.
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
    if level:
        base = globals.get("__package__") or ""
        if not base.startswith(PACKAGE):
            return builtins.__import__(
                name, dict(globals, __name__=f"{base}._", __spec__=None), locals, names, level
            )
        return _named(importlib.util.resolve_name("." * level + name, base), "", names)
    top = _top(name)
    new = top not in sys.modules
    # A file of a framework's own source tree has that tree's modules, also where
    # another version is installed.
    if top not in sys.stdlib_module_names and (
        new or (_has_stand_in(top) and not _comes_first(name))
    ):
        own = _own_package(globals, name) if new else _own_tree(globals, top)
        if own is not None:
            return _named(f"{own}.{name}", own, names)
    return _import_absolute(name, names, globals, locals)


def _import_absolute(
    name: str, names: tuple[str, ...], globals: Mapping[str, Any], locals: Mapping[str, Any] | None
) -> Any:
    """Import an installed module, else a stand-in, else a module around the file;
    see `import_for_user`."""
    top = _top(name)
    new = top not in sys.modules
    first = _named(f"{STAND_INS}.{name}", STAND_INS, names) if _comes_first(name) else None
    if first is not None and all(hasattr(first, one) for one in names if one != "*"):
        return first if names or top not in sys.modules else _Overlay(first, sys.modules[top])
    try:
        found = builtins.__import__(name, globals, locals, names, 0)
    except ModuleNotFoundError as error:
        if not _lacks(error, name):
            raise
        _forget_folder(name, new)
        return _not_installed(name, globals, names, error)
    if first is not None:
        return _Overlay(first, found)
    if any(not hasattr(found, one) for one in names if one != "*") and _has_stand_in(name):
        return _Overlay(found, _named(f"{STAND_INS}.{name}", STAND_INS, names))
    return _as_user_code_sees(found, globals)


def _as_user_code_sees(module: ModuleType, globals: Mapping[str, Any]) -> Any:
    """Return a module that works in another way for user code, in a thread and around its own
    file; else the module."""
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
    package, top = _around(globals, name), _top(name)
    found: ModuleType
    if _has_stand_in(name):
        found = _named(f"{STAND_INS}.{name}", STAND_INS, names)
        lacks = any(one != "*" and not _offers(found, name, one) for one in names)
        if package is None or not lacks:
            return found if names or top not in sys.modules else _Overlay(sys.modules[top], found)
        # The framework's own source is around the file, and has more.
    if package is None:
        error.__dict__["asked"] = name  # Python names only the first package that is missing
        raise error
    own: ModuleType = _named(f"{package}.{name}", package, names)
    return _Overlay(found, own) if _comes_first(name) and names else own


def _top(name: str) -> str:
    return name.partition(".")[0]


def _forget_folder(name: str, new: bool) -> None:
    """Take out of `sys.modules` what a failed import found for the first part of its name,
    if that is a bare folder.

    A folder `examples` in the working directory, which Python takes for a package,
    shall not hide another one.
    """
    if (
        new
        and (found := sys.modules.get(_top(name))) is not None
        and getattr(found, "__file__", None) is None
    ):
        for one in [one for one in sys.modules if f"{one}.".startswith(f"{_top(name)}.")]:
            del sys.modules[one]


def _named(full: str, package: str, names: tuple[str, ...]) -> Any:
    """Return what an import of a private module binds: the module with `names`, else its first
    package below `package`."""
    if names:
        return builtins.__import__(full, None, None, names, 0)
    importlib.import_module(full)
    return sys.modules[f"{package}.{full.removeprefix(f'{package}.').partition('.')[0]}"]


class _Overlay(ModuleType):
    """A module, with what it lacks from another one: of an installed module and a stand-in."""

    def __init__(self, installed: ModuleType, stand_in: ModuleType) -> None:
        super().__init__(installed.__name__, installed.__doc__)
        self.__dict__.update(_installed=installed, _stand_in=stand_in)

    def __getattr__(self, key: str) -> Any:
        installed, stand_in = self.__dict__["_installed"], self.__dict__["_stand_in"]
        if not hasattr(installed, key):
            return getattr(stand_in, key)
        found, other = getattr(installed, key), getattr(stand_in, key, None)
        return (
            _Overlay(found, other)
            if isinstance(found, ModuleType) and isinstance(other, ModuleType)
            else found
        )


def _lacks(error: ModuleNotFoundError, name: str) -> bool:
    """Whether the module of an import, or a package of it, does not exist; otherwise one of
    its own imports failed."""
    return error.name is not None and f"{name}.".startswith(f"{error.name}.")


def _own_package(globals: Mapping[str, Any], name: str) -> str | None:
    """Return the private package that comes before installed ones: the file's own, or the
    folder of a file in a recipe."""
    root = str(globals.get("__package__") or "").partition(".")[0]
    if not root.startswith(PACKAGE):
        return None
    top = _top(name)
    tree = _own_tree(globals, top)
    if tree is not None:
        return tree
    folder = Path(str(globals.get("__file__") or "")).parent
    for place in (folder, Path(sys.modules[root].__path__[0])):
        if place in _HOMES and (
            (place / f"{top}.py").is_file() or (place / top / "__init__.py").is_file()
        ):
            return _register(place)
    return None


def _own_tree(globals: Mapping[str, Any], top: str) -> str | None:
    """Return the private package above the package `top`, if the file is part of that."""
    root, _, inner = str(globals.get("__package__") or "").partition(".")
    if not root.startswith(PACKAGE):
        return None
    if inner.partition(".")[0] == top:
        return root
    # A folder without __init__.py may lie between a file and its package.
    for above in Path(str(globals.get("__file__") or "")).parents:
        if (
            above.name == top
            and (above / "__init__.py").is_file()
            and not (above.parent / "__init__.py").is_file()
        ):
            return _register(above.parent)
    return None


def _around(globals: Mapping[str, Any], name: str) -> str | None:
    """Return the private package of the nearest directory above a file that has a module, up to
    the root of its project.

    The root's `src`, and the projects beside each other in it, are searched too. Beyond
    that root only directories on the path of the file itself are found, such as
    `examples` of `examples.game.env`.
    """
    if not str(globals.get("__package__") or "").startswith(PACKAGE):
        return None
    return _around_file(Path(str(globals.get("__file__") or "")), name)


def _around_file(file: Path, name: str) -> str | None:
    """Return the private package of the nearest directory above a file that has a
    module; see `_around`."""
    file = file.resolve()
    inside = True
    for folder in file.parents:
        on_path = folder / _top(name) in file.parents
        if (inside or on_path) and _places(folder, name):
            return _register(folder)
        if inside and any((folder / mark).exists() for mark in _PROJECT):
            member = next((one for one in _members(folder) if _places(one, name)), None)
            if member is not None:
                return _register(member)
            inside = False
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
    head, tail, same = name, "", _stand_ins().SAME
    while head not in same and head:
        head, _, last = head.rpartition(".")
        tail = f".{last}{tail}"
    return found if head and _is_listed(found := same[head] + tail) else None


class _PrivateFinder:
    """Finds stand-ins and the modules around user code, by their private names, and
    packages of users on `sys.path`."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        """Return the spec of a private module, whose loader prepares it."""
        if (roots := _ON_PATH.get(_top(name))) is not None:
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


def _spec_of_stand_in(full: str) -> importlib.machinery.ModuleSpec | None:
    """Return the spec of a stand-in: of a table, or of one whose names another one
    has; None for neither."""
    name = public_name(full)
    if _is_listed(name):
        modules = _stand_ins().MODULES
        is_package = name in modules.get(name, ()) or _has_below(
            name, (*modules, *_stand_ins().SAME)
        )
        return importlib.machinery.ModuleSpec(full, _TableLoader(name), is_package=is_package)
    same = _same_as(name)
    return (
        None
        if same is None
        else importlib.machinery.ModuleSpec(full, _SameLoader(same), is_package=True)
    )


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
    """Whether an error that ended the execution of a file is one of what the file
    imported, not of its own code."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    inner = (
        files[max(at for at, file in enumerate(files) if file == path) + 1 :]
        if path in files
        else []
    )
    return any(file == __file__ for file in inner)


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
                wanted = tuple(own for _, own in pairs)
                found = import_for_user(source, {}, None, wanted)
                module.__dict__.update({name: getattr(found, own) for name, own in pairs})
            else:
                home = importlib.import_module(source)
                _name_as_in_tables(home)
                module.__dict__.update(_imported_by(home))
                for name, own in pairs:
                    found = vars(home)[own]
                    module.__dict__[name] = found
                    # As an import statement would, for who looks at what is imported.
                    owner = getattr(found, "__module__", None)
                    if (
                        isinstance(owner, str)
                        and owner.startswith(f"{STAND_INS}.")
                        and owner != module.__name__
                    ):
                        importlib.import_module(owner)
                # Tools that look for the source of a class find it by its module's file.
                module.__dict__.setdefault("__file__", home.__file__)


def _imported_by(home: ModuleType) -> dict[str, Any]:
    """Return what a module imports of others than ours: annotations of its classes are
    evaluated with these names."""
    ours = ("turnwright", *plugins.PACKAGES)
    listed = {
        own
        for sources in _stand_ins().MODULES.values()
        for _, own in _pairs(sources.get(home.__name__, ""))
    }
    imported = {}
    for name, value in vars(home).items():
        source = (
            value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        )
        is_others = isinstance(source, str) and _top(source) not in ours
        if is_others and name not in listed and not name.startswith("_"):
            imported[name] = value
    return imported


def _pairs(listed: str) -> list[tuple[str, str]]:
    """Return the names that a stand-in has with those of its home: of `name`, or of `name=own`."""
    pairs = []
    for entry in listed.split():
        name, _, own = entry.partition("=")
        pairs.append((name, own or name))
    return pairs


def _name_as_in_tables(home: ModuleType) -> None:
    """Name the classes and functions of a module after the first stand-in that has them.

    Objects of user code's base classes are recognized, pickled and shown by these names.
    """
    for stand_in, sources in _stand_ins().MODULES.items():
        for name, own in _pairs(sources.get(home.__name__, "")):
            thing = vars(home)[own]
            if isinstance(thing, (type, FunctionType)) and thing.__module__ == home.__name__:
                if name != own:
                    thing.__name__ = thing.__qualname__ = name
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
    """Gives a module the names of another one, which is the installed one where there is
    one, as for user code."""

    def __init__(self, other: str) -> None:
        self.other = other

    def exec_module(self, module: ModuleType) -> None:
        for name, value in vars(import_for_user(self.other, {}, None, ("*",))).items():
            module.__dict__.setdefault(name, value)


_SIGNAL = SignalOfUserCode()

sys.meta_path.insert(0, _PrivateFinder)

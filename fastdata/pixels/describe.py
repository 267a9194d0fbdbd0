"""What a value does, as a hash: one for values made alike, in any process, another for each change.

Seen are attributes, of attributes too, code with its constants, defaults, closures, and the globals
that it names, arrays and tensors by their bytes. Code that is installed is known by its name:
Python's own and that of the packages whose steps fastdata knows in any version, other packages'
with their version and the hash of the file. Not seen is what code reads elsewhere: files, the
environment, the clock.
"""

from __future__ import annotations

import copyreg
import dis
import functools
import hashlib
import inspect
import itertools
import pickle
import random
import sys
import threading
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

_BY_NAME = {"PIL", "fastdata", "numpy", "timm", "torch", "torchvision", *sys.stdlib_module_names}
_ATOMS = {type(None), bool, int, float, str, bytes}
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_DESCRIPTORS = (classmethod, staticmethod, property)
_WRAPPING = (*_DESCRIPTORS, types.MethodType)
_WRAPPED = ("__self__", "__func__", "fget", "fset")
_CODE_FACTS = [
    "co_code",
    "co_consts",
    "co_names",
    "co_varnames",
    "co_freevars",
    "co_cellvars",
    "co_flags",
    "co_argcount",
    "co_posonlyargcount",
    "co_kwonlyargcount",
    "co_exceptiontable",
]
_COMPUTING = (abs, bool, dict, divmod, float, int, len, list, max, min, round, str, tuple)
_LISTS = ["_fastdata_identity", "samples", "targets"]
"""Attributes that tell a dataset from others of its class."""
_CHANGES = ["transform", "target_transform", "transforms", "loader"]
"""What opens and changes its samples."""
_NOTES = {"_abc_impl", "__annotate__", "__annotate_func__"}
_HEAP_TYPE = 1 << 9
"""The flag that classes of Python code have in Python's C code (Py_TPFLAGS_HEAPTYPE)."""


def describe(value: Any, cache_key: str | None = None) -> str:
    """Hash of what a value does; ``cache_key`` stands for all in it that cannot be seen.

    Raises:
        ValueError: something in it cannot be seen, as what only C code knows, and there is no
            ``cache_key``; names its type.

    Example:
        >>> describe([1, 2]) == describe([1, 2]), describe([1, 2]) == describe([1.0, 2])
        (True, False)
    """
    digest = hashlib.blake2b(digest_size=12)
    name = getattr(value, "__qualname__", type(value).__qualname__)
    _Describer(types.SimpleNamespace(write=digest.update), name, cache_key).dump(value)
    return digest.hexdigest()


def draws_nothing(call: Any) -> bool:
    """Whether a function surely draws no random number: it names only data and what computes.

    Example:
        >>> table = {0: 1, 1: 0}
        >>> draws_nothing(lambda label: table[label]), draws_nothing(lambda label: torch.rand(()))
        (True, False)
    """
    if not isinstance(call, types.FunctionType):
        owner = getattr(call, "__self__", None)  # of table.get, table.__getitem__
        return call is None or _is_calm(call) or (owner is not None and _is_calm(owner))
    known = {computing.__name__: computing for computing in _COMPUTING} | call.__globals__
    # Of an attribute's name nothing is known, unless a global has it, too.
    held = [known.get(name, object) for name in call.__code__.co_names]
    held += [cell.cell_contents for cell in call.__closure__ or ()]
    held += [*call.__code__.co_consts, *(call.__defaults__ or ())]
    held += (call.__kwdefaults__ or {}).values()
    return all(map(_is_calm, held))


def _is_calm(value: Any) -> bool:
    """Whether it is data, or computes; of subclasses, as of defaultdict, nothing is known."""
    kind = type(value)
    if kind is dict:
        value = [*value.items()]
    if kind in (dict, list, tuple, set, frozenset):
        return _is_plain(value)
    is_data = kind in {*_ATOMS, np.ndarray, torch.Tensor}
    return is_data or any(value is computing for computing in _COMPUTING)


def may_draw_outside_torch(call: Any) -> bool:
    """True if a callable may draw from Python's or NumPy's generators.

    All that its code names is followed: globals, closures, attributes, methods. The code of torch,
    NumPy and Python itself is not followed, and that of other installed packages only within one
    module. Code that names more than can be followed in a few milliseconds may draw.

    Example:
        >>> may_draw_outside_torch(torch.rand), may_draw_outside_torch(np.random.rand)
        (False, True)
    """
    met: dict[Any, Any] = {}  # holds what it met, so that no id comes twice
    waiting = [call]
    while waiting:
        value = waiting.pop()
        is_method = type(value) in (types.MethodType, types.BuiltinMethodType)
        owner = value.__self__ if is_method else None
        # The functions of random and numpy.random are methods of generators.
        if isinstance(value, _GENERATORS) or isinstance(owner, _GENERATORS):
            return True
        key = id(getattr(value, "__func__", value) if is_method else value), id(owner)
        if key not in met:
            met[key] = value
            waiting += _held_by(value)
            if len(met) > _MOST_FOLLOWED:
                return True
    return False


_GENERATORS = (random.Random, np.random.RandomState, np.random.Generator, np.random.BitGenerator)
_MOST_FOLLOWED = 1000


def _held_by(value: Any) -> Iterator[Any]:
    """Yield what a call of this value may use, as far as its code is followed."""
    held: Iterable[Any] = ()
    is_object = not isinstance(value, (type, types.ModuleType))
    if isinstance(value, (types.FunctionType, types.MethodType)):
        held = _named_by(value)
    elif isinstance(value, (list, tuple, set, frozenset)):
        held = value
    elif isinstance(value, dict):
        held = value.values()
    elif isinstance(value, functools.partial):
        held = (value.func, value.args, value.keywords)
    elif is_object and _is_leaf(type(value)):
        held = getattr(value, "__dict__", {}).values()  # of an nn.Sequential
    yield from (each for each in held if type(each) not in _ATOMS)
    for name, member in _members_of(value):
        method = _bound(member, value)
        was_called = is_object and name in ("__init__", "__new__")
        if isinstance(method, types.MethodType) and not was_called:
            yield method


def _named_by(call: types.FunctionType | types.MethodType) -> Iterator[Any]:
    """Yield what code may use: the values around it, and the members of its object."""
    owner = getattr(call, "__self__", None)
    function: Any = getattr(call, "__func__", call)
    if not isinstance(function, types.FunctionType):
        yield from (function, owner)
        return
    if _is_leaf(function):
        return
    names = _names_in(function.__code__)
    held = [function.__globals__[name] for name in names & function.__globals__.keys()]
    module = function.__module__
    if _is_installed(getattr(sys.modules.get(module), "__file__", None) or ""):
        held = [it for it in held if _is_leaf(it) or getattr(it, "__module__", None) == module]
    empty = types.CellType()
    held += [cell.cell_contents for cell in function.__closure__ or () if cell != empty]
    held += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    maybe_imported = names & sys.modules.keys()
    if maybe_imported:  # else there is no need to read instructions, which takes a millisecond
        steps = read_code(function.__code__)[1]
        imported = {step.argval for step in steps if step.opname == "IMPORT_NAME"}
        held += [sys.modules[name] for name in maybe_imported & imported]
    if owner is not None:
        attributes = getattr(owner, "__dict__", {})
        attributes = {**attributes, **attributes.get("_modules", {})}  # of an nn.Module
        held += [attributes[name] for name in names & attributes.keys()]
        held += [_bound(member, owner) for name, member in _members_of(owner) if name in names]
    for value in held:
        yield from _named_in(value, names)


def _names_in(code: types.CodeType) -> frozenset[str]:
    """The names that code and the functions in it look up or import."""
    inner = (_names_in(value) for value in code.co_consts if isinstance(value, types.CodeType))
    return frozenset(code.co_names).union(*inner)


def _named_in(value: Any, names: frozenset[str]) -> Iterator[Any]:
    """Yield a value, or of a module what code that looks up these names may use of it."""
    if not isinstance(value, types.ModuleType):
        yield value
        return
    for name in names & vars(value).keys():
        yield from _named_in(vars(value)[name], names - {name})


def _members_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the members of a class, or of an object's class, by name; also of its bases."""
    kind = value if isinstance(value, type) else type(value)
    for base in kind.__mro__:
        if not _is_leaf(base):
            yield from vars(base).items()


def _bound(member: Any, owner: Any) -> Any:
    """A method of any kind, or a property, as a method of its object; what a slot has in it."""
    if isinstance(member, types.MemberDescriptorType) and not isinstance(owner, type):
        return getattr(owner, member.__name__, None)
    function = member
    for name in ("__func__", "fget", "func"):
        function = getattr(function, name, function)
    return types.MethodType(function, owner) if isinstance(function, types.FunctionType) else member


def _is_leaf(value: Any) -> bool:
    """True for modules, functions and classes whose code is not followed."""
    attribute = "__name__" if isinstance(value, types.ModuleType) else "__module__"
    package = str(getattr(value, attribute, "")).partition(".")[0]
    return package in _BY_NAME and package not in ("timm", "torchvision")


def describe_dataset(dataset: Any, cache_key: str | None = None) -> str:
    """Text for any dataset: its class, and a hash of all of it; or of its lists and the key."""
    *subsets, inner = unwrapped(dataset)
    kind = name_of(type(inner)) or type(inner).__qualname__
    if cache_key is None:
        return f"{kind} {describe(dataset)}"
    listed: list[Any] = [(type(subset), list(subset.indices)) for subset in subsets]
    listed += [getattr(inner, name, None) for name in _LISTS + _CHANGES]
    listed.append(cache_key)
    return f"{kind} {describe(listed, cache_key)}"


def is_listed(dataset: Any) -> bool:
    """Whether a list of samples or targets tells a dataset from others of its class."""
    *_, inner = unwrapped(dataset)
    return any(hasattr(inner, name) for name in _LISTS)


def unwrapped(dataset: Any) -> Iterator[Any]:
    """A subset of a subset, each, and last the dataset that they are of."""
    yield dataset
    while hasattr(dataset, "indices") and hasattr(dataset, "dataset"):
        dataset = dataset.dataset
        yield dataset


def name_of(code: Any) -> str | None:
    """What stands for an installed function or class; None for the user's own or a nameless one."""
    module: Any = getattr(code, "__module__", None)
    qualname: Any = getattr(code, "__qualname__", None)
    is_named = isinstance(module, str) and isinstance(qualname, str)
    origin = _origin(module) if is_named else None
    if origin is None:
        return None
    # What has another's name, as a closure or a class made in a function, is not that other.
    named: Any = sys.modules.get(module)
    for name in qualname.split("."):
        named = getattr(named, name, None)
    is_static = isinstance(code, type) and not code.__flags__ & _HEAP_TYPE
    return f"{origin}.{qualname}" if named is code or is_static else None


@functools.cache
def _origin(module: str) -> str | None:
    """What stands for an installed module; None for the user's own, which may change in any run."""
    package = module.partition(".")[0]
    if package in _BY_NAME:
        return module
    path = getattr(sys.modules.get(module), "__file__", None)
    if path is None:
        return None
    # A module of C, and what lies among installed packages, changes only with its file.
    if path.endswith(".py") and not _is_installed(path):
        return None
    version = getattr(sys.modules.get(package), "__version__", "")
    return f"{module} {version} {_hash_of_file(path)}"


def _is_installed(path: str) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(path).parts)


class _Describer(pickle.Pickler):
    """Pickles Python's own, and of all else what stands for it, as persistent ids; one way only."""

    def __init__(self, file: Any, name: str, cache_key: str | None) -> None:
        super().__init__(file, protocol=4)
        # Without the memo, which would tell equal values from one that comes twice.
        self.fast = True
        self._name = name
        self._cache_key = cache_key
        self._met: dict[int, tuple[int, Any]] = {}

    def persistent_id(self, value: Any) -> Any:
        kind = type(value)
        if kind in _ATOMS or kind is dict:
            return None
        if kind is list or kind is tuple:
            return (kind.__name__, repr(value)) if _is_plain(value) else None
        if id(value) in self._met:
            return self._met[id(value)][0]
        if hasattr(value, "__dict__"):  # may lead back to itself
            self._met[id(value)] = len(self._met), value  # which stays alive, and its id its own
        try:
            return name_of(value) or (kind.__name__, *self._parts(value))
        except Exception as unseen:  # what pickles a value may raise anything
            if self._cache_key is not None:
                return kind.__qualname__, self._cache_key
            raise ValueError(
                f"{self._name} cannot be told from others: what is of type {kind.__module__}."
                f"{kind.__qualname__} cannot be described exactly ({unseen}), and the next run, or "
                "another rank, must know whether samples are still prepared in the same way. Give "
                "cache_key='a name' to stand for it, and change it whenever that changes."
            ) from unseen

    def _parts(self, value: Any) -> tuple[Any, ...]:
        """What a value consists of, which is asked for in turn."""
        kind = type(value)
        if kind is types.CodeType:
            return tuple(getattr(value, fact, b"") for fact in _CODE_FACTS)
        if kind is types.FunctionType:
            code = value.__code__
            empty = types.CellType()
            closed = [cell.cell_contents for cell in value.__closure__ or () if cell != empty]
            defaults = (value.__defaults__, value.__kwdefaults__)
            return code, defaults, closed, vars(value), _globals_of(code, value.__globals__)
        if kind in _WRAPPING:
            return tuple(getattr(value, part, None) for part in _WRAPPED)
        if kind in (set, frozenset):
            # In an order that no seed of hashes changes.
            return tuple(sorted(describe(each, self._cache_key) for each in value))
        if isinstance(value, type):
            return kind, value.__qualname__, value.__bases__, _contents_of(value)
        if isinstance(value, torch.Tensor):
            # As bytes, because NumPy has no bfloat16.
            packed = value.detach().cpu().contiguous()
            octets = packed.reshape(-1).view(torch.uint8).numpy()
            return kind, str(value.dtype), list(value.shape), octets, vars(value)
        if kind in (np.ndarray, np.memmap) and not value.dtype.hasobject:
            octets = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            return repr(value.dtype), list(value.shape), _hash_of(octets)
        if isinstance(value, types.ModuleType):
            return (_origin(value.__name__) or _hash_of_file(value.__file__),)
        # Not of one that it only passes on, as a dataset around another may.
        if inspect.getattr_static(value, "_fastdata_identity", None) is not None:
            return kind, value._fastdata_identity
        if kind in _LOCKS:
            return ()
        return kind, *_reduced(value)


def _is_plain(values: Collection[Any]) -> bool:
    """Whether there are only atoms, or tuples of these: the text is exact, and 20 times as fast."""
    kinds = set(map(type, values))
    if kinds == {tuple}:
        kinds = set(map(type, itertools.chain.from_iterable(values)))
    return kinds <= _ATOMS


def _hash_of(data: Any) -> str:
    """Of the bytes of a file or an array."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _hash_of_file(path: str | None) -> str:
    """Of the bytes of a module's file; that of a namespace is no path."""
    return _hash_of(Path(str(path)).read_bytes())


def _contents_of(kind: type) -> list[tuple[str, Any]]:
    """A class's own methods and values; what Python notes beside them does nothing."""
    code = (types.FunctionType, *_DESCRIPTORS)
    return [
        (name, value)
        for name, value in sorted(vars(kind).items())
        if name not in _NOTES and (isinstance(value, code) or not name.startswith("__"))
    ]


def _reduced(value: Any) -> Iterator[Any]:
    """What pickle would call to make it again, and what that may leave out."""
    kind = type(value)
    # As pickle does: what is registered for a class counts before its methods.
    reduce = copyreg.dispatch_table.get(kind)
    reduced = reduce(value) if reduce else value.__reduce_ex__(4)
    for part in reduced:
        yield list(part) if isinstance(part, Iterator) else part
    hidden = getattr(value, "__dict__", {})
    if _origin(kind.__module__) is not None:
        yield hidden.get("__wrapped__")
    elif all(part is not hidden for part in reduced):  # the class itself says how it pickles
        yield hidden


def _globals_of(code: types.CodeType, namespace: Mapping[str, Any]) -> dict[str, Any]:
    """The globals that code names, by name; of the user's own modules what it may use of them."""
    names, steps = read_code(code)
    held = {}
    constants = []
    # Names of attributes and globals look alike in co_names: instructions tell them apart.
    for step in steps:
        name = step.argval
        if step.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
            constants.append(name)
        elif step.opname == "IMPORT_NAME":
            level, wanted = constants[-2:]
            imported = __import__(name, namespace, None, wanted, level)
            held[f"import {level} {name}"] = _used_of(imported, names)
        elif name in namespace and ("GLOBAL" in step.opname or step.opname == "LOAD_NAME"):
            held[name] = _used_of(namespace[name], names)
    return held


def read_code(code: types.CodeType) -> tuple[frozenset[str], list[dis.Instruction]]:
    """The names that code and the functions in it look up, and their instructions."""
    names = set(code.co_names)
    steps = list(dis.get_instructions(code))
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            inner_names, inner_steps = read_code(value)
            names |= inner_names
            steps += inner_steps
    return frozenset(names), steps


def _used_of(value: Any, names: frozenset[str]) -> Any:
    """A value, or what code that looks up these names may use of a module."""
    if not isinstance(value, types.ModuleType) or _origin(value.__name__) is not None:
        return value
    # Of a whole module, only what may be used: any other change in it changes nothing here.
    held = vars(value)
    used = [
        (name, _used_of(held[name], names - {name})) for name in sorted(names.intersection(held))
    ]
    return value.__name__, used

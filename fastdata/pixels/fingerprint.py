"""Hashes of what values do, for the keys of caches.

The hash is equal for values made alike, in any process, and differs after every change. It covers
attributes at any depth, code with its constants, defaults, closures and the globals that it names,
and the bytes of arrays and tensors. Installed code is covered by its name: Python's own and that of
the packages whose transforms fastdata knows in any version, other packages' with their version and
the hash of the file. It does not cover what code reads elsewhere: files, the environment, the
clock. Values that only C code knows, and functions that import when they are called, are refused by
name, and ``cache_key=`` stands for them.
"""

from __future__ import annotations

import copyreg
import functools
import hashlib
import inspect
import itertools
import pickle
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastdata.pixels.bytecode import read_code

BY_NAME = {"PIL", "fastdata", "numpy", "timm", "torch", "torchvision", *sys.stdlib_module_names}
"""Packages whose code is covered by its name alone."""
ATOMS = (type(None), bool, int, float, str, bytes)
_DESCRIPTORS = (classmethod, staticmethod, property)
_WRAPPED = ("__self__", "__func__", "fget", "fset")
_CODE_PARTS = (
    *("co_code", "co_consts", "co_names", "co_varnames", "co_freevars", "co_cellvars"),
    *("co_flags", "co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_exceptiontable"),
)

_NOTES = {"_abc_impl", "__annotate__", "__annotate_func__"}
"""Attributes in which Python notes something about a class."""
_HEAP_TYPE = 1 << 9
"""The flag of classes that Python code made (Py_TPFLAGS_HEAPTYPE of Python's C code)."""


def fingerprint(value: Any, cache_key: str | None = None, *, covers_code: bool = True) -> str:
    """Return a hash of what a value does; ``cache_key`` stands for parts that cannot be covered.

    Without ``covers_code`` classes and functions are covered by their names only, so that the hash
    is of what a value holds.

    Raises:
        ValueError: a part cannot be covered, such as one that only C code can read, and there was
            no ``cache_key``. The text names its type.

    Example:
        >>> fingerprint([1, 2]) == fingerprint([1, 2]), fingerprint([1, 2]) == fingerprint([1.0, 2])
        (True, False)
    """
    digest = hashlib.blake2b(digest_size=12)
    name = getattr(value, "__qualname__", type(value).__qualname__)
    file = types.SimpleNamespace(write=digest.update)
    _Describer(file, name, cache_key, covers_code=covers_code).dump(value)
    return digest.hexdigest()


def name_of(code: Any) -> str | None:
    """Return a text that identifies an installed function or class.

    Return None for the user's own, and for those that are not found under their name.
    """
    module = getattr(code, "__module__", None)
    qualname = getattr(code, "__qualname__", None)
    if not (isinstance(module, str) and isinstance(qualname, str)):
        return None
    origin = _origin(module)
    if origin is None:
        return None
    # A closure, or a class made in a function, may have the name of something else.
    named: Any = sys.modules.get(module)
    for name in qualname.split("."):
        named = getattr(named, name, None)
    # Python's own types, such as that of functions, are not all found under their names.
    is_static = isinstance(code, type) and not code.__flags__ & _HEAP_TYPE
    if named is code or is_static:
        return f"{origin}.{qualname}"
    return None


@functools.cache
def _origin(module: str) -> str | None:
    """Return a text that identifies an installed module; None for the user's own.

    The user's modules may change from run to run, so their contents are hashed instead.
    """
    package = module.partition(".")[0]
    if package in BY_NAME:
        return module
    path = getattr(sys.modules.get(module), "__file__", None)
    # An installed module, and one written in C, changes only with its file.
    if path is None or (path.endswith(".py") and not is_installed(path)):
        return None
    version = getattr(sys.modules.get(package), "__version__", "")
    return f"{module} {version} {_hash_of(Path(path).read_bytes())}"


def is_installed(path: str) -> bool:
    """Return True for the path of a module that a package manager has installed."""
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(path).parts)


class _Describer(pickle.Pickler):
    """A pickler whose output is hashed, never read.

    Containers and plain values of Python are pickled normally. Everything else is replaced by a
    persistent id: a name, or a tuple of its parts, which are pickled in turn.
    """

    def __init__(self, file: Any, name: str, cache_key: str | None, *, covers_code: bool) -> None:
        super().__init__(file, protocol=4)
        # The memo would write one object that comes twice otherwise than two equal ones.
        self.fast = True
        self._name = name
        self._cache_key = cache_key
        self._covers_code = covers_code
        self._met: dict[int, tuple[int, Any]] = {}

    def persistent_id(self, value: Any) -> Any:
        kind = type(value)
        if kind in ATOMS or kind is dict:
            return None
        if kind is list or kind is tuple:
            if is_plain(value):
                return kind.__name__, repr(value)
            return None
        if not self._covers_code and isinstance(value, (type, types.FunctionType)):
            return value.__qualname__
        if id(value) in self._met:
            return self._met[id(value)][0]
        # Objects with attributes may lead back to themselves: the second time, a number stands for
        # one. They are kept alive here, so that no other object gets the same id.
        if hasattr(value, "__dict__"):
            self._met[id(value)] = len(self._met), value
        try:
            if kind is set or kind is frozenset:
                # The order of a set differs from process to process.
                hashes = [
                    fingerprint(each, self._cache_key, covers_code=self._covers_code)
                    for each in value
                ]
                return kind.__name__, sorted(hashes)
            return name_of(value) or (kind, *_parts_of(value))
        except Exception as problem:  # the user's code that pickles a value may raise anything
            if self._cache_key is not None:
                return kind.__qualname__, self._cache_key
            raise ValueError(
                f"{self._name} contains a {kind.__module__}.{kind.__qualname__} that cannot be "
                f"described exactly ({problem}). The next run, or another rank, could not tell if "
                "samples are still prepared in the same way. Give cache_key='a name' to stand for "
                "it, and change the name whenever it changes."
            ) from problem


def _parts_of(value: Any) -> Iterable[Any]:
    """Return the parts of a value that together determine what it does."""
    if isinstance(value, type):
        return _parts_of_class(value)
    if isinstance(value, torch.Tensor):
        return _parts_of_tensor(value)
    return _PARTS_OF.get(type(value), _parts_of_object)(value)


def _parts_of_code(code: types.CodeType) -> Iterable[Any]:
    """Return everything in code but its file and its lines, which may change without effect."""
    return [getattr(code, name, b"") for name in _CODE_PARTS]


def _parts_of_function(function: types.FunctionType) -> Iterable[Any]:
    code = function.__code__
    yield code
    yield closed_over(function)
    yield _globals_of(code, function.__globals__)
    yield function.__defaults__
    yield function.__kwdefaults__
    yield vars(function)


def closed_over(function: types.FunctionType) -> list[Any]:
    """Return the values that a function closes over, without those that are not assigned yet."""
    empty = types.CellType()
    return [cell.cell_contents for cell in function.__closure__ or () if cell != empty]


def _parts_of_wrapper(wrapper: Any) -> Iterable[Any]:
    return [getattr(wrapper, name, None) for name in _WRAPPED]


def _parts_of_class(kind: type) -> Iterable[Any]:
    """Yield the name, the bases, and the methods and values that a class defines."""
    yield kind.__qualname__
    yield kind.__bases__
    code = (types.FunctionType, *_DESCRIPTORS)
    for name, value in sorted(vars(kind).items()):
        is_own = isinstance(value, code) or not name.startswith("__")
        if is_own and name not in _NOTES:
            yield name
            yield value


def _parts_of_tensor(tensor: torch.Tensor) -> Iterable[Any]:
    yield str(tensor.dtype)
    yield list(tensor.shape)
    # Bytes, because NumPy does not have bfloat16.
    packed = tensor.detach().cpu().contiguous()
    yield packed.reshape(-1).view(torch.uint8).numpy()
    yield vars(tensor)


def _parts_of_array(array: np.ndarray) -> Iterable[Any]:
    if array.dtype.hasobject:
        return _parts_of_object(array)
    octets = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return [repr(array.dtype), list(array.shape), _hash_of(octets)]


def _parts_of_module(module: types.ModuleType) -> Iterable[Any]:
    origin = _origin(module.__name__)
    return [origin or _hash_of(Path(str(module.__file__)).read_bytes())]


def _parts_of_object(value: Any) -> Iterable[Any]:
    """Yield what pickle would store of an object, and the attributes that pickle leaves out."""
    # The static look-up finds no attribute that a wrapper passes on from the dataset inside it.
    if inspect.getattr_static(value, "_fastdata_identity", None) is not None:
        yield value._fastdata_identity
        return
    kind = type(value)
    # A function that is registered for a class goes before its methods, as in pickle.
    reduce = copyreg.dispatch_table.get(kind)
    reduced = reduce(value) if reduce else value.__reduce_ex__(4)
    for part in reduced:
        yield list(part) if isinstance(part, Iterator) else part
    hidden = getattr(value, "__dict__", {})
    if _origin(kind.__module__) is not None:
        yield hidden.get("__wrapped__")
    elif all(part is not hidden for part in reduced):  # the class defines how it is pickled
        yield hidden


_PARTS_OF: dict[type, Callable[[Any], Iterable[Any]]] = {
    types.CodeType: _parts_of_code,
    types.FunctionType: _parts_of_function,
    types.ModuleType: _parts_of_module,
    np.ndarray: _parts_of_array,
    np.memmap: _parts_of_array,
    **dict.fromkeys((*_DESCRIPTORS, types.MethodType), _parts_of_wrapper),
}


def is_plain(values: Collection[Any]) -> bool:
    """Return True if there are only atoms, or only tuples of atoms.

    The ``repr`` of such a container is exact, and takes a twentieth of the time.
    """
    kinds = set(map(type, values))
    if kinds == {tuple}:
        kinds = set(map(type, itertools.chain.from_iterable(values)))
    return kinds.issubset(ATOMS)


def _hash_of(data: Any) -> str:
    """Return the hash of the bytes of a file or an array."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _globals_of(code: types.CodeType, namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Return the globals that code names; of the user's modules only what it may use of them.

    Raises:
        ValueError: the code imports a module that may change when it is called.
    """
    names, instructions = read_code(code)
    held = {}
    # Names of attributes and globals are together in co_names: only instructions tell them apart.
    # Without that, an attribute `self.model` would cover a global `model` of the user's script.
    for instruction in instructions:
        name = instruction.argval
        opname = instruction.opname
        if opname == "IMPORT_NAME" and name.partition(".")[0] not in BY_NAME:
            raise ValueError(f"it imports {name or 'a module'} when it is called, not at the top")
        is_global = "GLOBAL" in opname or opname == "LOAD_NAME"
        if is_global and name in namespace:
            held[name] = _used_of(namespace[name], names)
    return held


def _used_of(value: Any, names: frozenset[str]) -> Any:
    """Return a value. Of the user's module, return what code with these names may look up in it.

    No other change in the module changes the hash.
    """
    if not isinstance(value, types.ModuleType) or _origin(value.__name__) is not None:
        return value
    held = vars(value)
    used = []
    for name in sorted(names & held.keys()):
        used += [name, _used_of(held[name], names - {name})]
    return value.__name__, used

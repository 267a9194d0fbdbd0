"""Hashes of the behaviour of values (transforms, functions, objects), for the keys of caches.

The hash is equal for equally made values, in any process, and differs after any change. It covers
attributes at any depth; code with its constants, defaults, closures and the globals that it names;
and the bytes of arrays and tensors.

Installed code is covered by its name. For Python itself and the packages in ``BY_NAME`` the version
does not count, because fastdata handles all versions of them; for other packages the version and
the hash of the file count too.

The hash does not cover what code reads elsewhere: files, the environment, the clock. Values that
only C code can read, and functions that import modules when they are called, raise an error that
names them; ``cache_key=`` can stand for them.
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
"""Packages whose code is covered by its name only."""
ATOMS = (type(None), bool, int, float, str, bytes)
_DESCRIPTORS = (classmethod, staticmethod, property)
_WRAPPED = ("__self__", "__func__", "fget", "fset")
_CODE_PARTS = (
    *("co_code", "co_consts", "co_names", "co_varnames", "co_freevars", "co_cellvars"),
    *("co_flags", "co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_exceptiontable"),
)

_NOTES = {"_abc_impl", "__annotate__", "__annotate_func__"}
"""Attributes of a class in which Python keeps internal notes."""
_HEAP_TYPE = 1 << 9
"""Flag of classes that were made by Python code (Py_TPFLAGS_HEAPTYPE in Python's C code)."""


def fingerprint(value: Any, cache_key: str | None = None, *, covers_code: bool = True) -> str:
    """Return a hash of the behaviour of a value, as a text of 24 characters.

    Args:
        value: a transform, a function, or any other object.
        cache_key: text that stands for parts that cannot be covered.
        covers_code: False to cover classes and functions by their names only. Then only the data
            that a value holds are hashed.

    Raises:
        ValueError: a part cannot be covered, because only C code can read it, and there is no
            ``cache_key``. The text names its type.

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

    Return None for the user's own code, and for code that cannot be found by its name.
    """
    module = getattr(code, "__module__", None)
    qualname = getattr(code, "__qualname__", None)
    if not (isinstance(module, str) and isinstance(qualname, str)):
        return None
    origin = _origin(module)
    if origin is None:
        return None
    # A closure, or a class that was made inside a function, may share its name with another object.
    named: Any = sys.modules.get(module)
    for name in qualname.split("."):
        named = getattr(named, name, None)
    # Some of Python's own types, such as that of functions, cannot be found by their names.
    is_static = isinstance(code, type) and not code.__flags__ & _HEAP_TYPE
    if named is code or is_static:
        return f"{origin}.{qualname}"
    return None


@functools.cache
def _origin(module: str) -> str | None:
    """Return a text that identifies an installed module; None for a module of the user.

    The user's modules may change between runs, so their contents are hashed instead.
    """
    package = module.partition(".")[0]
    if package in BY_NAME:
        return module
    path = getattr(sys.modules.get(module), "__file__", None)
    # A script that Python reads from its standard input has the "file" <stdin>.
    if path is None or not Path(path).is_file():
        return None
    # An installed module, or one written in C, changes only if its file changes.
    if path.endswith(".py") and not is_installed(path):
        return None
    version = getattr(sys.modules.get(package), "__version__", "")
    return f"{module} {version} {_hash_of(Path(path).read_bytes())}"


def is_installed(path: str) -> bool:
    """Return True if a package manager has installed the module at this path."""
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(path).parts)


class _Describer(pickle.Pickler):
    """A pickler whose output is hashed, and never unpickled.

    Containers and plain values of Python are pickled normally. Everything else is replaced by a
    persistent id: a name, or a tuple of its parts, which are pickled in the same way.
    """

    def __init__(self, file: Any, name: str, cache_key: str | None, *, covers_code: bool) -> None:
        super().__init__(file, protocol=4)
        # Without pickle's memo. With it, a list that holds one object twice would be written
        # differently from a list of two equal objects; their hashes must be equal.
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
        # Objects with attributes may refer to themselves, directly or not: the second time, a
        # number stands for the object. The objects are kept alive here, so that no id is used
        # again.
        if hasattr(value, "__dict__"):
            self._met[id(value)] = len(self._met), value
        try:
            if kind is set or kind is frozenset:
                # The order of a set differs between processes.
                hashes = [
                    fingerprint(each, self._cache_key, covers_code=self._covers_code)
                    for each in value
                ]
                return kind.__name__, sorted(hashes)
            return name_of(value) or (kind, *_parts_of(value))
        except Exception as problem:  # code of the user that pickles a value may raise anything
            if self._cache_key is not None:
                return kind.__qualname__, self._cache_key
            raise ValueError(
                f"{self._name} contains a {kind.__module__}.{kind.__qualname__} that cannot be "
                f"described exactly ({problem}). So fastdata could not detect, in the next run or "
                "on another rank, that samples must be prepared in another way. Pass "
                "cache_key='a name' to stand for it, and change the name whenever it changes."
            ) from problem


def _parts_of(value: Any) -> Iterable[Any]:
    """Return the parts of a value that together determine its behaviour."""
    if isinstance(value, type):
        return _parts_of_class(value)
    if isinstance(value, torch.Tensor):
        return _parts_of_tensor(value)
    return _PARTS_OF.get(type(value), _parts_of_object)(value)


def _parts_of_code(code: types.CodeType) -> Iterable[Any]:
    """Return all parts of code except its file and line numbers, which have no effect."""
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
    """Return the values in the closure of a function, without those that are not assigned yet."""
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
    # As bytes, because NumPy does not have bfloat16.
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
    # Looked up statically: a wrapper with __getattr__ would return the attribute of the dataset
    # inside it.
    if inspect.getattr_static(value, "_fastdata_identity", None) is not None:
        yield value._fastdata_identity
        return
    kind = type(value)
    # As in pickle, a function that is registered for a class overrides its methods.
    reduce = copyreg.dispatch_table.get(kind)
    reduced = reduce(value) if reduce else value.__reduce_ex__(4)
    for part in reduced:
        yield list(part) if isinstance(part, Iterator) else part
    hidden = getattr(value, "__dict__", {})
    if _origin(kind.__module__) is not None:
        yield hidden.get("__wrapped__")
    elif all(part is not hidden for part in reduced):  # the class has its own way of pickling
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
    """Return True if a container has only plain values, or only tuples of plain values.

    The ``repr`` of such a container is exact, and takes a twentieth of the time of pickling it.
    """
    kinds = set(map(type, values))
    if kinds == {tuple}:
        kinds = set(map(type, itertools.chain.from_iterable(values)))
    return kinds.issubset(ATOMS)


def _hash_of(data: Any) -> str:
    """Return the hash of the bytes of a file or an array."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _globals_of(code: types.CodeType, namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Return the globals that code names; for a module of the user, only the parts it can use.

    Raises:
        ValueError: the code imports a module that may change when it is called.
    """
    names, instructions = read_code(code)
    held = {}
    # co_names has attributes and globals together, and only instructions distinguish them. Without
    # that, using an attribute `self.model` would cover a global `model` of the user's script.
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
    """Return a value; for a module of the user, only the parts that code with these names can use.

    Other changes in the module then do not change the hash.
    """
    if not isinstance(value, types.ModuleType) or _origin(value.__name__) is not None:
        return value
    held = vars(value)
    used = []
    for name in sorted(names & held.keys()):
        used += [name, _used_of(held[name], names - {name})]
    return value.__name__, used

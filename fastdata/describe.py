"""What a value does, as a hash: one for values that are made alike, in any process, and another for each difference.

Seen are attributes, of attributes too, code with its constants, defaults, closures, and the globals that it names,
arrays and tensors by their bytes. Code that is installed is known by its name: Python's own and that of the packages
whose steps fastdata knows in any version, other packages' with their version and the hash of the file. Not seen is what
code reads elsewhere: files, the environment, the clock.
"""

from __future__ import annotations

import builtins
import copyreg
import dis
import functools
import hashlib
import importlib.util
import inspect
import itertools
import pickle
import sys
import threading
import types
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

_BY_NAME = {"PIL", "fastdata", "numpy", "timm", "torch", "torchvision", *sys.stdlib_module_names}
_ATOMS = {type(None), bool, int, float, str, bytes}
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_CODE = (types.FunctionType, classmethod, staticmethod, property)
_CODE_FACTS = ["co_code", "co_consts", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_flags"]
_CODE_FACTS += ["co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_exceptiontable"]
_COMPUTING = {"abs", "bool", "dict", "divmod", "float", "int", "len", "list", "max", "min", "round", "str", "tuple"}
_HEAP_TYPE = 1 << 9
"""The flag of Python's C code that classes of Python code have (Py_TPFLAGS_HEAPTYPE)."""


def describe(value: Any, cache_key: str | None = None) -> str:
    """Hash of what a value does; ``cache_key`` stands for all in it that cannot be seen.

    Raises:
        ValueError: something in it cannot be seen, as what only C code knows, and there is no ``cache_key``; names it.

    Example:
        >>> describe([1, 2]) == describe([1, 2]), describe([1, 2]) == describe([1.0, 2])
        (True, False)
    """
    digest = _Digest()
    try:
        _Describer(digest, value, cache_key).dump(value)
    except RecursionError as deep:
        raise ValueError(_refusal(value, value, "it is nested too deep")) from deep
    return digest.hexdigest()


def draws_nothing(call: Any) -> bool:
    """Whether a function surely draws no random number: it names nothing but plain data and what computes with it.

    Example:
        >>> table = {0: 1, 1: 0}
        >>> draws_nothing(lambda label: table[label]), draws_nothing(lambda label: label + torch.rand(()))
        (True, False)
    """
    if isinstance(call, types.FunctionType):
        named = inspect.getclosurevars(call)
        is_flat = not any(isinstance(constant, types.CodeType) for constant in call.__code__.co_consts)
        held = [*named.nonlocals.values(), *named.globals.values(), *(call.__defaults__ or ())]
        return is_flat and not named.unbound and _COMPUTING.issuperset(named.builtins) and all(map(_is_data, held))
    if call is None or any(call is getattr(builtins, name) for name in _COMPUTING):
        return True
    owner = getattr(call, "__self__", None)  # of table.get, table.__getitem__
    return owner is not None and _is_data(owner)


def _is_data(value: Any) -> bool:
    if type(value) is dict:
        return _is_plain(value) and _is_plain(value.values())
    return _is_plain(value) if type(value) in (list, tuple) else type(value) in {*_ATOMS, np.ndarray, torch.Tensor}


def describe_dataset(dataset: Any, cache_key: str | None = None) -> str:
    """Text for any dataset: its class, and a hash of all of it; or of what it lists and the ``cache_key``."""
    inner, listed = dataset, list[Any]()
    while cache_key is not None and hasattr(inner, "indices") and hasattr(inner, "dataset"):
        listed.append((type(inner), list(inner.indices)))
        inner = inner.dataset
    if cache_key is not None:
        names = ("_identity", "samples", "targets", "transform", "target_transform", "transforms", "loader")
        listed += [cache_key, [(name, getattr(inner, name, None)) for name in names]]
    digest = describe(dataset) if cache_key is None else describe(listed, cache_key)
    return f"{name_of(type(inner)) or type(inner).__qualname__} {digest}"


def is_listed(dataset: Any) -> bool:
    """Whether a dataset has a list of its samples or targets, which tells it from others of its class."""
    while hasattr(dataset, "indices") and hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    return any(hasattr(dataset, name) for name in ("_identity", "samples", "targets"))


def name_of(code: Any) -> str | None:
    """What stands for a function or a class that is installed; None for the user's own, and what has no name."""
    module, qualname = getattr(code, "__module__", None), getattr(code, "__qualname__", None)
    if not (isinstance(module, str) and isinstance(qualname, str)) or (origin := _origin(module)) is None:
        return None
    found: Any = sys.modules.get(module)
    for name in qualname.split("."):
        found = getattr(found, name, None)
    is_static = isinstance(code, type) and not code.__flags__ & _HEAP_TYPE
    return f"{origin}.{qualname}" if found is code or is_static else None


@functools.cache
def _origin(module: str) -> str | None:
    """What stands for a module that is installed; None for the user's own, whose code may change in any run."""
    package = module.partition(".")[0]
    if package in _BY_NAME:
        return module
    path = getattr(sys.modules.get(module), "__file__", None)
    if path is None and module not in sys.modules:
        spec = importlib.util.find_spec(package)
        path = None if spec is None else spec.origin
    if path is None or (path.endswith(".py") and {"site-packages", "dist-packages"}.isdisjoint(Path(path).parts)):
        return None
    version = getattr(sys.modules.get(package), "__version__", "")
    return f"{module} {version} {hashlib.blake2b(Path(path).read_bytes(), digest_size=8).hexdigest()}"


class _Digest:
    """A file for pickles that keeps their hash."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=12)
        self.write, self.hexdigest = self._hash.update, self._hash.hexdigest


class _Describer(pickle.Pickler):
    """Pickles what is Python's own, and of all else what stands for it, as persistent ids; never to be unpickled."""

    def __init__(self, file: Any, whole: Any, cache_key: str | None) -> None:
        super().__init__(file, protocol=4)
        self.fast = True  # without the memo, which would tell equal values from one value that is there twice
        self._whole, self._cache_key = whole, cache_key
        self._met: dict[int, tuple[int, Any]] = {}

    def persistent_id(self, value: Any) -> Any:
        kind = type(value)
        if kind in _ATOMS or kind is dict:
            return None
        if kind is list or kind is tuple:
            return (kind.__name__, repr(value)) if _is_plain(value) else None
        if hasattr(value, "__dict__"):  # may lead back to itself
            if id(value) in self._met:
                return self._met[id(value)][0]
            self._met[id(value)] = len(self._met), value  # which stays alive, and its id its own
        try:
            return self._stand_in(value)
        except Exception as unseen:  # what pickles a value may raise anything
            if self._cache_key is None:
                raise ValueError(_refusal(self._whole, value, str(unseen), self._owner(value))) from unseen
            return kind.__qualname__, self._cache_key

    def _stand_in(self, value: Any) -> Any:
        kind = type(value)
        if (name := name_of(value)) is not None:
            return name
        if kind is set or kind is frozenset:
            return kind.__name__, sorted(describe(each, self._cache_key) for each in value)
        if kind is types.FunctionType:
            cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
            named = _globals_of(value.__code__, value.__globals__)
            return "function", value.__code__, value.__defaults__, value.__kwdefaults__, cells, vars(value), named
        if kind is types.CodeType:
            return "code", [getattr(value, name, b"") for name in _CODE_FACTS]
        if isinstance(value, type):
            return "class", kind, value.__qualname__, value.__bases__, _contents_of(value)
        if isinstance(value, torch.Tensor):
            data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            return "tensor", kind, str(value.dtype), list(value.shape), _hash_of(data), vars(value)
        if kind in (np.ndarray, np.memmap) and not value.dtype.hasobject:
            data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            return "array", repr(value.dtype), list(value.shape), _hash_of(data)
        if isinstance(value, types.ModuleType):
            return "module", _origin(value.__name__) or _hash_of(Path(str(value.__file__)).read_bytes())
        if kind is types.MethodType:
            return "method", value.__func__, value.__self__
        if kind is property:
            return "property", value.fget, value.fset, value.fdel
        if kind is classmethod or kind is staticmethod:
            return kind.__name__, value.__func__
        if kind is types.MappingProxyType:
            return kind.__name__, dict(value)
        if kind in _LOCKS:
            return kind.__name__
        if any(base.__module__.startswith("fastdata.") and hasattr(value, "_identity") for base in kind.__mro__):
            return kind, value._identity
        reduce = copyreg.dispatch_table.get(kind)
        reduced = value.__reduce_ex__(4) if reduce is None else reduce(value)
        made: Any = (reduced,) if isinstance(reduced, str) else reduced
        function, arguments, state, items, pairs = (*made, *(None,) * 5)[:5]
        return kind, function, arguments, state, list(items or ()), list(pairs or ()), _hidden_in(value)

    def _owner(self, value: Any) -> str:
        """What of all that was met has this value, and under which name."""
        for _, owner in reversed(self._met.values()):
            globals_ = owner.__globals__ if isinstance(owner, types.FunctionType) else {}
            for name, held in {**globals_, **vars(owner)}.items():
                if held is value:
                    return f"{name!r} of {getattr(owner, '__qualname__', type(owner).__qualname__)}"
        return ""


def _refusal(whole: Any, value: Any, why: str, owner: str = "") -> str:
    name = getattr(whole, "__qualname__", type(whole).__qualname__)
    found = f"{owner or 'something in it'}, of type {type(value).__module__}.{type(value).__qualname__},"
    return (
        f"{name} cannot be told from others: {'it' if value is whole else found} cannot be described exactly ({why}), "
        "and the next run, or another rank, must know whether samples are still prepared in the same way. Give "
        "cache_key='a name' to stand for it, and change it whenever that changes."
    )


def _is_plain(values: Collection[Any]) -> bool:
    """Whether a list holds atoms, or tuples of these, only: its text is exact then, and made 20 times as fast."""
    kinds = set(map(type, values))
    return kinds <= _ATOMS or (kinds == {tuple} and set(map(type, itertools.chain.from_iterable(values))) <= _ATOMS)


def _hash_of(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _contents_of(kind: type) -> list[tuple[str, Any]]:
    """A class's own methods and values; what Python notes beside them does nothing."""
    notes = {"_abc_impl", "__annotate__", "__annotate_func__"}
    return [
        (name, value)
        for name, value in sorted(vars(kind).items())
        if name not in notes and (isinstance(value, _CODE) or not name.startswith("__"))
    ]


def _hidden_in(value: Any) -> Any:
    """The attributes that a pickle may leave out: of the user's classes that say how, and of wrapped functions."""
    kind, hidden = type(value), getattr(value, "__dict__", {})
    if _origin(kind.__module__) is not None:
        return hidden.get("__wrapped__")
    how = ("__reduce_ex__", "__reduce__", "__getstate__")
    is_usual = all(getattr(kind, name, None) is getattr(object, name, None) for name in how)
    return None if is_usual else hidden


def _globals_of(code: types.CodeType, namespace: Mapping[str, Any]) -> dict[str, Any]:
    """The globals that code names, by name; of modules of the user's own what it may use of them."""
    codes = list(_nested(code))
    names = frozenset(itertools.chain.from_iterable(each.co_names for each in codes))
    found = {}
    for step in itertools.chain.from_iterable(map(dis.get_instructions, codes)):
        if step.opname == "IMPORT_NAME":
            found[f"import {step.argval}"] = _used_of(_imported(step.argval), names)
        elif step.argval in namespace and ("GLOBAL" in step.opname or step.opname == "LOAD_NAME"):
            found[step.argval] = _used_of(namespace[step.argval], names)
    return found


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            yield from _nested(value)


def _imported(name: str) -> Any:
    found = sys.modules.get(name) or (_origin(name) if name else None)
    if found is None:
        raise TypeError(f"it imports {name}, which is not there yet: import it where its module begins")
    return found


def _used_of(value: Any, names: frozenset[str]) -> Any:
    if not isinstance(value, types.ModuleType) or _origin(value.__name__) is not None:
        return value
    used = sorted(name for name in names if name in vars(value))
    return value.__name__, [(name, _used_of(vars(value)[name], names - {name})) for name in used]

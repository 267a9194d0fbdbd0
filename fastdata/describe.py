"""What samples are prepared by, as text: steps, loaders, codecs and datasets that do the same have the same.

Text is made of values that outlive a process. What cannot be told from others by such values, as a lambda, is refused;
or, among the ranks of one run, told by its code.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from fastdata.images import Resize
from fastdata.transforms import read_center_crop, read_resize
from fastdata.transforms.steps import known_name

_NAME_CHARACTERS = 12


def describe_steps(steps: Iterable[Callable[[Any], Any]], cache_key: str | None = None) -> str:
    """Text that is equal for steps that do the same, one after the other; ``cache_key`` as in ``describe_call``.

    Resize and centre crop of PIL images have one text whoever wrote them: torchvision v1, v2, or ``resize=``.
    """
    texts: list[str] = []
    is_pil = True
    for step in steps:
        resize = (step.size, "bilinear") if isinstance(step, Resize) else read_resize(step)
        crop = read_center_crop(step)
        is_pil = is_pil and not (resize is None and crop is None)
        if is_pil and resize is not None:
            size = tuple(resize[0]) if isinstance(resize[0], (list, tuple)) else resize[0]
            texts.append(f"resize {size} {resize[1]}")
        elif is_pil and crop is not None:
            texts.append(f"centre crop {crop}")
        else:
            texts.append(describe_call(step, cache_key))
    return " | ".join(texts)


def describe_call(call: Any, cache_key: str | None = None) -> str:
    """Text for something that can be called: its name and its code or its values.

    Raises:
        ValueError: there is none that would be the same in the next run, and no ``cache_key`` to stand for it.
    """
    text = _text_of(call)
    if text is not None:
        return text
    if cache_key is not None:
        return f"{type(call).__qualname__}, cache_key={cache_key!r}"
    raise ValueError(
        f"cache_dir= must know in the next run whether samples are still prepared in the same way, but {call!r} cannot "
        "be told from others: it is a lambda, is defined within a function, or shows its memory address. Use a "
        "function of a module or an object with a repr of its values; or give cache_key='a name' and change it "
        "whenever that code changes."
    )


def describe_in_run(call: Any) -> str:
    """Text for something that can be called, equal in processes that run one script; of a lambda its code."""
    text = _text_of(call)
    if text is not None:
        return text
    inner: Any = getattr(call, "__func__", call)
    code, cells = getattr(inner, "__code__", None), getattr(inner, "__closure__", None) or ()
    held = [cell.cell_contents for cell in cells], getattr(call, "__self__", None), getattr(call, "__dict__", None)
    words = (code and (code.co_code, code.co_consts, code.co_names), held, call)
    return re.sub(r" at 0x[0-9a-f]+", "", repr(words))


def _text_of(call: Any) -> str | None:
    if isinstance(call, functools.partial):
        inner, values = _text_of(call.func), f"{call.args!r}, {sorted(call.keywords.items())!r}"
        return None if inner is None or " at 0x" in values else f"partial({inner}, {values})"
    if inspect.isfunction(call) or inspect.isbuiltin(call) or inspect.isclass(call):
        if "<" in call.__qualname__ or getattr(call, "__self__", None) not in (None, inspect.getmodule(call)):
            return None
        return f"{call.__module__}.{call.__qualname__} {_digest_of_source(call)}".rstrip()
    text = " ".join(repr(call).split())
    if inspect.ismethod(call) or " at 0x" in text:
        return None
    if known_name(call) is not None:
        return f"{type(call).__module__.partition('.')[0]} {text}"
    return f"{type(call).__module__}.{type(call).__qualname__}: {text} {_digest_of_source(type(call))}".rstrip()


def _digest_of_source(call: Any) -> str:
    """Of the text of a function or class; empty for fastdata's own, and where there is none, as of what is built in."""
    if call.__module__.partition(".")[0] == "fastdata":
        return ""
    try:
        source = inspect.getsource(call)
    except (OSError, TypeError):
        code = getattr(call, "__code__", None)
        if code is None:
            return ""
        source = f"{code.co_code!r} {code.co_names!r} {code.co_varnames!r}"
    return hashlib.sha256(source.encode()).hexdigest()[:_NAME_CHARACTERS]


def describe_codec(codec: Any) -> str:
    from fastdata.codecs import OwnCodec, find_codec

    if codec in ("auto", "source"):
        return str(codec)
    if isinstance(codec, (tuple, list)):
        return " + ".join(map(describe_codec, codec))
    found = find_codec(codec)
    if isinstance(found, OwnCodec):
        return f"{type(found.codec).__module__}.{type(found.codec).__qualname__} {found.name}"
    return json.dumps(found.settings(), sort_keys=True)


def is_listed(dataset: Any) -> bool:
    """Whether a dataset has a list of its samples or targets, which tells it from others."""
    while hasattr(dataset, "indices") and hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    return hasattr(dataset, "samples") or hasattr(dataset, "targets")


def describe_dataset(dataset: Any, cache_key: str | None = None) -> str:
    """Text for any dataset: its class, its own transforms, its targets as far as it lists them, and ``cache_key``.

    Raises:
        ValueError: neither does it list its files in ``samples``, nor is there a ``cache_key``.
    """
    inner, words = dataset, []
    while hasattr(inner, "indices") and hasattr(inner, "dataset"):
        words.append(f"{type(inner).__qualname__} {_digest_of_values(list(inner.indices))}")
        inner = inner.dataset
    identity = getattr(inner, "identity", None)  # of formats.py's
    if cache_key is None and identity is None and not hasattr(inner, "samples"):
        raise ValueError(
            f"cache_dir= must know in the next run whether the samples of {type(inner).__name__} are still the same, "
            "but it does not list their files in an attribute samples. Give cache_key='a name' and change it whenever "
            "the data change."
        )
    words += [f"{type(inner).__module__}.{type(inner).__qualname__}", f"cache_key={cache_key!r}"]
    words += [] if identity is None else [f"identity={identity}"]
    for name in ("transform", "target_transform", "transforms", "loader"):
        if (call := getattr(inner, name, None)) is not None:
            words.append(f"{name}={describe_steps(getattr(call, 'transforms', None) or [call], cache_key)}")
    targets = getattr(inner, "targets", None)
    if targets is None:  # what ``samples`` has beside the paths
        targets = [item[1:] for item in getattr(inner, "samples", ()) if isinstance(item, (tuple, list))]
    words.append(f"targets {_digest_of_values(targets)}")
    return " ".join(words)


def _digest_of_values(values: Any) -> str:
    try:
        array = np.asarray(values)
    except ValueError:  # of several lengths
        array = np.empty(0, object)
    data = array.tobytes() if array.dtype.kind in "iufbU" else repr(list(values)).encode()
    return hashlib.sha256(data).hexdigest()[:_NAME_CHARACTERS]

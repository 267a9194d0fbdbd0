"""Lets griffe see the examples, which it knows as ``Examples:`` only, and each of several names that share a line."""

import re

import griffe

SHARED = re.compile(r"^( +)(\w+(?:, \w+)+): (.+(?:\n\1 +.+)*)$", re.MULTILINE)
"""``seed, rank: as of RankSampler``, and the lines that go on with it."""


def each_alone(shared: re.Match[str]) -> str:
    indent, names, text = shared.groups()
    return "\n".join(f"{indent}{name}: {text}" for name in names.split(", "))


class OwnSections(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is not None:
            text = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
            obj.docstring.value = SHARED.sub(each_alone, text)

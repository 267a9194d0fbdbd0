"""Show ``Example:`` sections, names that share a line, and the options of datasets in the site."""

import inspect
import re
from typing import Any

import griffe

from fastdata.stores.options import DatasetOptions

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

    def on_package(self, *, pkg: griffe.Module, **_: object) -> None:
        """Show every option of a dataset on its own page, with its default and meaning."""
        meanings = inspect.cleandoc(DatasetOptions.__doc__ or "").partition("Attributes:\n")[2]
        facts = pkg["stores.options.Options"].members
        for path in ("cached.CachedDataset", "folder.ImageFolder", "image_manifest.ImageManifest"):
            dataset: Any = pkg[f"datasets.{path}"]
            text = dataset.docstring.value
            dataset.docstring.value = text.replace(
                "    options: see ``DatasetOptions``.", meanings.rstrip()
            )
            parameters = dataset.members["__init__"].parameters
            del parameters["options"]
            for option in DatasetOptions.__annotations__:
                parameters.add(
                    griffe.Parameter(
                        option,
                        annotation=facts[option].annotation,
                        kind=griffe.ParameterKind.keyword_only,
                        default=facts[option].value,
                    )
                )

"""Lets griffe see the examples: it knows Google's section as ``Examples:`` only."""

import griffe


class ExampleSections(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")

"""Shows the section `Example:` of a docstring as code. The API reference knows the section as `Examples:`."""

import re
from typing import Any

import griffe


class ExampleSections(griffe.Extension):
    """An extension of griffe that renames the section before it is parsed."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Renames the section of one module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)

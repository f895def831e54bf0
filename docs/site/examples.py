"""griffe extension: an `Example:` of a docstring is shown as code.

griffe knows the section `Examples:`. It takes the singular, which most docstrings have, for a note in Markdown, where
`>>>` is a quotation within a quotation.
"""

import re
from typing import Any

from griffe import Extension, Object

HEADING = re.compile(r"^Example:$", re.MULTILINE)


class Examples(Extension):
    """Give the section the name that griffe knows, wherever a docstring has it."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Rename it once the object has been read, before its docstring is parsed."""
        if obj.docstring is not None:
            obj.docstring.value = HEADING.sub("Examples:", obj.docstring.value)

"""From text files to training batches: readers, tokenization, token stores, mixing and the loader."""

import importlib
from typing import Any

from windlass.errors import DataError

orjson: Any
try:
    import orjson
except ImportError:  # ten times slower, same result
    orjson = None


def import_optional(package: str) -> Any:
    """A package of the `data` extra; the error says how to install it."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise DataError(
            "data.package-missing",
            f"the package {package!r} is needed for this input, but it is not installed",
            hint="pip install 'windlass[data]'",
        ) from None

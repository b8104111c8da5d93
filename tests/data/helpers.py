"""Assertions on errors and Megatron indexes that the data tests share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from windlass.data.shards import index_parts
from windlass.errors import DataError, WindlassError


@contextmanager
def refused(code: str, *parts: str, error: type[WindlassError] = DataError) -> Iterator[None]:
    """The block must raise an error with this code whose message or hint holds these numbers and names."""
    with pytest.raises(error) as caught:
        yield
    assert caught.value.code == code, caught.value
    for part in parts:
        assert part in str(caught.value), caught.value


def index_bytes(lengths: npt.NDArray[np.int32], dtype: np.dtype[Any], *, marks: bool = True) -> bytes:
    return b"".join(index_parts(lengths, dtype, marks=marks))

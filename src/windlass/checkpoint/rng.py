"""States of the random generators of every rank as JSON; another world size gets fresh, repeatable ones."""

import base64
import random
import zlib
from typing import Any

import numpy as np
import torch


def capture() -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's generators of this process."""
    python = random.getstate()
    numpy: Any = np.random.get_state()  # a tuple or a dict, by its arguments
    value: dict[str, Any] = {
        "python": [python[0], list(python[1]), python[2]],
        "numpy": [numpy[0], _pack(numpy[1].tobytes()), *map(float, numpy[2:])],
        "torch": _pack(torch.get_rng_state().numpy().tobytes()),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        value["cuda"] = _pack(torch.cuda.get_rng_state().numpy().tobytes())
    return value


def apply(value: dict[str, Any]) -> None:
    """Set the generators of this process to what `capture` recorded."""
    version, numbers, gauss = value["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, key, position, has_gauss, cached = value["numpy"]
    np.random.set_state((name, np.frombuffer(_unpack(key), dtype=np.uint32), int(position), int(has_gauss), cached))
    torch.set_rng_state(torch.frombuffer(_unpack(value["torch"]), dtype=torch.uint8))
    if "cuda" in value and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(_unpack(value["cuda"]), dtype=torch.uint8))


def restart(seed: int, rank: int, step: int) -> None:
    """Generators for a rank without a saved state: a run resumed on another number of devices."""
    mixed = zlib.crc32(f"{seed}/{rank}/{step}".encode())
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)


def _pack(data: bytes) -> str:
    return base64.b85encode(zlib.compress(data, 1)).decode()


def _unpack(text: str) -> bytearray:
    return bytearray(zlib.decompress(base64.b85decode(text)))

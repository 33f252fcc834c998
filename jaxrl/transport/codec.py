"""Turns the structs of `types.sample` into bytes and back, for transports that leave the process.

In and out: MessagePack maps keyed by field name, an absent stream leaving no byte behind. A numpy array is one
extension value: dtype (byte order included), shape, and its raw bytes. Never pickles: what arrives can only become
numbers, text and the named struct.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import msgspec
import numpy as np

from jaxrl.errors import TransportError

ARRAY_EXTENSION = 1
"""MessagePack extension code of a numpy array."""

T = TypeVar("T")


class _ArrayHeader(msgspec.Struct, array_like=True):
    """What precedes an array's bytes inside its extension value."""

    dtype: str
    shape: tuple[int, ...]


def encode(struct: msgspec.Struct) -> bytes:
    """Return a struct as MessagePack bytes.

    Args:
      struct: any `msgspec.Struct` of numbers, text, containers and numpy arrays of bool, int or float dtype.

    Returns:
      Bytes that `decode(type(struct), ...)` turns into an equal struct.

    Raises:
      TypeError: a field holds something else, such as an object array.

    Example:
      >>> from jaxrl.types import StepReport
      >>> report = StepReport(step=3, version=3, skipped=False, metrics={"loss/total": 0.5})
      >>> decode(StepReport, encode(report)) == report
      True
    """
    return _ENCODER.encode(struct)


def decode(type: type[T], data: bytes) -> T:
    """Return the struct that `encode` made bytes of.

    Args:
      type: the struct's class.
      data: what `encode` returned.

    Returns:
      The struct; its arrays own their memory and may be written to.

    Raises:
      TransportError: the bytes are cut short, are not MessagePack, hold an array whose size does not fit its shape, or
        are another struct.
    """
    try:
        return msgspec.msgpack.decode(data, type=type, ext_hook=_decode_extension, dec_hook=_accept_array)
    except (msgspec.DecodeError, ValueError, TypeError, IndexError) as error:
        raise TransportError(
            f"{len(data)} bytes are not a whole `{type.__name__}`: {error}; the sender speaks another format, or the "
            "bytes were cut short"
        ) from error


def _encode_array(value: Any) -> msgspec.msgpack.Ext:
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biuf":
        kind = f"{value.dtype} array" if isinstance(value, np.ndarray) else type(value).__name__
        raise TypeError(f"cannot encode a {kind}: only numpy arrays of bool, int or float dtype travel")
    header = msgspec.msgpack.encode(_ArrayHeader(value.dtype.str, value.shape))
    return msgspec.msgpack.Ext(ARRAY_EXTENSION, bytes([len(header)]) + header + value.tobytes())


def _decode_extension(code: int, data: memoryview) -> np.ndarray:
    if code != ARRAY_EXTENSION:
        raise ValueError(f"extension code {code} is not an array's ({ARRAY_EXTENSION})")
    start = 1 + data[0]
    header = msgspec.msgpack.decode(data[1:start], type=_ArrayHeader)
    dtype = np.dtype(header.dtype)
    num_bytes = math.prod(header.shape) * dtype.itemsize
    if dtype.kind not in "biuf" or num_bytes != len(data) - start:
        raise ValueError(
            f"{len(data) - start} bytes are not an array of dtype {header.dtype!r} and shape {header.shape}"
        )
    return np.frombuffer(data[start:], dtype).reshape(header.shape).copy()


def _accept_array(type: type, value: Any) -> Any:
    if not isinstance(value, type):
        raise ValueError(f"expected {type.__name__}, got {value.__class__.__name__}")
    return value


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_array)

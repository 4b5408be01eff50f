"""CRC-32C (Castagnoli; RFC 3720, appendix B.4), and its masked form in TFRecord files.

The register is a linear function of what it was and of the bytes, so blocks are reduced side by side, each from 0, and
then put together: register(A B) = register(A) moved on by as many zero bytes as B has, xor register(B).
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

_POLYNOMIAL = 0x82F63B78
"""Bits reversed."""

_BLOCK_BYTES = 64
_WORTH_BYTES = 64 * _BLOCK_BYTES
"""Below this a plain loop is about as quick."""


def _entry(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
    return byte


_TABLE = tuple(_entry(byte) for byte in range(256))
_TABLE_ARRAY = np.array(_TABLE, dtype=np.uint32)


def crc32c(data: bytes) -> int:
    register, done = 0xFFFFFFFF, 0
    if len(data) >= _WORTH_BYTES:
        done = len(data) // _BLOCK_BYTES * _BLOCK_BYTES
        register = _by_blocks(register, data[:done])
    return _by_bytes(register, data[done:]) ^ 0xFFFFFFFF


def masked_crc32c(data: bytes) -> int:
    """Rotated right by 15 bits plus a constant: tensorflow/tsl's ``lib/hash/crc32c.h``."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _by_bytes(register: int, data: bytes) -> int:
    for byte in data:
        register = _TABLE[(register ^ byte) & 0xFF] ^ register >> 8
    return register


def _by_blocks(register: int, data: bytes) -> int:
    """``data`` is whole blocks."""
    blocks = np.frombuffer(data, dtype=np.uint8).reshape(-1, _BLOCK_BYTES)
    registers: NDArray[np.uint32] = np.zeros(len(blocks), dtype=np.uint32)
    for column in blocks.T:
        registers = _TABLE_ARRAY[(registers ^ column) & 0xFF] ^ registers >> 8
    low, second, third, high = _past_a_block()
    for block in registers.tolist():
        moved = (
            low[register & 0xFF] ^ second[register >> 8 & 0xFF] ^ third[register >> 16 & 0xFF] ^ high[register >> 24]
        )
        register = moved ^ block
    return register


@functools.cache
def _past_a_block() -> tuple[tuple[int, ...], ...]:
    """[4][256] What each byte of the register becomes after a block of zeros."""
    zeros = bytes(_BLOCK_BYTES)
    return tuple(tuple(_by_bytes(byte << 8 * place, zeros) for byte in range(256)) for place in range(4))

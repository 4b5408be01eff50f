"""CRC-32C (Castagnoli; RFC 3720, appendix B.4), and its masked form in TFRecord files."""

from __future__ import annotations

_POLYNOMIAL = 0x82F63B78
"""Bits reversed."""


def _entry(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
    return byte


_TABLE = tuple(_entry(byte) for byte in range(256))


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def masked_crc32c(data: bytes) -> int:
    """Rotated right by 15 bits plus a constant: tensorflow/tsl's ``lib/hash/crc32c.h``."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF

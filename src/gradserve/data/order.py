"""Orders that depend on a seed and the epoch alone, on every machine and with every release of Python and NumPy."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")


def permutation(size: int, seed: int, epoch: int) -> NDArray[np.intp]:
    """[size] The numbers below ``size``, each equally likely at each place."""
    # NumPy keeps the raw output of a bit generator the same in all releases, but not that of Generator.permutation.
    keys = np.random.PCG64(_mixed(seed, epoch)).random_raw(size)
    return np.argsort(keys, kind="stable")


def buffered(rows: Iterable[T], size: int, seed: int, epoch: int) -> Iterator[T]:
    """Each row takes the place in a buffer of ``size`` that a random one leaves; at the end it is emptied so."""
    # Python keeps random() the same in all releases, but not shuffle().
    chance = random.Random(_mixed(seed, epoch))
    buffer: list[T] = []
    for row in rows:
        if len(buffer) < size:
            buffer.append(row)
            continue
        place = int(chance.random() * size)
        yield buffer[place]
        buffer[place] = row
    while buffer:
        place = int(chance.random() * len(buffer))
        buffer[place], buffer[-1] = buffer[-1], buffer[place]
        yield buffer.pop()


def _mixed(seed: int, epoch: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=16).digest(), "big")

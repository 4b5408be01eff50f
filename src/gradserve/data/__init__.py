"""Rows from files, in an order that a resume restores: ``Dataset`` reads, ``contamination`` compares.

``source`` finds what is named, ``formats`` has one reader for each format, ``selection`` leaves rows out (bad ones,
those of another split, of the wrong length, duplicates), ``order`` shuffles, ``plan`` puts these together, ``prefetch``
reads ahead. Invariant: which rows come, and in what order, depends on the content, the settings and the epoch alone,
never on the number of workers or on timing.
"""

from gradserve.data.contamination import Overlap, contamination
from gradserve.data.dataset import Dataset
from gradserve.data.errors import BadRow, DataError

__all__ = ["BadRow", "DataError", "Dataset", "Overlap", "contamination"]

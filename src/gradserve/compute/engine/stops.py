"""Stop strings: found in the text as it grows, without decoding it from the start at every token."""

from __future__ import annotations

from typing import Any

_INCOMPLETE = "\ufffd"
"""What a tokenizer puts where bytes of a character are still missing."""

_MOST_PENDING = 8
"""Tokens to wait for a character to become whole; it has four bytes at most, so what waits longer is no text."""


class TextStops:
    """Watches one sequence. ``found`` is to be called with all its tokens after each new one."""

    def __init__(self, tokenizer: Any, strings: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._strings = strings
        self._keep = max(len(string) for string in strings) - 1
        self._tail = ""
        self._from = 0
        self._read = 0

    def found(self, tokens: list[int]) -> bool:
        """Whether the text of ``tokens`` contains a stop string (special tokens count as their text).

        Tokens are decoded together with those before them, since many tokenizers write the first one differently.
        """
        before = self._decode(tokens[self._from : self._read])
        text = self._decode(tokens[self._from :])
        fresh = self._tail + text[len(before) :]
        if any(string in fresh for string in self._strings):
            return True
        whole = not text.endswith(_INCOMPLETE) and len(text) > len(before)
        if whole or len(tokens) - self._read > _MOST_PENDING:
            self._tail = fresh[-self._keep :] if self._keep else ""
            self._from, self._read = self._read, len(tokens)
        return False

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

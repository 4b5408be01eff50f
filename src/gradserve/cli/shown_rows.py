"""Rows as they are trained on, printed; see ``gradserve data show``."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

    from gradserve.data.row import Found
    from gradserve.episodes.chat import OnRewrite, Train
    from gradserve.episodes.tokens import Rendered

_LISTED = 20
"""Problems that are listed; all are counted."""


class ShownRows:
    """Renders every row that is added, prints the first ``most``, and counts tokens and problems."""

    def __init__(self, tokenizer: Any, most: int, train: Train, on_rewrite: OnRewrite) -> None:
        self._tokenizer, self._most = tokenizer, most
        self._train, self._on_rewrite = train, on_rewrite
        self._rows = self._printed = self._tokens = self._trained = 0
        self._longest = (0, "")
        self.problems = 0

    def add(self, found: Found) -> None:
        """Print it, if there is still room, or its problem."""
        from gradserve.data.errors import BadRow
        from gradserve.episodes.errors import RowUnusable, TemplateUnusable
        from gradserve.episodes.rows import rendered

        where = f"{found.source}, {found.place}"
        if isinstance(found.row, BadRow):
            self._say_wrong(f"{where}: {found.row.reason}; {found.row.cure}")
            return
        try:
            made = rendered(found.row, self._tokenizer, train=self._train, on_rewrite=self._on_rewrite)
        except (RowUnusable, TemplateUnusable) as error:
            self._say_wrong(f"{where}: {error}")
            return
        self._rows += 1
        for number, row in enumerate(made, 1):
            self._count(row, where)
            if self._printed < self._most:
                self._print(row, where if len(made) == 1 else f"{where}, {number} of {len(made)} rows")
        self._printed += 1

    def sum_up(self) -> None:
        """The last lines: how much there is, and how many problems were not listed."""
        length, where = self._longest
        click.echo(f"{self._rows:,} rows: {self._tokens:,} tokens, {self._trained:,} trained", nl=not where)
        if where:
            click.echo(f"; the longest has {length:,} ({where})")
        if self.problems:
            more = f", of which {self.problems - _LISTED:,} are not listed" if self.problems > _LISTED else ""
            click.secho(f"{self.problems:,} rows can't be trained on{more}", fg="red")

    def _count(self, row: Rendered, where: str) -> None:
        self._tokens += len(row.tokens)
        self._trained += row.trained
        self._longest = max(self._longest, (len(row.tokens), where), key=lambda found: found[0])

    def _print(self, row: Rendered, where: str) -> None:
        from rich.text import Text

        from gradserve.episodes.show import bracketed, spans

        click.secho(f"{where}: {len(row.tokens):,} tokens, {row.trained:,} trained", bold=True)
        if self._console.color_system is None or self._console.no_color:
            click.echo(bracketed(row, self._tokenizer))
        else:
            parts = [(span.text, "bold green" if span.trained else "dim") for span in spans(row, self._tokenizer)]
            self._console.print(Text.assemble(*parts), soft_wrap=True)
        click.echo()

    def _say_wrong(self, problem: str) -> None:
        self.problems += 1
        if self.problems <= _LISTED:
            click.secho(f"wrong: {problem}", fg="red")

    @cached_property
    def _console(self) -> Console:
        from rich.console import Console

        return Console(highlight=False)

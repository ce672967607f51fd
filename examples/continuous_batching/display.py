"""What a user sees while the engine runs, with rich where it is installed and in plain lines where it is not."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from engine import Engine

try:
    from rich.console import Console
    from rich.live import Live
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
    from rich.text import Text
except ImportError:
    Console = None


def state(engine: Engine) -> str:
    scheduler, pool = engine.scheduler, engine.pool
    return (
        f"{len(scheduler.running)} running, {len(scheduler.waiting)} waiting, "
        f"{pool.used} of {pool.num_blocks} blocks used, {pool.cached} cached"
    )


class PlainDisplay:
    """A line on stderr every second."""

    def __init__(self, engine: Engine, total: int) -> None:
        self.engine, self.total, self.done = engine, total, 0
        self.next_line = time.monotonic() + 1

    def __enter__(self) -> PlainDisplay:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def update(self, tokens: int, tails: Callable[[], dict[int, str]]) -> None:
        """Take the number of new tokens, and what gives the last words of each running text by its number."""
        self.done += tokens
        if time.monotonic() >= self.next_line:
            self.next_line += 1
            print(f"{self.done}/{self.total} tokens: {state(self.engine)}", file=sys.stderr)


class RichDisplay(PlainDisplay):
    """A bar, the state of the scheduler, and the running texts as they grow."""

    def __enter__(self) -> RichDisplay:
        self.progress = Progress(
            TextColumn("tokens"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[state]}"),
        )
        self.task = self.progress.add_task("", total=self.total, state="")
        self.live = Live(self.progress, console=Console(stderr=True), refresh_per_second=10, transient=True)
        self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.live.stop()

    def update(self, tokens: int, tails: Callable[[], dict[int, str]]) -> None:
        self.progress.update(self.task, advance=tokens, state=state(self.engine))
        view = Table.grid(padding=(0, 1))
        view.add_row(self.progress)
        for number, tail in tails().items():
            view.add_row(Text(f"{number:3}  ...{tail}", no_wrap=True))
        self.live.update(view)


def display(engine: Engine, total: int) -> PlainDisplay:
    """Display of a run that makes at most ``total`` tokens."""
    fancy = Console is not None and sys.stderr.isatty()
    return (RichDisplay if fancy else PlainDisplay)(engine, total)


def print_table(title: str, rows: list[tuple[str, str]]) -> None:
    if Console is None:
        print(f"\n{title}")
        for name, value in rows:
            print(f"  {name:24} {value}")
        return
    table = Table(title=title, title_justify="left", show_header=False)
    for row in rows:
        table.add_row(*row)
    print()
    Console().print(table)

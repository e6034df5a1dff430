"""What commands write beside their result: a page to look at, and its charts and rows as files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from autoplan.errors import UsageError

from .console import tell


@dataclass(frozen=True, slots=True)
class PageFiles:
    """Where to; the fields are the options of `page_options`."""

    html: Path | None
    charts: Path | None
    png: bool
    force: bool

    def check(self) -> None:
        """Refuse what could not be written, before time is spent on what it shows.

        Raises: OutputError or UsageError.
        """
        from autoplan.files import check_page, check_target
        from autoplan.html_report.png import check_png

        if self.html is not None:
            check_page(self.html, force=self.force)
        if self.charts is not None:
            check_target(self.charts, force=self.force, option="--charts")
        if self.png and self.charts is None:
            raise UsageError("--png: found no folder\n  expected: --charts DIR, which the files are written to")
        if self.png:
            check_png()

    def write(self, *, page: Callable[[], str], files: Callable[[], Mapping[str, str | bytes]]) -> None:
        """Make and write what was asked for; each is whole or not there at all."""
        from autoplan.files import write_folder, write_page

        if self.html is not None:
            write_page(self.html, page(), force=self.force)
            tell(f"wrote {self.html}")
        if self.charts is not None:
            write_folder(self.charts, files(), force=self.force)
            tell(f"wrote {self.charts}")

"""A results folder as one HTML file to look at: ``chimsim report DIR``.

`gather` reads the folder into plain JSON, `page_bytes` puts it into a page together with Plotly's own script. The
page needs nothing but itself: no server, no network, no fonts. Nothing is simulated or estimated here.
"""

from __future__ import annotations

from pathlib import Path

from chimsim.report_html.data import gather
from chimsim.report_html.page import page_bytes
from chimsim.results import Results, check_file, write_file

__all__ = ["MAX_BYTES", "gather", "page_bytes", "write_report"]

MAX_BYTES = 6_000_000
"""No report is larger: what does not fit is left out, and the page says what."""
_SPARE = 2_000
"""Of them kept for the words on what is left out."""


def write_report(results: Results, path: Path) -> tuple[int, list[str]]:
    """Write the report; its size in bytes, and what it leaves out. The same folder gives the same bytes.

    Raises `ChimsimError` where the folder has no finished cell, or where no file of that name can be written.
    """
    check_file(path)
    data = gather(results, lambda rest: MAX_BYTES - len(page_bytes(rest)) - _SPARE)
    page = page_bytes(data)
    write_file(path, page)
    return len(page), list(data["left_out"])

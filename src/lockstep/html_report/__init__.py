"""Pages of HTML over run directories: one file, which any browser opens from a disk and which asks no network.

    run directories ─► `read_run`: a `RunRecord` each ─┬─► curves, bars, timelines ─► plotly, in the page
    files of other commands ─► `Attachment` ───────────┴─► tables and texts, escaped
                                                              │
                                       page ◄─ template.html ◄┘ ◄─ page.js

    run_record  what a run directory holds     tables  any value as HTML; the only place where text becomes HTML
    charts      what is drawn, as numbers      page    the whole page, also served while a run goes on

The door. The modules read what runs have written and change nothing.
"""

from lockstep.html_report.page import REPORT, Attachment, attached_files, list_page, report_page, serve
from lockstep.html_report.run_record import RunRecord, read_run

__all__ = ["REPORT", "Attachment", "RunRecord", "attached_files", "list_page", "read_run", "report_page", "serve"]

"""Explanations of one fact a line, shown as a table in notebooks."""

from __future__ import annotations

from html import escape

#: Characters of the column of titles in an explanation.
_TITLE = 12


def as_table(explanation: str) -> str:
    """Return an explanation, lines of a title in twelve characters and a text, as a table in HTML."""
    rows = (
        f"<tr><th style='text-align:left'>{escape(line[:_TITLE].strip())}</th>"
        f"<td style='text-align:left'>{escape(line[_TITLE:].strip())}</td></tr>"
        for line in explanation.splitlines()
    )
    return f"<table>{''.join(rows)}</table>"

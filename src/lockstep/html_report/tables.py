"""Any value as HTML: what records say is text, whatever it looks like, and secrets are left out."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from urllib.parse import quote

from lockstep.formatting import count, harmless, without_secrets

_MOST_ROWS = 500
_MOST_DEPTH = 6
_SHORT = 24  # characters; such a text is not broken into lines
_LONG = 200  # characters; a longer text is folded up


def plain_text(value: object, name: str = "") -> str:
    """``value`` as plain text: no character that acts, and ``***`` for secrets, also where ``name`` says so."""
    if value is None:
        return "–"
    if isinstance(value, bool | int):
        return str(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if name:
        value = without_secrets([f"{name}={value}"])[0][len(name) + 1 :]
    lines = (" ".join(without_secrets(line.split(" "))) for line in str(value).split("\n"))
    return harmless("\n".join(lines), keep="\n\t")


def text(value: object, name: str = "") -> str:
    """`plain_text` as HTML."""
    return html.escape(plain_text(value, name))


class Html(str):
    """What is HTML already, in the cell of a table."""

    __slots__ = ()


def link(address: str, value: object) -> Html:
    """A link to a file at ``address``, relative to that of the page."""
    return Html(f'<a href="./{html.escape(quote(address))}">{text(value)}</a>')


def block(value: object) -> str:
    """A text of several lines."""
    return f"<pre>{text(value)}</pre>"


def folded(title: str, inside: str, *, is_open: bool = False) -> str:
    """``inside``, which is HTML, below a ``title`` that opens it."""
    return f"<details{' open' * is_open}><summary>{text(title)}</summary>{inside}</details>"


def table(rows: Sequence[Mapping[str, object]], caption: str = "", depth: int = 0) -> str:
    """One line for each of ``rows``, one column for each of their keys."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f'<th scope="col">{text(name)}</th>' for name in names)
    lines = [
        "<tr>" + "".join(_cell(row[name], name, depth + 1) if name in row else "<td></td>" for name in names) + "</tr>"
        for row in rows[:_MOST_ROWS]
    ]
    more = f"<p>... and {count(len(rows) - _MOST_ROWS)} more</p>" if len(rows) > _MOST_ROWS else ""
    told = f"<caption>{text(caption)}</caption>" if caption else ""
    # Focusable, so that a keyboard can scroll what is wider than the page.
    return (
        f'<div class="wide" tabindex="0"><table>{told}<thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>{more}"
    )


def shown(value: object, name: str = "", depth: int = 0) -> str:
    """``value``, as JSON has it, as HTML: a list of objects as a table, an object as a list of its entries."""
    if not value or not isinstance(value, dict | list | tuple):
        return text("none" if value in ({}, [], ()) else value, name)
    if depth == _MOST_DEPTH:
        return "..."
    if isinstance(value, dict):
        entries = [
            f"<dt>{text(key)}</dt><dd>{shown(inside, str(key), depth + 1)}</dd>"
            for key, inside in list(value.items())[:_MOST_ROWS]
        ]
        return f"<dl>{''.join(entries)}</dl>"
    if all(isinstance(one, dict) for one in value):
        return table(value, depth=depth)
    return ", ".join(shown(one, name, depth + 1) for one in value[:_MOST_ROWS])


def _cell(value: object, name: str, depth: int) -> str:
    if isinstance(value, Html):
        return f"<td>{value}</td>"
    if isinstance(value, int | float):
        return f'<td class="number">{text(value)}</td>'
    if isinstance(value, str) and (len(value) > _LONG or "\n" in value):
        return f"<td>{folded(value.strip()[:60].replace(chr(10), ' ') + ' ...', block(value))}</td>"
    short = ' class="short"' if isinstance(value, str) and len(value) <= _SHORT else ""
    return f"<td{short}>{shown(value, name, depth)}</td>"

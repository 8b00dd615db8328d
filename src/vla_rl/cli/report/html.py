"""Pieces of pages that need nothing but themselves, not even a network."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from importlib import resources
from typing import Any

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; media-src data:"
"""Content security: nothing is fetched, and no script runs."""


def document(title: str, body: str) -> str:
    """A whole page; both are HTML."""
    style = resources.files("vla_rl.cli.report").joinpath("style.css").read_text(encoding="utf-8")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><style>{style}</style></head>'
        f"<body><main>{body}</main></body></html>\n"
    )


def section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>"


def interval_table(
    what: str, rates: Mapping[str, Mapping[str, Any]], before: Mapping[str, Mapping[str, Any]] | None = None
) -> str:
    """Success of each `what`: rate, 95 % interval and n, in words and as a bar; and beside it what it was before, where
    that is known."""
    body = ""
    for name, rate in rates.items():
        low, high, mid = (100 * rate[key] for key in ("low", "high", "rate"))
        body += f"<tr><td>{escape(name)}</td>"
        if before:
            body += f"<td>{100 * before[name]['rate']:.1f} %</td>" if name in before else "<td></td>"
        body += (
            f"<td>{mid:.1f} %</td><td>{low:.1f} to {high:.1f}</td><td>{escape(str(rate['n']))}</td>"
            f'<td class="wide"><div class="interval"><span style="left:{low:.1f}%;width:{high - low:.1f}%"></span>'
            f'<b style="left:{mid:.1f}%"></b></div></td></tr>'
        )
    earlier = "<th>before</th>" if before else ""
    head = f"<tr><th>{escape(what)}</th>{earlier}<th>success</th><th>95 % interval</th><th>n</th><th></th></tr>"
    return f'<div class="card scroll"><table>{head}{body}</table></div>'

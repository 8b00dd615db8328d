"""Pieces of pages that need nothing but themselves, not even a network."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from importlib import resources
from typing import Any

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; media-src data:"
"""Content security: nothing is fetched, and no script runs."""


def render_document(title: str, body: str) -> str:
    """A whole page; both are HTML."""
    style = resources.files("vla_rl.cli.report").joinpath("style.css").read_text(encoding="utf-8")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><style>{style}</style></head>'
        f"<body><main>{body}</main></body></html>\n"
    )


def render_section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>"


def render_name(name: str) -> str:
    """A name that wraps at its underscores: those of LIBERO's tasks have up to 100 characters."""
    return escape(name).replace("_", "_<wbr>")


def interval_table(
    what: str, rates: Mapping[str, Mapping[str, Any]], before: Mapping[str, Mapping[str, Any]] | None = None
) -> str:
    """Success of each `what`: rate, 95 % interval and n in words, and the rate as a bar with its interval. With
    `before`, success before training, each has two bars."""
    body = ""
    for name, rate in rates.items():
        earlier = before.get(name) if before else None
        body += f"<tr><td>{render_name(name)}</td>"
        if before:
            body += f"<td>{100 * earlier['rate']:.1f} %</td>" if earlier else "<td></td>"
        low, high, mid = (100 * rate[key] for key in ("low", "high", "rate"))
        bars = (_rate_bar("before", "before training", earlier) if earlier else "") + _rate_bar(
            "after", "success", rate
        )
        body += (
            f"<td>{mid:.1f} %</td><td>{low:.1f} to {high:.1f}</td><td>{escape(str(rate['n']))}</td>"
            f'<td class="wide"><div class="rates">{bars}</div></td></tr>'
        )
    columns = ("before", "after") if before else ("success",)
    head = "".join(f"<th>{title}</th>" for title in (escape(what), *columns, "95 % interval", "n", ""))
    table = f'<table class="success{" two" if before else ""}"><tr>{head}</tr>{body}</table>'
    return f'<div class="card"><div class="scroll">{table}</div>{LEGEND if before else ""}</div>'


LEGEND = (
    '<div class="legend"><span><i class="before"></i>before training</span>'
    '<span><i class="after"></i>after training</span>'
    "<span>lines: 95 % Wilson intervals</span></div>"
)


def _rate_bar(css: str, title: str, rate: Mapping[str, Any]) -> str:
    """Return a bar from 0 to the rate, and a line over its interval."""
    low, high, mid = (100 * rate[key] for key in ("low", "high", "rate"))
    words = f"{title}: {mid:.1f} %, 95 % interval {low:.1f} to {high:.1f} %, n = {rate['n']}"
    return (
        f'<div class="rate {css}" role="img" aria-label="{escape(words)}" title="{escape(words)}">'
        f'<b style="width:{mid:.1f}%"></b><span style="left:{low:.1f}%;width:{high - low:.1f}%"></span></div>'
    )

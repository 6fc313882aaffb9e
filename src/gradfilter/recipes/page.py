"""A comparison as one HTML file that needs nothing else: style, scripts and numbers inside."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

WEB = Path(__file__).parent / "web"
# in this order: each uses what those before it define
SCRIPTS = (
    "draw.js", "pareto.js", "curves.js", "layers.js", "answer.js", "made.js", "page.js"
)  # fmt: skip


def render(content: dict) -> str:
    """The page of what `Comparison.to_dict` says."""
    about = content["about"]
    parts = {
        "{{title}}": html.escape(f"{about['model']} on {about['data']}: methods compared"),
        "{{style}}": _text("page.css"),
        "{{numbers}}": _inside(content),
        "{{script}}": "\n".join(map(_text, SCRIPTS)),
    }
    # all at once: a data folder may be called as a place is
    places = re.compile("|".join(map(re.escape, parts)))
    return places.sub(lambda found: parts[found[0]], _text("page.html"))


def _inside(content: dict) -> str:
    """JSON that may stand in a script element: no text in it can end the element."""
    return json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")


def _text(name: str) -> str:
    return (WEB / name).read_text(encoding="utf-8")

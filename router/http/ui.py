"""`/ui`: a page that shows the cluster at work and talks to it, from a few files and this API.

Whoever asks gets the files; the page asks for an API key where there is one. What nodes and the
model say is text to it: it runs no code but its own, and asks no other host.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from aiohttp import web

FILES: Final = {
    path.name: path.read_bytes() for path in Path(__file__).with_name("static").iterdir()
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # another release has another page
}


_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}


def path_of(name: str) -> str:
    """The path at which a file is; `index.html` is the page itself."""
    return "/ui" if name == "index.html" else f"/ui/{name}"


def type_of(name: str) -> str:
    return _TYPES[Path(name).suffix]


async def ui_file(request: web.Request) -> web.Response:
    last = request.path.rpartition("/")[2]
    name = last if last in FILES else "index.html"
    return web.Response(
        body=FILES[name], content_type=type_of(name), charset="utf-8", headers=_HEADERS
    )

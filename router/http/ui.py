"""`/ui`: a page that shows the cluster at work and talks to it, from three files and this API.

Whoever asks gets the files; the page asks for an API key where there is one. What nodes and the
model say is text to it: it runs no code but its own, and asks no other host.
"""

from __future__ import annotations

from pathlib import Path

from aiohttp import web

_FILES = {path.name: path.read_bytes() for path in Path(__file__).with_name("static").iterdir()}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # another release has another page
}


async def ui_page(request: web.Request) -> web.Response:
    return _answer("index.html", "text/html")


async def ui_script(request: web.Request) -> web.Response:
    return _answer("app.js", "text/javascript")


async def ui_style(request: web.Request) -> web.Response:
    return _answer("style.css", "text/css")


def _answer(name: str, content_type: str) -> web.Response:
    return web.Response(
        body=_FILES[name], content_type=content_type, charset="utf-8", headers=_HEADERS
    )

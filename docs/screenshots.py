"""The pictures of `docs/ui.md`, taken of a real cluster: `make screenshots`.

Two prefill and two decode nodes serve while others ask, too; then a prefill node is killed, by its
pid. Needs Chromium (`apt-get install chromium`). With `--all FOLDER` as the first arguments every
state (idle, loaded, killed, two routers) is taken, in two widths, into that folder.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from aiohttp import ClientSession
from PIL import Image
from playwright.async_api import Browser, Page, async_playwright, expect

from pdserve.common.obs.process import read_ports

IMAGES = Path(__file__).with_name("images")
QUESTION = "Tell me a story about a fox and a mill."
START_TIMEOUT = 300_000  # ms
CLIENTS = 3  # others
LOADED = 25.0  # seconds of load before a picture: lines are drawn
DESK, PHONE = 1366, 390  # pixels


def main() -> None:
    argv = sys.argv[1:]
    if argv[:1] == ["--all"]:
        folder = Path(argv[1])
        folder.mkdir(exist_ok=True)
        asyncio.run(take_all(folder, argv[2:]))
    else:
        asyncio.run(take(argv))


async def take(argv: Sequence[str]) -> None:
    """Takes the pictures of the page in the documentation."""
    with cluster(argv) as (url, *_):
        async with chromium() as browser, others(url):
            page = await opened(browser, url, DESK)
            await asyncio.sleep(LOADED)
            await ask(page)
            await shoot(page, IMAGES / "ui-light.png", "light")
            await kill_a_prefill_node(url)
            page = await opened(browser, url, PHONE)
            await expect(page.locator(".lane > li.gone")).to_have_count(1)
            await shoot(page, IMAGES / "ui-killed.png", "dark", whole=False)


async def take_all(folder: Path, argv: Sequence[str]) -> None:
    with cluster([*argv, "--routers", "2"]) as (url, second):
        async with chromium() as browser:
            await shoot_both(browser, url, folder / "idle")
            async with others(url), others(second):
                await asyncio.sleep(LOADED)
                await shoot_both(browser, url, folder / "loaded")
                await shoot_both(browser, second, folder / "second-router")
                await kill_a_prefill_node(url)
                await asyncio.sleep(5)
                await shoot_both(browser, url, folder / "killed")


@contextmanager
def cluster(argv: Sequence[str]) -> Iterator[list[str]]:
    """Yields the URLs of its routers."""
    with tempfile.TemporaryDirectory() as folder:
        ports = [Path(folder) / "ports"]
        if "--routers" in argv:
            ports.append(Path(f"{ports[0]}.1"))
        pdserve = str(Path(sys.executable).with_name("pdserve"))
        command = [pdserve, "up", "--port", "0", "--prefill", "2", "--decode", "2"]
        up = subprocess.Popen([*command, "--ports-file", str(ports[0]), *argv])
        try:
            while not all(map(read_ports, ports)):
                time.sleep(0.2)
            yield [f"http://127.0.0.1:{(read_ports(each) or {})['http']}" for each in ports]
        finally:
            up.send_signal(signal.SIGTERM)
            up.wait()


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        yield browser
        await browser.close()


async def opened(browser: Browser, url: str, width: int) -> Page:
    page = await browser.new_page(viewport={"width": width, "height": 844})
    page.set_default_timeout(START_TIMEOUT)
    expect.set_options(timeout=START_TIMEOUT)
    await page.goto(f"{url}/ui")
    await expect(page.locator(".lane > li")).to_have_count(4)
    await page.get_by_label("At most").fill("60")
    return page


@asynccontextmanager
async def others(url: str) -> AsyncIterator[None]:
    """Has others ask meanwhile; one request in five is refused."""
    async with ClientSession() as session:
        tasks = [asyncio.create_task(asks(session, url)) for _ in range(CLIENTS)]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def asks(session: ClientSession, url: str) -> None:
    number = 0
    while True:
        number += 1
        body: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTION}]}
        body["max_tokens"] = 30 if number % 5 else -1
        headers = {"X-SLO-TTFT-Ms": "2000"}
        path = f"{url}/v1/chat/completions"
        async with session.post(path, json=body, headers=headers) as response:
            await response.read()
        if not response.ok:
            await asyncio.sleep(1)


async def ask(page: Page) -> None:
    await page.get_by_label("Your message").fill(QUESTION)
    before = await page.locator(".timeline").count()
    await page.keyboard.press("Enter")
    await expect(page.locator(".timeline")).to_have_count(before + 1)


async def kill_a_prefill_node(url: str) -> None:
    async with ClientSession() as session, session.get(f"{url}/v1/cluster") as response:
        nodes = (await response.json())["nodes"]
    os.kill(next(node["pid"] for node in nodes if node["role"] == "prefill"), signal.SIGKILL)


async def shoot_both(browser: Browser, url: str, path: Path) -> None:
    for width, scheme in ((DESK, "light"), (PHONE, "dark")):
        page = await opened(browser, url, width)
        await asyncio.sleep(2)
        await shoot(page, path.with_name(f"{path.name}-{width}.png"), scheme)
        await page.close()


async def shoot(page: Page, path: Path, scheme: str, whole: bool = True) -> None:
    await page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    await page.evaluate("document.activeElement.blur(), scrollTo(0, 0)")
    await page.screenshot(path=path, full_page=whole)
    pack(path)


def pack(path: Path) -> None:
    Image.open(path).quantize(128).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()

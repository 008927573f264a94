"""The pictures of `docs/ui.md`, taken of a real cluster: `make screenshots`.

A cluster of two prefill and two decode nodes answers in a chat, while others ask, too; then a
prefill node is killed. Needs Chromium (`apt-get install chromium`).
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from aiohttp import ClientSession
from PIL import Image
from playwright.async_api import Page, async_playwright, expect

from pdserve.common.obs.process import read_ports

IMAGES = Path(__file__).with_name("images")
QUESTION = "Tell me a story about a fox and a mill."
START_TIMEOUT = 300_000  # ms
CLIENTS = 3  # others
FILLED = re.compile("(L.*){25}")  # a line that has been drawn for some seconds


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        ports = Path(folder) / "ports"
        pdserve = str(Path(sys.executable).with_name("pdserve"))
        command = [pdserve, "up", "--port", "0", "--prefill", "2", "--decode", "2"]
        command += ["--ports-file", str(ports), *sys.argv[1:]]
        up = subprocess.Popen(command)
        try:
            while (found := read_ports(ports)) is None:
                time.sleep(0.2)
            asyncio.run(take(f"http://127.0.0.1:{found['http']}", up.pid))
        finally:
            up.send_signal(signal.SIGTERM)
            up.wait()


async def take(url: str, pid: int) -> None:
    async with async_playwright() as playwright, ClientSession() as session:
        browser = await playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = await browser.new_page(viewport={"width": 900, "height": 800})
        page.set_default_timeout(START_TIMEOUT)
        expect.set_options(timeout=START_TIMEOUT)
        await page.goto(f"{url}/ui")
        await expect(page.locator(".lane > li.good")).to_have_count(4)
        others = [asyncio.create_task(asks(session, url)) for _ in range(CLIENTS)]
        await page.get_by_label("At most").fill("60")
        await expect(page.locator("#ttft path").first).to_have_attribute("d", FILLED)
        await ask(page)
        await shoot(page, "ui-light", "light")
        kill_a_prefill_node(pid)
        await expect(page.locator(".lane > li.bad")).to_have_count(1)
        await page.get_by_role("button", name="New chat").click()
        await ask(page)
        await page.locator("h1").scroll_into_view_if_needed()
        await shoot(page, "ui-killed", "dark")
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await browser.close()


async def asks(session: ClientSession, url: str) -> None:
    while True:
        body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 30}
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            await response.read()


async def ask(page: Page) -> None:
    await page.get_by_label("Your message").fill(QUESTION)
    before = await page.locator(".timeline").count()
    await page.keyboard.press("Enter")
    await expect(page.locator(".timeline")).to_have_count(before + 1)


def kill_a_prefill_node(pid: int) -> None:
    children = psutil.Process(pid).children(recursive=True)
    nodes = [each for each in children if "prefill_node" in " ".join(each.cmdline())]
    os.kill(nodes[0].pid, signal.SIGKILL)


async def shoot(page: Page, name: str, scheme: str) -> None:
    await page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    path = IMAGES / f"{name}.png"
    await page.screenshot(path=path, full_page=True)
    Image.open(path).quantize(256).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()

"""Models are converted once; the process that does it and those that wait for it say so."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pdserve.common.core import waits
from pdserve.demo_model.cache import ensure_folder
from waiting import wait_until


def test_a_conversion_and_the_wait_for_another_s_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waits, "EVERY", 0.05)
    monkeypatch.setattr(waits, "SOON", 0.01)
    caplog.set_level("INFO")
    folder, go_on, made = tmp_path / "model", threading.Event(), []

    def make(partial: Path) -> None:
        made.append(partial)
        assert go_on.wait(60)

    with ThreadPoolExecutor() as pool:
        first = pool.submit(ensure_folder, folder, make)
        wait_until(lambda: "converting model to a checkpoint folder, once, " in caplog.text)
        second = pool.submit(ensure_folder, folder, make)
        wait_until(lambda: "waiting for another process that makes model, " in caplog.text)
        go_on.set()
        first.result()
        second.result()
    assert folder.is_dir() and len(made) == 1

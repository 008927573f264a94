"""On one real cluster: `LLM`, files in OpenAI's batch format, the example, and the commands that
are clients of a server."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import requests

import reference
from adapters import make_adapter, merged
from cluster import DEFAULTS, is_idle
from hub import running_hub, use
from paths import MODELS, ROOT
from pdserve import LLM, LoRARequest, SamplingParams
from pdserve.cli.main import main
from pdserve.common.core.errors import InvalidRequest, RequestError
from pdserve.offline.batch_file import succeeded
from processes import command
from waiting import wait_until

MODEL = MODELS / "llama-gqa"
NAME = "tiny/llama"
KEY = "the-test's"
STORIES = [f"Once upon a time there were {number} cats" for number in range(12)]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
CHAT = [{"role": "user", "content": "Please write about Zoë and the dog."}]


def _children() -> set[tuple[int, str]]:
    """Processes of pdserve that this one has started: pid and command."""
    children = [(each.pid, " ".join(command(each))) for each in psutil.Process().children()]
    return {(pid, command) for pid, command in children if "pdserve" in command}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """The model has a name, so that what is downloaded is served."""
    cache, before = tmp_path_factory.mktemp("hub"), _children()
    with pytest.MonkeyPatch.context() as patch, running_hub({NAME: MODEL}) as hub:
        use(hub, cache, patch)
        llm = LLM(model=NAME, api_key=KEY, enable_lora=True, max_loras=1, **DEFAULTS)
    with llm:
        yield llm
    assert _children() - before == set()


@pytest.fixture
def url(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    return llm.url


def expected(prompt: str, num_tokens: int = 12, model: Path = MODEL) -> str:
    ids = tuple(reference.encode(MODEL, prompt))
    return reference.decode(MODEL, reference.greedy(model, ids, num_tokens))


# ---- LLM ------------------------------------------------------------------------------------


def test_outputs_are_exact_and_in_order(llm: LLM) -> None:
    outputs = llm.generate(STORIES, GREEDY)
    assert [each.prompt for each in outputs] == STORIES
    assert [each.outputs[0].text for each in outputs] == list(map(expected, STORIES))
    assert {each.outputs[0].finish_reason for each in outputs} == {"length"}
    for output in outputs:
        assert output.prompt_token_ids == list(reference.encode(MODEL, output.prompt or ""))
        assert len(output.outputs[0].token_ids) == 12
        assert output.timeline["first_token"] <= output.timeline["finished"]


def test_every_shape_of_a_prompt_asks_the_same(llm: LLM) -> None:
    ids = list(reference.encode(MODEL, STORIES[0]))
    shapes: list[Any] = [STORIES[0], ids, {"prompt": STORIES[0]}, {"prompt_token_ids": ids}]
    texts = {each.outputs[0].text for each in llm.generate(shapes, GREEDY, use_tqdm=False)}
    assert texts == {expected(STORIES[0])}
    (output,) = llm.generate(np.array(ids), GREEDY)
    assert (output.prompt, output.prompt_logprobs) == (None, None)
    assert llm.generate([], GREEDY) == []


def test_each_prompt_may_have_its_parameters(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n, n=2, logprobs=2) for n in (1, 3)]
    for wanted, output in zip((1, 3), llm.generate(STORIES[:2], params), strict=True):
        assert [each.index for each in output.outputs] == [0, 1]
        for each in output.outputs:
            assert each.logprobs is not None and len(each.logprobs) == wanted
            for token_id, place in zip(each.token_ids, each.logprobs, strict=True):
                assert place[token_id].rank == 1 and len(place) == 2
                assert place[token_id].logprob == max(p.logprob for p in place.values())
            total = sum(p[i].logprob for p, i in zip(each.logprobs, each.token_ids, strict=True))
            assert each.cumulative_logprob == pytest.approx(total)


def test_prompts_have_logprobs_where_they_are_asked_for(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2, n=2)
    (output,) = llm.generate(STORIES[:1], params, use_tqdm=False)
    first, *others = output.prompt_logprobs or []
    expected = reference.prompt_logprobs(MODEL, tuple(output.prompt_token_ids))
    assert first is None and len(others) == len(expected) == len(output.prompt_token_ids) - 1
    for token_id, place, row in zip(output.prompt_token_ids[1:], others, expected, strict=True):
        assert place is not None and place[token_id].rank is not None
        assert place[token_id].logprob == pytest.approx(row[token_id].item(), abs=1e-3)


def test_chat_shows_what_the_template_made(llm: LLM) -> None:
    (output,) = llm.chat(CHAT, GREEDY)
    assert output.prompt is not None and output.prompt.startswith("<|im_start|>user\nPlease")
    assert output.prompt.endswith("<|im_start|>assistant\n")
    one, two = llm.chat([CHAT, CHAT], GREEDY, add_generation_prompt=False)
    assert one.prompt == two.prompt == output.prompt.removesuffix("<|im_start|>assistant\n")


def test_prompts_may_have_their_adapters(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other in the one place there is."""
    story, greedy = STORIES[0], SamplingParams(temperature=0, max_tokens=4)
    texts = {expected(story, 4)}
    for i in range(2):
        folder = make_adapter(tmp_path / f"{i}", MODEL, seed=i)
        merged(folder, MODEL, tmp_path / f"merged-{i}")
        adapter = LoRARequest(f"lora-{i}", i + 1, folder)
        (output,) = llm.generate(story, greedy, lora_request=adapter)
        assert output.outputs[0].text == expected(story, 4, tmp_path / f"merged-{i}")
        texts.add(output.outputs[0].text)
    assert len(texts) == 3
    chat, both = [llm.chat(CHAT, greedy, lora_request=each) for each in (None, "lora-1")]
    assert chat[0].prompt == both[0].prompt and chat[0].outputs != both[0].outputs
    # Beside the model alone; the same name for another folder.
    monkeypatch.chdir(tmp_path)
    mixed = llm.generate([story] * 2, greedy, lora_request=[None, LoRARequest("lora-1", 1, "0")])
    assert [each.outputs[0].text for each in mixed] == [
        expected(story, 4), expected(story, 4, tmp_path / "merged-0")
    ]  # fmt: skip
    # A server that has started anew has forgotten it.
    body, headers = {"lora_name": "lora-1"}, {"Authorization": f"Bearer {KEY}"}
    requests.post(f"{llm.url}/v1/unload_lora_adapter", json=body, headers=headers, timeout=60)
    assert llm.generate(story, greedy, lora_request=LoRARequest("lora-1", 1, "0"))
    first, second = LoRARequest("a", 1, "0"), LoRARequest("b", 2, "1")
    for wrong, reason in (
        ("lora-0", "does not exist"),
        (LoRARequest("c", 1, "nowhere"), f"{tmp_path}/nowhere: adapter_config.json is missing"),
        ([first, second], "as many as --max-loras allows"),
        ([first, LoRARequest("a", 1, "1")], "has two paths"),
        ([first], "2 prompts have 1 lora_requests"),
        ([None, 5], "is a name or a LoRARequest, not 5"),
    ):
        with pytest.raises(RequestError, match=reason):
            llm.generate([story] * 2, greedy, lora_request=wrong)


@pytest.mark.parametrize(
    ("prompts", "params", "reason"),
    [
        (["x", "a " * 5000], None, "prompt 1: .*maximum context length"),
        ("x", SamplingParams(temperature=-1), "temperature must be at least 0"),
        ("x", SamplingParams(temperature=object()), "not JSON"),
        ("x", SamplingParams(temperature=float("nan")), "not JSON"),
        (["x", "y"], [GREEDY], "2 prompts have 1 sampling_params"),
        ([{"prompt": "x", "multi_modal_data": {}}], None, "not: prompt, multi_modal_data"),
        ([["x"]], None, "text or token ids"),
        ([[3, 10**9]], None, "token id"),
    ],
)
def test_refusals_name_the_reason(llm: LLM, prompts: Any, params: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        llm.generate(prompts, params)
    assert llm.generate(STORIES[0], GREEDY)[0].outputs[0].text == expected(STORIES[0])


def test_an_interrupt_ends_the_requests_and_nothing_else(llm: LLM) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}

    def nodes() -> list[dict[str, Any]]:
        found = requests.get(f"{llm.url}/v1/cluster", headers=headers, timeout=60).json()
        return list(found["nodes"])

    def interrupt() -> None:
        while not any(node["in_flight"] for node in nodes() if node["role"] == "decode"):
            pass
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    long = SamplingParams(max_tokens=900, ignore_eos=True)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(STORIES * 20, long)
    thread.join()
    while not all(map(is_idle, nodes())):
        pass
    assert llm.generate(STORIES[1], GREEDY)[0].outputs[0].text == expected(STORIES[1])


def test_the_name_given_is_the_name_served(llm: LLM) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    cards = requests.get(f"{llm.url}/v1/models", headers=headers, timeout=60).json()["data"]
    assert cards[0]["id"] == NAME


# ---- run-batch ------------------------------------------------------------------------------


def request(custom_id: str, body: Any, url: str = "/v1/completions") -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def completion(number: int, **more: Any) -> dict[str, Any]:
    body = {"prompt": STORIES[number], "max_tokens": 12, "temperature": 0, **more}
    return request(f"story-{number}", body)


def write(path: Path, lines: list[Any]) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n")
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_bad_lines_end_no_run(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat = request("chat", {"messages": CHAT, "max_tokens": 4}, "/v1/chat/completions")
    bad: list[Any] = [
        "no JSON", "[]", "NaN", {"method": "POST"}, completion(0),
        {**completion(1), "method": "GET"},
        request("far", {}, "http://elsewhere/v1/completions"), request("list", []),
        request("streamed", {"prompt": "x", "stream": True}), '{"custom_id": "\\ud800"}',
    ]  # fmt: skip
    refused = [request("400", {"prompt": 5}), request("404", {}, "/v1/nowhere")]
    path = write(tmp_path / "in.jsonl", [completion(0), "", *bad, chat, *refused])
    command = ["run-batch", "-i", str(path), "-o", str(tmp_path / "out.jsonl"), "--url", url]
    assert main([*command, "--json"]) == 1
    summary = json.loads(capsys.readouterr().out)
    assert (summary["requests"], summary["answered"], summary["failed"]) == (14, 2, 12)
    answers = read(tmp_path / "out.jsonl")
    by_id = {each["custom_id"]: each for each in answers}
    assert by_id["story-0"]["response"]["body"]["choices"][0]["text"] == expected(STORIES[0])
    assert by_id["chat"]["response"]["body"]["object"] == "chat.completion"
    assert by_id["400"]["response"]["status_code"] == 400
    assert by_id["400"]["response"]["body"]["error"]["param"] == "prompt"
    assert by_id["404"]["response"]["status_code"] == 404
    assert "method must be POST" in by_id["story-1"]["error"]["message"]
    assert sorted(each["error"]["line"] for each in answers if each["error"]) == list(range(3, 13))
    assert main(command) == 1  # nothing is asked for again
    assert "the commonest error, 3 times: invalid" in capsys.readouterr().err
    assert read(tmp_path / "out.jsonl") == answers


def stopped_in_the_middle(program: Sequence[str], out: Path, whole: int) -> subprocess.Popen[bytes]:
    """A run that stands still with some of its answers; one that is over by then is run anew."""

    def answers() -> int:
        return out.read_bytes().count(b"\n") if out.exists() else 0

    def has_some(run: subprocess.Popen[bytes]) -> bool:
        return run.poll() is not None or answers() >= 2

    while True:
        run = subprocess.Popen(program)
        wait_until(partial(has_some, run))
        run.send_signal(signal.SIGSTOP)
        if run.poll() is None and answers() < whole:
            return run
        run.send_signal(signal.SIGCONT)
        assert run.wait(60) == 0
        out.unlink()


def test_a_run_goes_on_with_what_is_missing(url: str, tmp_path: Path) -> None:
    long = {"max_tokens": 80, "ignore_eos": True}
    lines = [completion(number, **long) for number in range(len(STORIES))]
    path, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    command = ["run-batch", "-i", str(path), "-o", str(out), "--url", url]
    program = [str(Path(sys.executable).with_name("pdserve")), *command, "--max-concurrency=1"]
    run = stopped_in_the_middle(program, out, len(lines))
    assert main(command) == 2  # two at once
    run.send_signal(signal.SIGINT)
    run.send_signal(signal.SIGCONT)
    assert run.wait(30) == 130
    first = read(out)
    assert 2 <= len(first) < len(STORIES)
    with out.open("a") as file:
        file.write('{"id": "batch_req-cut o')  # as a full disk or a power cut leaves it
    assert main(command) == 0
    answers = read(out)
    assert answers[: len(first)] == first
    assert sorted(each["custom_id"] for each in answers) == sorted(
        line["custom_id"] for line in lines
    )
    assert all(map(succeeded, answers))


def test_a_full_disk_ends_the_run_and_spoils_nothing(url: str, tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", [completion(number) for number in range(len(STORIES))])
    out = tmp_path / "out.jsonl"
    command = ["run-batch", "-i", str(path), "-o", str(out), "--url", url]
    limited = ["bash", "-c", 'ulimit -f 2; exec "$@"', "-"]
    program = [*limited, str(Path(sys.executable).with_name("pdserve")), *command]
    run = subprocess.run([*program, "--max-concurrency=1"], capture_output=True, text=True)
    assert run.returncode == 1 and "Traceback" not in run.stderr
    assert f"{out}: File too large; run the same command to continue" in " ".join(
        run.stderr.split()
    )
    first = read(out)  # whole lines
    assert 0 < len(first) < len(STORIES)
    assert main(command) == 0
    assert read(out)[: len(first)] == first and len(read(out)) == len(STORIES)


@pytest.mark.parametrize(
    ("flags", "code", "reason"),
    [
        (["-i", "in.jsonl"], 2, "are required"),
        (["-i", "nowhere.jsonl", "-o", "out.jsonl", "--url", "URL"], 2, "No such file"),
        (["-i", "in.jsonl", "-o", "in.jsonl", "--url", "URL"], 2, "is not a batch answer"),
        (["-i", "in.jsonl", "-o", "/dev/zero", "--url", "URL"], 2, "/dev/zero is a pipe or a dev"),
        (["-i", "/dev/null", "-o", "out.jsonl", "--url", "URL"], 2, "give a file"),
        (
            ["-i", "in.jsonl", "-o", "out.jsonl", "--url", "URL", "--decode=2"],
            2,
            "takes no cluster options: leave out --decode",
        ),
        (["-i", "in.jsonl", "-o", "out.jsonl", "--url", "URL"], 1, "API key"),
    ],
)
def test_a_batch_that_cannot_run_is_refused_in_one_line(
    flags: list[str],
    code: int,
    reason: str,
    llm: LLM,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The last one has no key: it must not become the answer of every line."""
    monkeypatch.chdir(tmp_path)
    before = write(tmp_path / "in.jsonl", [completion(0)]).read_text()
    assert main(["run-batch", *(llm.url if flag == "URL" else flag for flag in flags)]) == code
    assert reason in capsys.readouterr().err
    assert (tmp_path / "in.jsonl").read_text() == before
    assert not (tmp_path / "out.jsonl").exists() or not (tmp_path / "out.jsonl").read_text()


def test_the_example(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With this cluster in place of one of its own."""
    path = write(tmp_path / "in.jsonl", [{"messages": CHAT}, {"prompt": STORIES[0], "id": 7}])
    code = compile((ROOT / "examples" / "batch_jsonl.py").read_text(), "batch_jsonl.py", "exec")
    argv = ["batch_jsonl.py", str(path), str(tmp_path / "out.jsonl"), "--max-tokens=12"]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr("pdserve.offline.llm.LLM", lambda model: _Open(llm))
    exec(code, {"__name__": "__main__", "__doc__": "doc"})
    chat, text = read(tmp_path / "out.jsonl")
    assert text == {"prompt": STORIES[0], "id": 7, "answer": expected(STORIES[0])}
    assert chat["answer"] == llm.chat(CHAT, GREEDY)[0].outputs[0].text


class _Open:
    """A context whose end ends nothing."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def __enter__(self) -> LLM:
        return self._llm

    def __exit__(self, *error: object) -> None:
        pass


# ---- chat, top, bench -----------------------------------------------------------------------

PROGRAM = str(Path(sys.executable).with_name("pdserve"))


class Terminal:
    """`pdserve` on a terminal of its own, until it has ended or is no longer wanted."""

    def __init__(self, *arguments: str) -> None:
        pid, self._end = pty.fork()
        if not pid:
            os.execv(PROGRAM, (PROGRAM, *arguments))
        self._pid = pid
        self._code: int | None = None
        self.seen = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self._code is None:
            os.kill(self._pid, signal.SIGKILL)
            self.wait()
        os.close(self._end)

    def until(self, text: str) -> str:
        """Returns what came up to the text, which must come within a while; the rest waits."""
        while text not in self.seen:
            assert self._is_readable(60), self.seen
            self.seen += os.read(self._end, 65536).decode(errors="replace")
        before, _, self.seen = self.seen.partition(text)
        return before

    def _is_readable(self, within: float) -> bool:
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        return bool(poll.poll(1000 * within))

    def type(self, keys: str) -> None:
        os.write(self._end, keys.encode())

    def interrupt(self, text: str) -> None:
        """Ctrl-C until this comes: one is lost if it falls into the moment before Python waits for
        a key."""
        self.type("\x03")
        while text not in self.seen:
            if self._is_readable(5):
                self.seen += os.read(self._end, 65536).decode(errors="replace")
            else:
                self.type("\x03")
        self.until(text)

    def wait(self) -> int:
        self._code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return self._code


def test_a_conversation_on_a_terminal(llm: LLM, url: str) -> None:
    flags = ("--url", url, "--temperature=0", "--max-tokens=12")
    with Terminal("chat", *flags) as terminal:
        assert NAME in terminal.until("> ")
        answer = llm.chat(CHAT, GREEDY)[0].outputs[0].text
        for _ in range(2):
            terminal.type(CHAT[0]["content"] + "\r")
            shown = terminal.until("TTFT")
            assert answer.split("\n")[0].strip() in shown.replace("\r", "")
            assert " ms · TPOT " in terminal.until("12 tokens")
            terminal.until("> ")
            terminal.type("/reset\r")  # so that the next answer is the first one again
            terminal.until("new conversation")
            terminal.until("> ")
        terminal.type("/help\r")
        terminal.until("/system TEXT")
        terminal.until("> ")
        terminal.type("\x04")
        assert terminal.wait() == 0


def test_an_answer_may_be_cut_short(url: str) -> None:
    """By Ctrl-C, and the conversation goes on; at the prompt it drops the line."""
    with Terminal("chat", "--url", url, "--temperature=0", "--max-tokens=900") as terminal:
        terminal.until("> ")
        terminal.type("half a question")
        terminal.until("half a question")  # readline has read it, and waits for a key
        terminal.interrupt("> ")
        for _ in range(5):  # it may be over before it is cut
            terminal.type("Please write about Zoë.\r")
            terminal.until("\n")
            terminal.until("Once")
            terminal.type("\x03")
            shown = terminal.until("> ")
            if "…" in shown:
                break
            terminal.type("/reset\r")
            terminal.until("new conversation")
            terminal.until("> ")
        assert "tokens" not in shown.partition("…")[0] and "…" in shown
        terminal.type("/quit\r")
        assert terminal.wait() == 0


def test_chat_through_pipes(llm: LLM, url: str) -> None:
    """Standard output is the answer; a server that refuses is a line and exit code 1."""
    flags = ["--url", url, "--temperature=0", "--max-tokens=12"]
    text = CHAT[0]["content"]
    answer = llm.chat(CHAT, GREEDY)[0].outputs[0].text
    ended = subprocess.run(
        [PROGRAM, "chat", *flags], input=text.encode(), capture_output=True, check=True
    )
    assert (ended.stdout.decode(), ended.stderr) == (answer + "\n", b"")
    system = [{"role": "system", "content": "Be brief."}, *CHAT]
    quick = [PROGRAM, "chat", *flags, "--system", "Be brief.", "-q", text]
    ended = subprocess.run(quick, capture_output=True, check=True)
    assert ended.stdout.decode() == llm.chat(system, GREEDY)[0].outputs[0].text + "\n"
    ended = subprocess.run([*quick, "--model", "another"], capture_output=True)
    assert ended.returncode == 1 and ended.stdout == b""
    assert ended.stderr.startswith(b"pdserve chat: error: The model `another` does not exist")


def test_top(llm: LLM, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(STORIES[0], GREEDY, use_tqdm=False)
    assert main(["top", "--url", url]) == 0  # no terminal: once
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "prefill" in text and "decode" in text and text.count("ready") == 2
    rates = r"TTFT [0-9.]+ ms, ITL [0-9.]+ ms, [0-9,.]+ tok/s, prefix hits [0-9]+%"
    assert re.search(rates, text), text
    assert main(["top", "--url", url, "--once", "--json"]) == 0
    state = json.loads(capsys.readouterr().out)
    assert state["ready"] and {node["role"] for node in state["nodes"]} == {"prefill", "decode"}
    with Terminal("top", "--url", url, "--interval", "0.05") as terminal:
        for _ in range(3):  # it is drawn again and again
            terminal.until("decode")
        terminal.type("\x03")
        assert terminal.wait() == 0
    assert main(["top", "--url", "http://127.0.0.1:9"]) == 1
    assert "does not answer" in capsys.readouterr().err


def test_bench_serve(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        "bench",
        "serve",
        "--url",
        url,
        "--num-prompts",
        "4",
        "--max-concurrency",
        "2",
        "--json",
    ]
    argv += ["--dataset-name", "prefix_repetition", "--prefix-repetition-num-prefixes", "1"]
    argv += ["--prefix-repetition-prefix-len=64", "--prefix-repetition-suffix-len=8"]
    assert main([*argv, "--prefix-repetition-output-len=8", "--ignore-eos"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["completed"], result["total_output_tokens"]) == (4, 32)
    assert result["total_cached_tokens"] >= 64  # of those that came after the first two

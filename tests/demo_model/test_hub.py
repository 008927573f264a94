"""Models by name, from a hub on this host: what is fetched, what is found again, what is said."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from hub import COMMIT, TOKEN, Hub, running_hub, use
from paths import MODELS
from pdserve.cli.main import main
from pdserve.common.config.engine import ModelConfig
from pdserve.common.core.errors import ConfigError
from pdserve.demo_model.embedded import resolve_model


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as repositories have it: with other forms of the weights, and more."""
    folder = tmp_path_factory.mktemp("repos") / "model"
    shutil.copytree(MODELS / "llama-gqa", folder)
    (folder / "onnx").mkdir()
    for name in (
        "README.md", "pytorch_model.bin", "consolidated.safetensors", "onnx/model.onnx",
        "onnx/config.json", "chat_template.jinja",
    ):  # fmt: skip
        (folder / name).write_text("{}")
    return folder


@pytest.fixture
def hub(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub({"tiny/llama": repo, "gated/llama": repo}) as hub:
        use(hub, tmp_path / "cache", monkeypatch)
        yield hub


def test_only_what_is_needed_is_fetched_and_once(hub: Hub, repo: Path) -> None:
    model = resolve_model(ModelConfig(model="tiny/llama"))
    folder = Path(model.model or "")
    assert folder.name == COMMIT
    assert model.served_model_name == ["tiny/llama"]
    names = {path.name for path in folder.iterdir()}
    assert names == {path.name for path in (MODELS / "llama-gqa").iterdir()} | {
        "chat_template.jinja"
    }
    assert sorted(hub.downloads) == sorted(names)
    for name in names:
        assert (folder / name).read_bytes() == (repo / name).read_bytes()
    assert resolve_model(ModelConfig(model="tiny/llama")) == model
    assert len(hub.downloads) == len(names)


def test_dummy_weights_need_none(hub: Hub) -> None:
    config = ModelConfig(model="tiny/llama", load_format="dummy", served_model_name=["mine"])
    model = resolve_model(config)
    assert model.served_model_name == ["mine"]
    assert not any(name.endswith(".safetensors") for name in hub.downloads)


def test_a_router_fetches_no_weights_and_a_node_what_is_missing(hub: Hub) -> None:
    described = resolve_model(ModelConfig(model="tiny/llama"), weights=False)
    assert not any(name.endswith(".safetensors") for name in hub.downloads)
    assert "tokenizer.json" in hub.downloads
    assert resolve_model(ModelConfig(model="tiny/llama")) == described
    assert "model.safetensors" in hub.downloads
    assert len(hub.downloads) == len(set(hub.downloads))


def test_the_cache_serves_without_a_network(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Be it forbidden, or away: what was fetched once is enough, from --download-dir, too."""
    config = ModelConfig(model="tiny/llama", download_dir=str(tmp_path / "mine"), revision=COMMIT)
    fetched = resolve_model(config)
    assert fetched.download_dir is None and fetched.revision is None
    assert Path(fetched.model or "").is_relative_to(tmp_path / "mine")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert resolve_model(config) == fetched
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve_model(config) == fetched
    with pytest.raises(ConfigError, match=r"lacks files of tiny/llama.*HF_HUB_OFFLINE"):
        resolve_model(ModelConfig(model="tiny/llama"))


def test_gated_models_want_a_token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"gated/llama is gated: accept its terms at http"):
        resolve_model(ModelConfig(model="gated/llama"))
    assert hub.downloads == []
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert Path(resolve_model(ModelConfig(model="gated/llama")).model or "").is_dir()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (ModelConfig(model="tiny/lama"), "tiny/lama is neither a folder nor a model on http"),
        (ModelConfig(model="tiny/llama", revision="v9"), "tiny/llama has no revision v9"),
        (ModelConfig(model="tiny/--x"), "cannot download tiny/--x"),
        (ModelConfig(revision="main"), "--revision and --download-dir need --model"),
        (ModelConfig(model=str(MODELS), revision="main"), "need --model to be a name"),
    ],
)
def test_a_failed_download_is_one_sentence(hub: Hub, config: ModelConfig, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as error:
        resolve_model(config)
    assert "\n" not in error.value.message


def test_without_a_network_it_says_so(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"lacks files of tiny/llama.*does not answer"):
        resolve_model(ModelConfig(model="tiny/llama"))


def test_the_command_fetches_ahead(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "tiny/llama"]) == 0
    folder = Path(capsys.readouterr().out.strip())
    assert (folder / "model.safetensors").is_file()
    assert main(["model", "tiny/lama"]) == 2


def test_plan_resolves_a_name(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "--model", "tiny/llama", "--gpu-memory", "24GiB", "--max-num-seqs=8", "--json"]
    assert main(argv) == 0
    assert json.loads(capsys.readouterr().out)["roles"]
    assert "config.json" in hub.downloads
    assert not any(name.endswith(".safetensors") for name in hub.downloads)
    assert main([*argv, "--revision=v9"]) == 2
    assert "has no revision v9" in capsys.readouterr().err
    assert main(["plan", "--model", "tiny/lama", "--gpu-memory=24GiB"]) == 2
    assert "tiny/lama is neither a folder nor a model on http" in capsys.readouterr().err


def test_folders_are_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative one of two parts looks like a name, but it is there."""
    shutil.copytree(MODELS / "llama-gqa", tmp_path / "tiny" / "llama")
    monkeypatch.chdir(tmp_path)
    for model in ("tiny/llama", "./tiny/llama", "/nowhere/at/all", "nowhere", "a/b/c"):
        config = ModelConfig(model=model)
        assert resolve_model(config) == config

import pytest
from kit.own_servers import PYTHON


@pytest.fixture
def directories(tmp_path):
    pytest.importorskip("safetensors.torch")  # before any clock runs: it takes its time
    from kit.fleets import fingerprint

    from turnwright.engines.remote.weight_files import ModelDirectories

    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text("{}")
    (tmp_path / "source" / "model.safetensors").write_bytes(b"never copied")
    return ModelDirectories(tmp_path / "directories", tmp_path / "source", fingerprint=fingerprint)


@pytest.fixture
def home(tmp_path):
    for kind in ("vllm", "sglang"):
        python = tmp_path / "home" / kind / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(PYTHON)
        python.chmod(0o755)
    server = tmp_path / "home" / "llamacpp" / "bin" / "llama-server"
    server.parent.mkdir(parents=True)
    server.write_text(PYTHON)
    server.chmod(0o755)
    return tmp_path / "home"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    from kit.serving import TEXTS

    from turnwright.config import ModelConfig
    from turnwright.training import create_tiny_model

    return create_tiny_model(
        ModelConfig(hidden=32, layers=1), TEXTS, tmp_path_factory.mktemp("served") / "model", seed=3
    )

import pytest


@pytest.fixture
def directories(tmp_path):
    pytest.importorskip("safetensors.torch")  # before any clock runs: it takes its time
    from test_remote_fleet import fingerprint

    from turnwright.engines.remote.weight_files import ModelDirectories

    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text("{}")
    (tmp_path / "source" / "model.safetensors").write_bytes(b"never copied")
    return ModelDirectories(tmp_path / "directories", tmp_path / "source", fingerprint=fingerprint)

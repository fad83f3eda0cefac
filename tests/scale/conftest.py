import pytest
from kit.workers import finished, processes, start, write_recipe


@pytest.fixture(scope="session")
def alone(tmp_path_factory):
    """A run that plays its episodes itself."""
    folder = tmp_path_factory.mktemp("alone")
    recipe, log = write_recipe(folder), folder / "log"
    with processes() as started:
        started.append(start("train", recipe, "--out", folder / "run", log=log))
        finished(started[0], log)
    first, last = (
        (folder / "run" / "checkpoints" / f"step-0000{step}" / "model.safetensors").read_bytes()
        for step in (1, 2)
    )
    assert first != last, "no step changed the weights: equal weights would prove nothing"
    return folder / "run"

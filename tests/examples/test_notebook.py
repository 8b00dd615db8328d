"""examples/quickstart.ipynb runs from its first cell to its last, with tiny settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"
TINY = (
    "model={type: film_resnet}",
    "env.num_envs=8",
    "rollout.episodes=8",
    "rollout.group_size=4",
    "rollout.max_steps=8",
    "algorithm={type: grpo, filter_identical: false}",
    "placement={type: collocated}",
    "runtime.backend=local",
    "train.steps=2",
    "train.micro_batch=8",
    "train.global_batch=8",
    "eval.episodes_per_task=1",
    "hooks=[{type: jsonl}, {type: video, episodes: 1}]",
)


def test_it_is_kept_without_outputs():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


@pytest.mark.slow
def test_it_runs(tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: pip install nbclient ipykernel")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed: pip install nbclient ipykernel")
    import nbformat

    monkeypatch.setenv("QUICKSTART_OVERRIDES", "\n".join(TINY))
    monkeypatch.setenv("QUICKSTART_FOLDER", str(tmp_path / "run"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=200, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    images = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(images) == 2, "the live curves, and those that were asked for"
    texts = "".join(output.get("text", "") or output.get("data", {}).get("text/plain", "") for output in outputs)
    assert "film_resnet on tabletop with grpo for 2 steps" in texts
    assert "RunRecord(" in texts and "success" in texts and "(4, " in texts
    assert any("video/mp4" in str(output.get("data", {}).get("text/html", "")) for output in outputs)
    assert "type: notebook" in (tmp_path / "run" / "spec.yaml").read_text()

"""docs/quickstart.ipynb runs as it stands, twice in the same kernel where it says it may."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from demo_home import shared_home

NOTEBOOK = Path(__file__).resolve().parent.parent / "docs" / "quickstart.ipynb"


@pytest.mark.slow
def test_quickstart_runs(tmp_path: Path):
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    training = next(i for i, c in enumerate(notebook.cells) if "qerl.train(" in c.source)
    memory = nbformat.v4.new_code_cell("import psutil; print(psutil.Process().memory_info().rss)")
    again = notebook.cells[training].copy()
    notebook.cells[training + 1 : training + 1] = [memory, again, memory.copy()]
    client = NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": str(tmp_path)}})
    with shared_home() as home:
        client.execute(env=os.environ | {"QERL_HOME": str(home)})
    first, second = (
        int(cell.outputs[0].text) for cell in notebook.cells if cell.source == memory.source
    )
    assert second < first * 1.25, (first, second)
    assert (tmp_path / "my-adapter" / "adapter_model.safetensors").exists()
    assert len(list((tmp_path / "runs").iterdir())) == 2

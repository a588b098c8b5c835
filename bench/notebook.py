"""Run the example notebook and store what it shows: `python bench/notebook.py`.

Needs a kernel, which nothing else here does: `pip install nbclient ipykernel`. Progress is left out.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

NOTEBOOK = Path(__file__).parents[1] / "examples" / "first_look.ipynb"


def main() -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=600, resources={"metadata": {"path": folder}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        cell.pop("id", None)
        if cell.cell_type == "code":
            cell.outputs = [each for each in cell.outputs if not _is_progress(each)]
    notebook.metadata.language_info = {"name": "python"}
    notebook.nbformat_minor = 4  # the last without ids of cells, which differ in each run
    NOTEBOOK.write_text(nbformat.writes(notebook, version=nbformat.NO_CONVERT) + "\n")


def _is_progress(output: Any) -> bool:
    return output.get("name") == "stderr" and output.text.startswith("\r")


if __name__ == "__main__":
    main()

"""The notebooks that test_notebooks.py does not run."""

import pytest
from save_notebooks import NAMES, run


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", NAMES[1::2])
def test_it_runs(name, tmp_path):
    assert all(cell.execution_count for cell in run(name, str(tmp_path)).cells if cell.cell_type == "code")

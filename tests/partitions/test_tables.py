"""The tables of datasets, models and partitions are read without heavy libraries."""

import subprocess
import sys

PROGRAM = """
import sys
from clients.models import MODELS
from partitions.datasets.loading import DATASETS, info
from partitions.rules.registry import PARTITIONS
rows = [info(name).summary for name in DATASETS]
rows += [row.summary for table in (MODELS, PARTITIONS) for row in table.values()]
assert len(rows) > 30 and all(rows)
print(*sorted({"torch", "flwr", "datasets", "flwr_datasets", "PIL", "scipy"} & set(sys.modules)))
"""


def test_tables_import_neither_torch_nor_flower():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr

"""A later client's broken images and rows with empty cells."""

import numpy as np
import pandas as pd
import pytest
from own_files import configuration
from PIL import Image

import fedapps
from fedapps.clientapp import app
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.serverapp import run


def trained(path, folder, **changes):
    """A finished run of one round."""
    config = configuration(path, 1, **changes) | {"output-dir": str(folder)}
    run(InProcessGrid.simulation(app, config, 4), config, "in-process")
    return fedapps.load(folder)


def test_a_later_clients_broken_images(tmp_path):
    for name in ("a", "b"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for number in range(20):
            picture = Image.new("L", (4, 4), 10 * number)
            picture.save(tmp_path / "data" / name / f"{number}.png")
    finished = trained(tmp_path / "data", tmp_path / "run", **{"skip-broken": 0.05})
    (tmp_path / "data" / "a" / "3.png").write_bytes(b"")
    inputs = finished.inputs(tmp_path / "data")  # the run's share
    assert len(inputs.names) == 39 and "a/3.png" not in inputs.names
    assert "1 of 40 images are left out" in inputs.notes[0]
    with pytest.raises(ValueError, match=r"a/3\.png is no whole image"):
        finished.inputs(tmp_path / "data", 0.0)
    with pytest.raises(ValueError, match=r"skip-broken is 1; it must lie"):
        finished.inputs(tmp_path / "data", 1)


def test_a_later_clients_rows_with_empty_cells(tmp_path):
    rows = np.arange(40)
    frame = pd.DataFrame({"a": rows * 0.5, "b": rows % 7 + 0.25, "label": rows % 2})
    frame.to_csv(tmp_path / "d.csv", index=False)
    finished = trained(tmp_path / "d.csv", tmp_path / "run")
    later = frame[["b", "a"]].copy()
    later.loc[2, "a"] = np.nan
    later.to_csv(tmp_path / "later.csv", index=False)
    with pytest.raises(ValueError, match=r"column a has 1 cells without a value"):
        finished.inputs(tmp_path / "later.csv")
    inputs = finished.inputs(tmp_path / "later.csv", 0.1)
    assert inputs.names == [str(row) for row in range(40) if row != 2]
    assert inputs.share.everything[:][0].shape == (39, 2)

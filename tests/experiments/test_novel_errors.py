"""Novel clients' errors, by which training client has the two classes."""

import numpy as np
import pytest
from small_runs import SMALL

from experiments.novel_errors import covered, errors, main
from fedapps.serverapp import run_in_process
from partitions import federation

OWNED = [{0, 1}, {1, 2}]


def test_an_error_counts_by_whether_a_client_has_both_classes():
    """0 for 1 and 2 for 1 are held together by the first and second client, 0 for 2 by none."""
    y = np.array([0, 2, 0, 1, 2])
    predicted = np.array([1, 1, 2, 1, 2])
    assert errors(y, predicted, OWNED) == (2, 1)


def test_a_client_covers_the_samples_of_its_classes():
    """Of the labels 0, 0, 1, 2 the first client has three, the second two."""
    shares = covered(np.array([0, 0, 1, 2]), OWNED)
    assert shares == pytest.approx([0.75, 0.5])


def test_a_run_has_a_row_of_its_novel_clients(tmp_path, capsys):
    """The errors are those that the accuracy leaves; the best training client covers at least as
    many samples as the mean of them."""
    config = SMALL | {"partition": "dirichlet"}
    run_in_process(config | {"output-dir": str(tmp_path / "fedavg-seed0")})
    clients = federation(config)
    samples = 0
    for client in np.flatnonzero(clients.novel):
        samples += len(clients.share(int(client)).everything.index)
    main([str(tmp_path)])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "fedavg-seed0" in line]
    accuracy, together, apart, mean, best = map(float, line.split("|")[2:7])
    assert accuracy == pytest.approx(100 * (1 - (together + apart) / samples), abs=0.06)
    assert 0 < mean <= best <= 100

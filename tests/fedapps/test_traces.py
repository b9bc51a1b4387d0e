from itertools import pairwise

import numpy as np
import pytest
import torch
from pandas import DataFrame
from safetensors.numpy import load_file
from small_runs import invoke

from fedapps.clientapp import app
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.results.plot import save
from fedapps.serverapp import run
from fedapps.service.figures import TRACED, draw_traces, make_client, trace, trace_lines, traces
from partitions import federation


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    from fedapps.settings.config import defaults

    folder = tmp_path_factory.mktemp("run")
    config = defaults() | {"method": "fedtta++", "num-clients": 6, "rounds": 2, "local-steps": 3}
    config |= {"lr-decay": 0.01, "lr-decay-rounds": 1}  # the steps are those of round 2
    config["output-dir"] = str(folder)
    run(InProcessGrid.simulation(app, config, 6), config, "in-process")
    return config, folder


def test_a_trace_agrees_with_the_reported_evaluation(finished):
    """Step 0 is the un-adapted model; the step of least entropy is FedTTA++'s prediction."""
    import json

    config, folder = finished
    report = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["evaluation"]
    found = traces(folder, None, 50)
    assert list(found) == np.flatnonzero(federation(config).novel).tolist()
    first = np.mean([t.loc[0] for t in found.values()], axis=0)
    assert first[0] == pytest.approx(report["novel-base-accuracy"])
    assert first[2] == pytest.approx(report["novel-entropy-before"])
    entropies = [t.entropy.tolist() for t in found.values()]
    least = [  # with patience 1
        next((a for a, b in pairwise(e[1:]) if b >= a), e[-1]) for e in entropies
    ]
    assert np.mean(least) == pytest.approx(report["novel-entropy"])
    assert {t.shape for t in found.values()} == {(51, 3)}


def test_the_figure_is_drawn_for_one_client(finished, tmp_path):
    config, folder = finished
    client = int(np.flatnonzero(federation(config).novel)[0])
    one = traces(folder, client, 3)
    assert list(one) == [client]
    figure, accuracy = draw_traces(one), one[client].accuracy
    assert figure.axes[0].lines[0].get_ydata().tolist() == accuracy.tolist()
    assert list(trace_lines(one))[1].startswith(f"step   1  accuracy {accuracy[1]:.4f}")
    save(figure, tmp_path / "traces.pdf")
    assert (tmp_path / "traces.pdf").read_bytes().startswith(b"%PDF")


def test_the_command_tells_what_it_draws(finished, tmp_path):
    """The means of all novel clients at a few steps, and the figure."""
    output = tmp_path / "traces.svg"
    done = invoke("plot", finished[1], "traces", "--steps", 2, "--output", output)
    assert done.output.splitlines()[:3] == list(trace_lines(traces(finished[1], None, 2)))
    assert output.read_bytes().startswith(b"<?xml")


def test_training_clients_and_other_methods_are_refused(finished):
    config, folder = finished
    client = int(np.flatnonzero(~federation(config).novel)[0])
    with pytest.raises(ValueError, match=f"client {client} is not novel"):
        traces(folder, client, 3)
    arrays = load_file(folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"'fedavg'.*fedtta"):
        trace(config | {"method": "fedavg"}, arrays, 0, 3, 1)


def test_a_trace_of_values_has_the_error_in_their_unit(tmp_path):
    """Step 0 is the un-adapted model: its root mean square error, of labels around 500."""
    from fedapps.settings.config import defaults

    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 3)).astype("float32")
    y = 500 + 20 * x.sum(1)
    np.savez(tmp_path / "values.npz", x=x, y=y)
    config = defaults() | {"method": "fedtta", "dataset": str(tmp_path / "values.npz")}
    config |= {"task": "values", "inputs": "vector", "partition": "iid", "num-clients": 4}
    novel = int(np.flatnonzero(federation(config).novel)[0])
    client = make_client(config, novel)
    traced = trace(config, client.initial, novel, 1, 1)
    assert list(traced) == ["RMSE", *TRACED]
    inputs, labels = client.share.everything[:]
    with torch.no_grad():
        errors = (client.base(inputs) - labels) * client.targets.std[0]
    expected = errors.square().mean().sqrt().item()
    assert expected > 5
    assert traced.RMSE[0] == pytest.approx(expected)


def test_means_over_clients_and_the_step_of_least_entropy():
    """Entropies 0.1 0.9 0.6 and 0.3 0.7 0.2: means 0.2, 0.8 and 0.4. That of the
    un-adapted model is the least and does not count: step 2."""
    found = {
        3: DataFrame([[0.1, 5, 0.1], [0.2, 4, 0.9], [0.6, 1, 0.6]], columns=["accuracy", *TRACED]),
        8: DataFrame([[0.3, 7, 0.3], [0.6, 2, 0.7], [0.8, 2, 0.2]], columns=["accuracy", *TRACED]),
    }
    figure = draw_traces(found)
    curves = [axis.lines[0].get_ydata() for axis in figure.axes]
    for curve, expected in zip(
        curves, ([0.2, 0.4, 0.7], [6, 3, 1.5], [0.2, 0.8, 0.4]), strict=True
    ):
        assert curve.tolist() == pytest.approx(expected)
    assert [axis.lines[1].get_xdata() for axis in figure.axes] == [[2, 2]] * 3
    assert [line.split()[1:] for line in trace_lines(found)] == [
        ["0", "accuracy", "0.2000", "ℓ_per", "6.0000", "entropy", "0.2000"],
        ["1", "accuracy", "0.4000", "ℓ_per", "3.0000", "entropy", "0.8000"],
        ["2", "accuracy", "0.7000", "ℓ_per", "1.5000", "entropy", "0.4000"],
    ]

"""Arrays with several readings are declared; whole numbers of tokens stay whole."""

import numpy as np
import pytest
import torch

import partitions
from fedapps.settings.config import defaults
from partitions.datasets.loading import configured
from partitions.datasets.readers.local import read_files
from partitions.shares import Share

pytestmark = pytest.mark.usefixtures("own_cache")
LABELS = np.arange(12) % 2


def config(folder, x, **changes):
    np.savez(folder / "d.npz", x=x, y=LABELS)
    split = {"partition": "iid", "num-clients": 2, "train-fraction": 1.0}
    return defaults() | split | {"dataset": str(folder / "d.npz")} | changes


def test_decimals_of_three_axes_are_declared(tmp_path):
    x = np.random.default_rng(0).normal(size=(12, 6, 50)).astype(np.float32)
    sentence = (
        r"decimals with the shape \(12, 6, 50\); set inputs=signal for 6 channels of 50 steps "
        r"each, or inputs=image for images of 6×50 pixels"
    )
    with pytest.raises(ValueError, match=sentence):
        configured(config(tmp_path, x))
    signal = configured(config(tmp_path, x, inputs="signal"))
    assert (signal.info.shape, signal.info.inputs.kind) == ((6, 50), "signal")
    image = configured(config(tmp_path, x, inputs="image"))
    assert (image.info.shape, image.info.inputs.kind) == ((1, 6, 50), "image")


@pytest.mark.parametrize("x", [np.full((12, 6, 50), -3), np.full((12, 6, 50), 256, np.uint16)])
def test_whole_numbers_of_three_axes_beyond_bytes_are_declared(tmp_path, x):
    """Samples of a sensor are often int16. The sentence named images alone."""
    sentence = r"give bytes .* or set inputs=signal for 6 channels of 50 steps each"
    with pytest.raises(ValueError, match=sentence):
        configured(config(tmp_path, x))
    signal = configured(config(tmp_path, x, inputs="signal"))
    assert (signal.info.shape, signal.info.inputs.kind) == ((6, 50), "signal")


@pytest.mark.parametrize("sizes", [(8, 6, 2), (6, 8, 5), (6, 6, 2), (6, 6, 12)])
def test_a_last_axis_that_may_count_channels_is_declared(tmp_path, sizes):
    """(8, 6, 2) are 2 channels of 8×6 pixels, or 8 channels of 6×2."""
    x = np.random.default_rng(0).random((12, *sizes)).astype(np.float32)
    sentence = (
        rf"images of {sizes[2]} channels, write the channels first: x.transpose\(0, 3, 1, 2\); if "
        rf"they are images of {sizes[1]}×{sizes[2]} pixels with {sizes[0]} channels, set "
        "inputs=image"
    )
    with pytest.raises(ValueError, match=sentence):
        configured(config(tmp_path, x))
    assert configured(config(tmp_path, x, inputs="image")).info.shape == sizes


@pytest.mark.parametrize("sizes", [(2, 8, 6), (1, 8, 6), (3, 8, 2), (5, 8, 5)])
def test_a_first_axis_that_is_not_larger_counts_channels(tmp_path, sizes):
    x = np.random.default_rng(0).random((12, *sizes)).astype(np.float32)
    assert configured(config(tmp_path, x)).info.shape == sizes


def test_bytes_of_three_axes_are_grey_images(tmp_path):
    found = configured(config(tmp_path, np.zeros((12, 4, 6), np.uint8)))
    assert (found.info.shape, found.info.inputs.kind) == ((1, 4, 6), "image")


def test_whole_numbers_are_declared_and_tokens_stay_whole(tmp_path):
    x = np.random.default_rng(0).integers(0, 800, (12, 16))
    with pytest.raises(ValueError, match=r"set inputs=tokens if they number words .*inputs=vector"):
        configured(config(tmp_path, x))
    vector = partitions.federation(config(tmp_path, x, inputs="vector"))
    assert vector.share(0).train[:][0].dtype == torch.float32
    tokens = partitions.federation(config(tmp_path, x, inputs="tokens"))
    rows = tokens.rows(0)["train"]
    share = tokens.share(0)
    assert share.train[:][0].tolist() == x[rows].tolist()
    assert share.train[:][0].dtype == torch.int64
    share.save(tmp_path / "node", tokens.info)
    kept, _ = Share.load(tmp_path / "node")
    assert torch.equal(kept.train.to("cpu")[:][0], share.train[:][0])


@pytest.mark.parametrize("x", [np.eye(12, dtype=int), np.arange(-12, 12).reshape(12, 2)])
def test_marks_and_negative_numbers_are_no_tokens(tmp_path, x):
    assert configured(config(tmp_path, x)).info.inputs.kind == "vector"


@pytest.mark.parametrize(
    ("x", "inputs", "sentence"),
    [
        (np.ones((12, 4)), "signal", r"inputs=signal needs \(n, \*\(channels, time\)\)"),
        (np.ones((12, 3, 4, 4)), "vector", "inputs=vector needs"),
        (np.full((12, 4), 0.5), "tokens", "inputs=tokens needs whole numbers from 0 on"),
        (np.full((12, 4), -1), "tokens", "inputs=tokens needs whole numbers from 0 on"),
        (
            np.full((12, 2, 4), np.nan),
            "signal",
            "inputs hold NaN or infinity, the first in sample 0",
        ),
    ],
)
def test_inputs_that_are_not_what_was_declared_are_refused(tmp_path, x, inputs, sentence):
    with pytest.raises(ValueError, match=sentence):
        configured(config(tmp_path, x, inputs=inputs))


def test_bytes_stored_as_floats_are_bytes_for_a_later_client_as_in_training(tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (5, 1, 4, 4)).astype(np.float32)
    np.savez(tmp_path / "d.npz", x=x, y=[0, 1, 0, 1, 0])
    for later in (False, True):
        read = read_files(tmp_path / "d.npz", later=later)
        assert read.x.dtype == np.uint8 and (read.x == x).all()


@pytest.mark.parametrize("dtype", [np.uint8, np.int64])
@pytest.mark.parametrize("shape", [(12, 4, 4), (12, 1, 4, 4), (12, 16)])
def test_whole_numbers_0_and_1_are_truth_values(tmp_path, caplog, dtype, shape):
    """Divided by 255, as bytes are, they would be nearly 0, and nothing would be learnt."""
    x = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    federation = partitions.federation(config(tmp_path, x, standardize="none"))
    assert federation.info.scale == 1.0
    assert "are the whole numbers 0 and 1: truth values, not divided by 255" in caplog.text
    rows = federation.rows(0)["train"]
    found = federation.share(0).train[:][0].numpy()
    assert found.reshape(len(rows), -1).tolist() == x[rows].reshape(len(rows), -1).tolist()
    np.save(tmp_path / "dark.npy", x)  # of a later client
    later = read_files(tmp_path / "dark.npy", later=True)
    assert later.x.dtype.kind in "iu"


def test_what_a_function_returns_is_read_as_it_is(tmp_path, monkeypatch):
    """Masked cells are refused, where numpy would give the values behind the mask; a tensor may
    need a gradient."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "their_arrays.py").write_text(
        "import numpy as np\n"
        "import torch\n"
        "X = np.arange(24.0).reshape(12, 2) / 24\n"
        "Pair = tuple[np.ndarray, np.ndarray]\n"
        "def masked() -> Pair:\n"
        "    return np.ma.masked_greater(X, 0.9), np.arange(12) % 2\n"
        "def learnt() -> Pair:\n"
        "    return torch.tensor(X, requires_grad=True), torch.arange(12) % 2\n"
    )
    monkeypatch.setenv("FEDAPPS_ALLOW", "their_arrays:masked,their_arrays:learnt")
    with pytest.raises(ValueError, match=r"2 masked cells; fill them, as x.filled\(0\)"):
        configured(defaults() | {"dataset": "their_arrays:masked"})
    found = configured(defaults() | {"dataset": "their_arrays:learnt"})
    assert found.x.numpy() == pytest.approx(np.arange(24.0).reshape(12, 2) / 24)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("Y, 12, columns={'site': np.arange(11)}", "column site has 11 values for 12 samples"),
        ("Y, 13", "num_train is 13 and num_validation 0, of 12 samples; count the training"),
        ("Y, 0", "num_train is 0 and num_validation 0, of 12 samples"),
        ("Y, 10, num_validation=3", "num_train is 10 and num_validation 3, of 12 samples"),
        ("np.array(['b', 'a'])[Y], 12, classes=('a', 'b')", "texts such as 'b', and classes are g"),
    ],
)
def test_the_parts_of_what_a_function_returns_fit(tmp_path, monkeypatch, arguments, words):
    """An IndexError came of most of them, and of the last one "invalid literal for int()"."""
    module = tmp_path.name  # another one for each case
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"{module}.py").write_text(
        "import numpy as np\n"
        "from fedapps.partitions import Raw\n"
        "Y = np.arange(12) % 2\n"
        "def made() -> Raw:\n"
        f"    return Raw(np.arange(24.0).reshape(12, 2), {arguments})\n"
    )
    monkeypatch.setenv("FEDAPPS_ALLOW", f"{module}:made")
    with pytest.raises(ValueError, match=f"{module}:made: .*{words}"):
        configured(defaults() | {"dataset": f"{module}:made"})

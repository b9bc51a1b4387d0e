"""Data of others that unpack to more memory than the user's limit, or that name other files."""

import struct
import zlib
from io import BytesIO

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image, ImageFile
from small_runs import share

from clients.core.client import Client
from clients.methods.fedtta import FedTTAClient
from clients.methods.t3a import T3AClient
from clients.methods.tent import TENTClient
from clients.models.adaptable import Adaptable, Adaptation
from fedapps.common.memory_limits import VARIABLE
from fedapps.results.card import Card
from fedapps.service.inputs import read_input_files, unlabeled
from partitions.datasets.readers.local import read_files, scaled_pixels

CARD = Card("tent", "mine", "mlp", (1, 4, 4), ("ant", "bee"), 255.0)


@pytest.fixture(autouse=True)
def _limit(monkeypatch):
    """One megabyte."""
    monkeypatch.setenv(VARIABLE, "0.001")


def image(width, height):
    """A PNG of one pixel whose header says otherwise."""
    file = BytesIO()
    Image.new("L", (1, 1)).save(file, "PNG")
    data, header = file.getvalue(), b"IHDR" + struct.pack(">II", width, height)
    header += data[24:29]  # depth, colours, …
    return data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:]


@pytest.mark.parametrize("name", ["x.npz", "zip.npy"])
def test_arrays_are_refused_before_they_are_unpacked(name, tmp_path, monkeypatch):
    """A file of 2 kB says that it holds 2 MB. A limit of 3 MB allows them, but neither numbers of 8
    bytes nor the 35 MB of inputs and answers of a model."""
    with (tmp_path / name).open("wb") as file:
        np.savez_compressed(file, x=np.zeros((125_000, 1, 4, 4), np.uint8))
    assert (tmp_path / name).stat().st_size < 4096
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np.lib.npyio.NpzFile, "__getitem__", None)
        with pytest.raises(ValueError, match=rf"{name} takes 0.002 GB .* {VARIABLE}=1"):
            read_input_files(tmp_path / name, CARD)
    monkeypatch.setenv(VARIABLE, "0.003")
    with pytest.raises(ValueError, match=r"mine takes 0.016 GB"):
        scaled_pixels(np.zeros((125_000, 16), np.int8), "mine", later=True)
    assert len(read_files(tmp_path / name).x) == 125_000
    with pytest.raises(ValueError, match=r"the model's answer to 125000 samples takes 0.035 GB"):
        read_input_files(tmp_path / name, CARD)
    monkeypatch.setenv(VARIABLE, "much")
    with pytest.raises(ValueError, match="'much'; it must be a number of gigabytes"):
        read_input_files(tmp_path / name, CARD)


def test_the_number_of_classes_counts():
    """A thousand samples of 16 numbers, with 8 bytes for each of 200 classes: 1.9 MB."""
    many = Card("tent", "mine", "mlp", (1, 4, 4), tuple(map(str, range(200))), 255.0)
    x = torch.zeros((1000, 1, 4, 4), dtype=torch.uint8)
    unlabeled(x, CARD)
    with pytest.raises(ValueError, match=r"answer to 1000 samples takes 0.00186 GB"):
        unlabeled(x, many)


def test_images_are_refused_before_they_are_decoded(tmp_path, monkeypatch):
    """A bomb by Pillow's limit, and several images that exceed the user's together."""
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: None)
    (tmp_path / "a.png").write_bytes(image(20_000, 20_000))
    with pytest.raises(ValueError, match=r"a\.png is no whole image .*exceeds limit of 178956970"):
        read_input_files(tmp_path, CARD)
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.png").write_bytes(image(400, 300))
    with pytest.raises(ValueError, match=r"a\.png with 2 more images takes 0.00108 GB"):
        read_files(tmp_path)


def test_an_image_starts_no_program(tmp_path, monkeypatch):
    """Pillow would give EPS to Ghostscript, whatever the file's name."""
    from PIL import EpsImagePlugin

    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/mark\n")
    (tmp_path / "bin" / "gs").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    (tmp_path / "in").mkdir()
    eps = "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\n%%EOF\n"
    (tmp_path / "in" / "a.png").write_text(eps)
    with pytest.raises(ValueError, match=r"a\.png is no whole image"):
        read_input_files(tmp_path / "in", CARD)
    assert not (tmp_path / "mark").exists()


def test_a_table_opens_no_other_file(tmp_path):
    """An image of a table is its bytes; a path, which may be a URL, is not followed."""
    Image.new("L", (4, 4), 9).save(tmp_path / "secret.png")
    feature = datasets.Features({"image": datasets.Image(), "label": datasets.Image()})
    rows = {"image": [{"bytes": None, "path": str(tmp_path / "secret.png")}], "label": [None]}
    table = datasets.Dataset.from_dict(rows, feature)
    table.to_parquet(tmp_path / "x.parquet")
    with pytest.raises(ValueError, match="no whole image"):
        read_input_files(tmp_path / "x.parquet", CARD)


def test_a_table_is_refused_before_it_is_unpacked(tmp_path):
    table = pyarrow.table({"x": [[0.0] * 4] * 70_000})
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet", compression="zstd")
    assert (tmp_path / "x.parquet").stat().st_size < 10_000
    with pytest.raises(ValueError, match=r"x\.parquet takes 0.00\d* GB"):
        read_files(tmp_path / "x.parquet")
    (tmp_path / "x.parquet").write_bytes(b"PAR1 no table")
    with pytest.raises(ValueError, match=r"x\.parquet is no whole \.parquet"):
        read_files(tmp_path / "x.parquet")


def client_of(kind, **settings):
    torch.manual_seed(0)
    network = torch.nn.Sequential()
    network.add_module("body", torch.nn.Linear(4, 6))
    network.add_module("head", torch.nn.Linear(6, 3))
    model = Adaptable(network, Adaptation(3, 4)) if kind is FedTTAClient else network
    x = torch.randn(100, 4)
    client = kind(model, share(x, torch.zeros(100).long()), lr=0.1, device="cpu", **settings)
    return client, network, x


@pytest.mark.parametrize("kind", [Client, TENTClient, T3AClient, FedTTAClient])
def test_predictions_and_adaptation_go_in_parts(kind):
    """160 bytes hold ten samples of four numbers: no pass has more, and the result is that of one
    pass over all hundred."""
    client, _, x = client_of(kind)
    expected = client.predict(x)
    client, network, x = client_of(kind, pass_megabytes=0.00016)
    rows = []
    network.body.register_forward_hook(lambda module, inputs, output: rows.append(len(inputs[0])))
    assert torch.allclose(client.predict(x), expected, atol=1e-5)
    assert set(rows) == {10}
    plain = client.personal_model(x)
    assert torch.allclose(plain(x), expected, atol=1e-5)

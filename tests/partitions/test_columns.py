"""Tables as people have them: kinds of columns, separators, decimal commas, gaps, identifiers."""

import datasets
import numpy as np
import pandas
import pytest
import torch
from PIL import Image

import partitions
from fedapps.settings.config import defaults
from partitions.datasets.description import CATEGORY, NUMBER, TRUTH
from partitions.datasets.readers.local import read_files

pytestmark = pytest.mark.usefixtures("own_cache")
ROWS = 24
# Every client trains, on all rows but one for validation and one for test.
SPLIT = {
    "partition": "iid",
    "num-clients": 2,
    "train-fraction": 1.0,
    "partition.validation-fraction": 0.1,
    "partition.test-fraction": 0.1,
}


def table(**columns):
    """A table of 24 rows with a label, one number and further columns."""
    rows = np.arange(ROWS)
    frame = {"size": 3.5 + rows % 5, "label": rows % 2}
    return pandas.DataFrame(frame | columns)


def clients(frame, folder, **changes):
    """A federation of the frame, as a CSV file."""
    frame.to_csv(folder / "d.csv", index=False)
    settings = {key.replace("_", "-"): value for key, value in changes.items()}
    return partitions.federation(defaults() | SPLIT | {"dataset": str(folder / "d.csv")} | settings)


def words(count, *texts):
    """`count` cells that hold the texts in turn."""
    return [texts[row % len(texts)] for row in range(count)]


def test_kinds_of_columns_are_concluded(tmp_path):
    frame = table(old=words(ROWS, True, False), site=words(ROWS, "s", "n", "w"))
    frame.to_csv(tmp_path / "d.csv", index=False)
    raw = read_files(tmp_path / "d.csv")
    kinds = [(column.name, column.kind) for column in raw.inputs.columns]
    assert kinds == [("size", NUMBER), ("old", TRUTH), ("site", CATEGORY)]
    assert raw.inputs.columns[2].categories == ("n", "s", "w")
    assert raw.x[:4].tolist() == [[3.5, 1, 1], [4.5, 0, 0], [5.5, 1, 2], [6.5, 0, 1]]


def test_a_category_is_a_column_for_each_value(tmp_path):
    """n, s and w in alphabetical order. The number is scaled, the marks are not."""
    found = clients(table(site=words(ROWS, "s", "n", "w")), tmp_path)
    assert found.info.shape == (4,)
    assert found.encoding.outputs == ("size", "site=n", "site=s", "site=w")
    assert found._mean[1:] == (0, 0, 0) and found._std[1:] == (1, 1, 1)
    rows = found.rows(0)["train"]
    given = found.share(0).train[:][0]
    marks = torch.tensor([[row % 3 == 1, row % 3 == 0, row % 3 == 2] for row in rows.tolist()])
    assert torch.equal(given[:, 1:], marks.float())
    assert partitions.task(defaults() | SPLIT | {"dataset": found.info.name}).shape == (4,)


def test_categories_that_no_training_client_has_count_as_none(tmp_path, caplog):
    """Clients are sites. Only the novel client has the colour red, in all of its 8 rows."""
    site = np.repeat(["a", "b", "c"], 8)
    settings = {"num_clients": 3, "train_fraction": 0.67, "partition": "natural"}
    owners = {"partition.column": "site", "columns": "size,colour"}
    frame = table(site=site, colour=words(ROWS, "blue", "green"))
    novel = int(np.flatnonzero(clients(frame, tmp_path, **settings, **owners).novel)[0])
    owner = clients(frame, tmp_path, **settings, **owners).share(novel).attributes["site"]
    frame.loc[frame.site == owner, "colour"] = "red"
    (tmp_path / "red").mkdir()
    found = clients(frame, tmp_path / "red", **settings, **owners)
    assert found.encoding.outputs == ("size", "colour=blue", "colour=green")
    assert found.share(novel).everything[:][0][:, 1:].sum() == 0
    assert "that count as none: 'red' (8 rows)" in caplog.text


def test_gaps_are_refused_by_column_count_and_row(tmp_path):
    gaps = pandas.Series(np.arange(ROWS) * 1.0)
    gaps[[5, 7]] = np.nan
    sentence = r"column age has 2 cells without a value, the first in row 5.*missing=mean"
    with pytest.raises(ValueError, match=sentence):
        clients(table(age=gaps), tmp_path)
    assert clients(table(age=gaps), tmp_path, ignore="age").encoding.outputs == ("size",)


def test_gaps_are_filled_with_the_training_mean_and_marked(tmp_path):
    """Of the training rows, those with a value decide the mean; a mark of 1 stands in the gaps."""
    gaps = pandas.Series(np.arange(ROWS) % 4 * 10.0)
    gaps[[0, 1, 2, 3, 4, 5, 6, 7]] = np.nan
    found = clients(table(age=gaps), tmp_path, missing="mean")
    assert found.encoding.outputs == ("size", "age", "age is missing")
    rows = np.concatenate([found.rows(client)["train"] for client in (0, 1)])
    known = rows[rows > 7] % 4 * 10.0
    assert found.encoding.features[1].fill == pytest.approx(known.sum() / len(known))
    raw = found.dataset.x.numpy()
    assert raw[:9, 2].tolist() == [1] * 8 + [0]
    np.testing.assert_allclose(raw[:8, 1], known.mean())


@pytest.mark.parametrize(
    ("mark", "others", "cells", "is_said"),
    [
        (-999, (118, 120, 130), 2, True),
        (99, (1, 2, 5), 2, True),
        (-999, (118, 120, 130), 1, False),  # one cell may be any mistake
        (-998, (118, 120, 130), 2, False),
        (99, (20, 45, 80), 2, False),  # an age
        (9, (5, 5, 5), 2, False),  # two codes
    ],
)
def test_a_number_that_may_mark_a_gap_is_said(tmp_path, mark, others, cells, is_said):
    pressure = np.resize(others, ROWS)
    pressure[[3, 7][:cells]] = mark
    table(pressure=pressure).to_csv(tmp_path / "d.csv", index=False)
    notes = read_files(tmp_path / "d.csv").notes
    assert [note for note in notes if "pressure" in note] == [
        f"{tmp_path / 'd.csv'}, column pressure: {cells} cells hold {mark}, far from all others "
        f"({min(others)} to {max(others)}); if it marks a missing value, leave these cells empty "
        "and set missing=mean"
    ] * is_said


def test_constant_columns_are_left_out_and_said(tmp_path, caplog):
    found = clients(table(year=[2024] * ROWS, unit=["mm"] * ROWS), tmp_path)
    assert found.encoding.outputs == ("size",)
    assert "since all training rows hold the same: year, unit" in caplog.text


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        ("patient_id", np.arange(ROWS) * 3 + 7),
        ("caseID", np.arange(ROWS)[::-1]),
        ("number", np.arange(ROWS) + 100),
        ("code", [f"c{row}" for row in range(ROWS)]),
    ],
)
def test_identifiers_are_left_out_unless_they_are_asked_for(tmp_path, caplog, name, cells):
    frame = table(**{name: cells})
    assert clients(frame, tmp_path).encoding.outputs == ("size",)
    assert f"column {name} is left out, because" in caplog.text
    asked = clients(frame, tmp_path, columns=f"size,{name}")
    assert len(asked.encoding.outputs) > 1


def test_row_numbers_without_a_name_are_an_identifier(tmp_path):
    table().to_csv(tmp_path / "d.csv")  # with pandas' index
    config = defaults() | SPLIT | {"dataset": str(tmp_path / "d.csv")}
    assert partitions.federation(config).encoding.outputs == ("size",)


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["12.3 mm2", "4.5 mm2"], r"column c holds numbers with a unit .* '12\.3 mm2'.*ignore=c"),
        (["12 %", "4 %"], "column c holds numbers with a unit or a mark such as '12 %'"),
        (["$12.5", "$4"], r"column c holds numbers with a unit or a mark such as '\$12\.5'"),
        (["2024-01-31", "2024-02-01"], "column c holds dates or times such as '2024-01-31'"),
        (["31.01.2024", "1.2.2024"], "column c holds dates or times such as '31.01.2024'"),
        ([20240131, 20240229, 20231201], "column c holds dates or times such as '20231201'"),
        (["1.5", "2.5", "3.5", "high"], "holds numbers, but 6 cells are none, such as 'high' in"),
        (["1,234", "2,500"], "column c holds numbers such as '1,234', whose comma or point may"),
        (["1.5", "2,5"], "column c holds numbers with a decimal comma and others with a point"),
    ],
)
def test_cells_that_are_no_plain_numbers_are_refused_by_column(tmp_path, cells, expected):
    with pytest.raises(ValueError, match=expected):
        clients(table(c=words(ROWS, *cells)), tmp_path)


@pytest.mark.parametrize(
    "numbers",
    [
        (20240131, 20240230),  # there is no 30 February
        (20240131, 20241301),
        (18991231, 20240131),  # a quantity may be anything
        (20240131.5, 20240131.0),
    ],
)
def test_other_numbers_of_eight_digits_are_numbers(tmp_path, numbers):
    raw = clients(table(c=words(ROWS, *numbers)), tmp_path).dataset
    assert raw.x.shape[1] == 2


@pytest.mark.parametrize(
    ("texts", "pair", "difference"),
    [
        (("Male", "male", "other"), "Male and male", "case"),
        (("caf\u00e9", "cafe\u0301"), "'cafe\\u0301' and 'caf\\xe9'", "case or in how char"),
        (("yes", "yes\u200b", "no"), "'yes' and 'yes\\u200b'", "case or in how char"),
    ],
)
def test_categories_and_labels_that_look_alike_are_said(tmp_path, texts, pair, difference):
    table(c=words(ROWS, *texts)).to_csv(tmp_path / "d.csv", index=False)
    (note,) = read_files(tmp_path / "d.csv").notes
    assert f"column c: {pair} are several categories, though they differ in {difference}" in note
    table(kind=words(ROWS, *texts)).to_csv(tmp_path / "d.csv", index=False)
    (note,) = read_files(tmp_path / "d.csv", label="kind").notes
    assert f"labels {pair} are several classes, though they differ in {difference}" in note
    assert note.endswith("alone; write them alike if they mean the same")


def test_long_lists_of_texts_are_refused_by_column(tmp_path):
    rows = np.arange(404)
    texts = [f"text {row // 4}" for row in rows]
    frame = pandas.DataFrame({"size": rows % 7, "city": texts, "label": rows % 2})
    with pytest.raises(ValueError, match="column city holds 101 different texts such as 'text 0'"):
        clients(frame, tmp_path)


@pytest.mark.parametrize(
    "index",
    [
        np.arange(ROWS) ** 2,
        np.roll(np.arange(ROWS), 5),
        pandas.date_range("2020-01-01", periods=ROWS),
        words(ROWS, "a", "b"),
    ],
)
@pytest.mark.parametrize("form", ["parquet", "datasets"])
def test_the_index_that_pandas_stores_is_no_input(tmp_path, caplog, index, form):
    """Rows that were chosen or shuffled keep their numbers, which are stored as a column."""
    frame = table().set_index(pandas.Index(index))
    if form == "parquet":
        path = tmp_path / "d.parquet"
        frame.to_parquet(path)
    else:
        path = tmp_path / "d"
        datasets.Dataset.from_pandas(frame).save_to_disk(path)
    found = partitions.federation(defaults() | SPLIT | {"dataset": str(path)})
    assert found.encoding.outputs == ("size",)
    assert "it is pandas' index of the rows" in caplog.text


@pytest.mark.parametrize("options", [{"sep": ";"}, {"sep": "\t"}, {"sep": ";", "decimal": ","}])
def test_separators_and_decimal_commas(tmp_path, options):
    frame = table(dose=np.arange(ROWS) + 0.25)
    frame.to_csv(tmp_path / "d.csv", index=False, **options)
    raw = read_files(tmp_path / "d.csv")
    assert raw.inputs.names == ("size", "dose")
    assert raw.x[:3].tolist() == [[3.5, 0.25], [4.5, 1.25], [5.5, 2.25]]
    assert raw.y.tolist() == (np.arange(ROWS) % 2).tolist()


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1"])
def test_encodings(tmp_path, encoding):
    table(Größe=words(ROWS, "groß", "klein")).to_csv(
        tmp_path / "d.csv", index=False, encoding=encoding
    )
    raw = read_files(tmp_path / "d.csv")
    assert raw.inputs.names == ("size", "Größe")
    assert raw.inputs.columns[1].categories == ("groß", "klein")
    assert ("is not UTF-8" in str(raw.notes)) == (encoding == "latin-1")


def test_several_label_columns(tmp_path):
    """Two columns of 0 and 1 are a task of two labels; decimals are two values."""
    rows = np.arange(ROWS)
    frame = table(fever=rows % 3 == 0, cough=rows % 4 < 2).drop(columns="label")
    found = clients(frame, tmp_path, label="fever,cough")
    assert (found.info.task, found.info.classes) == ("labels", ("fever", "cough"))
    assert found.dataset.y[:4].tolist() == [[1, 1], [0, 1], [0, 0], [1, 0]]
    frame = table(a=rows + 0.5, b=rows * 2.0)
    assert clients(frame, tmp_path, label="a,b").info.task == "values"


def test_unknown_names_are_refused_with_the_nearest(tmp_path):
    for key, value, near in (
        ("columns", "sizes", "size"),
        ("ignore", "sise", "size"),
        ("label", "lable", "label"),
    ):
        with pytest.raises(ValueError, match=f"{value!r}.* .did you mean '{near}'"):
            clients(table(), tmp_path, **{key: value})


def test_an_empty_owner_is_named_by_row(tmp_path):
    owners = pandas.Series(words(ROWS, "a", "b"))
    owners[3] = None
    settings = {"partition": "natural", "partition.column": "site"}
    with pytest.raises(ValueError, match="column site, whose values are the clients, has 1 empty"):
        clients(table(site=owners), tmp_path, **settings)


def test_owners_may_be_whole_numbers(tmp_path):
    settings = {"partition": "natural", "partition.column": "ward"}
    found = clients(table(ward=words(ROWS, 3, 7)), tmp_path, **settings)
    assert found.encoding.outputs == ("size",)
    assert sorted(found.share(client).attributes["ward"] for client in (0, 1)) == ["3", "7"]


def owners_of(folder, owners, num_clients):
    """A federation whose owners stand in an array beside the inputs."""
    folder.mkdir()
    arrays = {"x": np.arange(2.0 * ROWS).reshape(ROWS, 2), "y": np.arange(ROWS) // 4 % 2}
    np.savez(folder / "d.npz", site=owners, **arrays)
    settings = {"partition": "natural", "partition.column": "site", "num-clients": num_clients}
    return partitions.federation(defaults() | SPLIT | {"dataset": str(folder / "d.npz")} | settings)


def test_an_array_of_owners_may_hold_texts_numbers_and_dates(tmp_path):
    days = np.array(["2024-01-01", "2024-01-02"], "datetime64[D]")
    for number, names in enumerate((np.array([b"a", b"b"]), np.array([0.5, 2.5]), days)):
        found = owners_of(tmp_path / str(number), names[np.arange(ROWS) % 2], 2)
        parities = []
        for client in (0, 1):
            rows = np.concatenate(list(found.rows(client).values()))
            parities.append(set((rows % 2).tolist()))
        assert sorted(parities, key=min) == [{0}, {1}]


@pytest.mark.parametrize("gap", [np.nan, np.datetime64("NaT", "D")], ids=str)
def test_an_array_of_owners_has_no_gaps(tmp_path, gap):
    """NaN is no owner, and rows without one are not dealt to the others."""
    kind = float if isinstance(gap, float) else "datetime64[D]"
    owners = (np.arange(ROWS) % 3).astype(kind)
    owners[5] = gap
    with pytest.raises(ValueError, match=r"column site, .* has 1 empty cells, the first in row 5"):
        owners_of(tmp_path / "gap", owners, 3)


LARGE = 76561197960287930  # 2⁵³ is about 9·10¹⁵; here neighbours of float64 differ by 16


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_owners_with_large_numbers_stay_apart(tmp_path, ending):
    """As float64 the numbers of both players are one number."""
    player = np.array([LARGE, LARGE + 1])[np.arange(ROWS) % 2]
    assert len(np.unique(player.astype(float))) == 1
    frame = table(player=player, dose=np.arange(ROWS) % 7)
    path = tmp_path / f"d.{ending}"
    if ending == "csv":
        frame.to_csv(path, index=False)
    else:
        frame.to_parquet(path)
    changes = {"dataset": str(path), "partition": "natural", "partition.column": "player"}
    found = partitions.federation(defaults() | SPLIT | changes | {"num-clients": 2})
    for client in (0, 1):
        rows = np.concatenate(list(found.rows(client).values()))
        assert set(rows % 2) == {client}
        assert found.share(client).attributes["player"] == str(LARGE + client)


def test_large_owners_beside_a_gap_are_refused(tmp_path):
    """pandas reads a column of whole numbers with a gap as float64, which rounds them."""
    player = [str(LARGE + i % 2) for i in range(ROWS)]
    player[5] = ""
    frame = table(player=player, dose=np.arange(ROWS) % 7)
    changes = {"partition": "natural", "partition.column": "player", "skip-broken": 0.1}
    with pytest.raises(ValueError, match=r"column player, .* holds numbers above 9007199254740992"):
        clients(frame, tmp_path, **changes)


def test_large_numbers_are_no_owner_unasked(tmp_path):
    frame = table(player=LARGE + np.arange(ROWS) % 2, dose=np.arange(ROWS) % 7)
    with pytest.raises(ValueError, match="has no natural column to divide it by"):
        clients(frame, tmp_path, partition="natural")


def test_dates_of_parquet_may_be_the_owners(tmp_path):
    """They were called empty cells."""
    days = np.array(["2024-01-31", "2024-02-01"], dtype="datetime64[ns]")[np.arange(ROWS) % 2]
    frame = table(day=days, dose=np.arange(ROWS) % 7)
    path = tmp_path / "d.parquet"
    frame.to_parquet(path)
    changes = {"dataset": str(path), "partition": "natural", "partition.column": "day"}
    found = partitions.federation(defaults() | SPLIT | changes | {"num-clients": 2})
    assert [found.share(i).attributes["day"] for i in (0, 1)] == ["2024-01-31", "2024-02-01"]


def test_which_texts_are_the_owner_is_asked(tmp_path):
    frame = table(site=words(ROWS, "a", "b"), smoker=words(ROWS, "yes", "no"))
    with pytest.raises(ValueError, match=r"several columns of texts .*: site, smoker; set partiti"):
        clients(frame, tmp_path, partition="natural")


def test_a_cached_table_keeps_its_description(tmp_path):
    """The second reader gets the cache's entry."""
    from partitions.datasets import loading

    frame = table(site=words(ROWS, "s", "n"), patient_id=np.arange(ROWS))
    first = clients(frame, tmp_path).dataset.info.inputs
    loading._own.cache_clear()
    again = loading.load(str(tmp_path / "d.csv"), **loading.named(_config(tmp_path))[2])
    assert again.info.inputs == first


def _config(folder):
    return defaults() | SPLIT | {"dataset": str(folder / "d.csv")}


def test_the_line_says_what_the_data_hold(tmp_path):
    frame = table(
        site=words(ROWS, "s", "n"), old=words(ROWS, True, False), dose=np.arange(ROWS) % 7
    )
    line = (
        "24 rows, 2 numeric columns scaled by the training clients' statistics, 1 of truth values"
    )
    found = clients(frame, tmp_path)
    assert found.line == f"{line}, 1 of categories, 2 classes"
    (tmp_path / "raw").mkdir()
    raw = clients(frame.drop(columns=["site", "old"]), tmp_path / "raw", standardize="none")
    assert raw.line == "24 rows, 2 numeric columns, 2 classes"


def pictures(folder, **columns):
    """Twenty-four grey pictures of the `datasets` library, with further columns."""
    grey = [Image.new("L", (4, 4), 10 * (row % 2)) for row in range(ROWS)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    content = {"image": grey, "label": (np.arange(ROWS) // 2 % 2).tolist()}
    for name, values in columns.items():
        features[name] = datasets.Value(str(values.dtype))
        content[name] = values.tolist()
    datasets.Dataset.from_dict(content, features=features).save_to_disk(folder)
    return defaults() | SPLIT | {"dataset": str(folder), "partition": "natural", "num-clients": 2}


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.uint64, np.int64, bool])
def test_pictures_have_owners_of_every_whole_number(tmp_path, dtype):
    """Only int64 and texts were columns; of int32 the sentence said that there is none."""
    config = pictures(tmp_path / "saved", writer=(np.arange(ROWS) % 2).astype(dtype))
    found = partitions.federation(config | {"partition.column": "writer"})
    for client in (0, 1):
        rows = np.concatenate(list(found.rows(client).values()))
        assert set(rows % 2) == {client}


def test_which_column_beside_pictures_is_the_owner_is_asked(tmp_path):
    """The first one was taken without a word."""
    parity = np.arange(ROWS) % 2
    config = pictures(tmp_path / "saved", age=parity, writer=parity.astype(np.int32))
    with pytest.raises(ValueError, match="several columns that may be the clients: age, writer; s"):
        partitions.federation(config)
    pictures(tmp_path / "one", writer=parity)
    assert partitions.federation(config | {"dataset": str(tmp_path / "one")}).num_clients == 2


def test_which_array_is_the_owner_is_asked(tmp_path):
    parity = np.arange(ROWS) % 2
    x = np.arange(ROWS)[:, None] * 1.0
    np.savez(tmp_path / "d.npz", x=x, y=np.arange(ROWS) // 2 % 2, age=parity, phone=parity)
    config = defaults() | SPLIT | {"dataset": str(tmp_path / "d.npz"), "partition": "natural"}
    with pytest.raises(ValueError, match="several columns that may be the clients: age, phone; se"):
        partitions.federation(config | {"num-clients": 2})


@pytest.mark.parametrize("count", [5, ROWS])
def test_numbers_stored_as_texts_are_refused(tmp_path, count):
    """Databases export them so. Each number was a category, or a name of its row."""
    table(dose=[f"{row % count}.5" for row in range(ROWS)]).to_parquet(tmp_path / "d.parquet")
    config = defaults() | SPLIT | {"dataset": str(tmp_path / "d.parquet")}
    sentence = "column dose holds numbers that are stored as texts, such as '0.5'; store them as"
    with pytest.raises(ValueError, match=sentence):
        partitions.federation(config)
    assert partitions.federation(config | {"ignore": "dose"}).encoding.outputs == ("size",)


@pytest.mark.parametrize("texts", [("1", "2"), ("1.5", "high")])
def test_other_texts_with_digits_are_categories(tmp_path, texts):
    table(kind=words(ROWS, *texts)).to_parquet(tmp_path / "d.parquet")
    found = partitions.federation(defaults() | SPLIT | {"dataset": str(tmp_path / "d.parquet")})
    assert found.encoding.outputs == ("size", *(f"kind={text}" for text in texts))


@pytest.mark.parametrize("texts", [("train", "test"), ("Train", "Val", "Test")])
def test_a_column_that_names_the_parts_is_refused(tmp_path, texts):
    """It was an input, and clients trained on the rows that the user held out."""
    frame = table(split=words(ROWS, *texts))
    with pytest.raises(ValueError, match=r"column split holds test and train.*; ignore=split"):
        clients(frame, tmp_path)
    assert clients(frame, tmp_path, ignore="split").encoding.outputs == ("size",)


def test_a_category_may_have_the_name_of_a_part(tmp_path):
    found = clients(table(team=words(ROWS, "dev", "ops")), tmp_path)
    assert found.encoding.outputs == ("size", "team=dev", "team=ops")


@pytest.mark.parametrize(
    ("count", "said"), [(2, "; 2 of 3 values of site are clients, with 16 of the rows"), (3, "")]
)
def test_owners_that_are_no_clients_are_said(tmp_path, count, said):
    """Each of three owners has 8 of the 24 rows. With two clients the third took no part, without a
    word."""
    frame = table(site=words(ROWS, "s", "n", "w"))
    changes = {"partition": "natural", "partition.column": "site"}
    line = clients(frame, tmp_path, **changes, **{"num-clients": count}).line
    assert line.partition(", 2 classes")[2].startswith(said)
    assert ("are clients" in line) == bool(said)

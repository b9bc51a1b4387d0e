"""CSV files from which pandas reads something else than they say."""

import pytest

from partitions.datasets.readers.local import read_files

HEADER = "size,colour,label"


def read(folder, *lines, **options):
    """The samples of a CSV file with these lines."""
    (folder / "d.csv").write_text("\n".join([HEADER, *lines]) + "\n")
    return read_files(folder / "d.csv", label="label", **options)


@pytest.mark.parametrize("blank", ["", " "])
def test_a_text_that_marks_a_gap_is_said(tmp_path, blank):
    """Blanks after the commas change nothing, as in the Adult table of UCI."""
    lines = ["1.5,red,0", "2.5,?,1", "3.5,NA,1", "4.5,?,0", "5.5,,0"]
    raw = read(tmp_path, *[line.replace(",", "," + blank) for line in lines])
    assert raw.inputs.columns[1].categories == ("red",)
    assert "column colour: 2 '?', 1 'NA' count as empty cells" in str(raw.notes)


def test_gaps_without_a_text_and_in_numbers_are_not_said(tmp_path):
    raw = read(tmp_path, "1.5,red,0", ",,1", "NA,blue,1")
    assert raw.notes == ()


@pytest.mark.parametrize("text", ["NA", "None", "null"])
def test_a_class_whose_name_marks_a_gap_is_refused_by_it(tmp_path, text):
    with pytest.raises(ValueError, match=f"row 1 has no label, since '{text}' counts as none"):
        read(tmp_path, "1.5,red,mild", f"2.5,red,{text}", f"3.5,red,{text}")


def test_cells_with_blanks_before_quotation_marks(tmp_path):
    raw = read(tmp_path, '1.5, "red, dark", 0', "2.5, blue, 1")
    assert raw.inputs.columns[1].categories == ("blue", "red, dark")


def test_rows_within_a_cell_are_said(tmp_path):
    """The marks of rows 0 and 2 make one cell of all that stands between them."""
    raw = read(tmp_path, '1.5,"red,0', "2.5,blue,1", '3.5,red",1', "4.5,blue,0")
    assert len(raw.x) == 2
    assert "row 0 (from 0) has a cell that holds further lines, which look like rows" in str(
        raw.notes
    )


def test_a_text_of_two_lines_is_no_row(tmp_path):
    raw = read(tmp_path, '1.5,"red,\ndark",0', "2.5,blue,1")
    assert raw.notes == () and len(raw.x) == 2


@pytest.mark.parametrize(
    ("short", "said"),
    [
        ([1], "row 1 (from 0) has fewer cells than the header"),
        ([1, 2], "2 rows, the first of them row 1 (from 0), have fewer cells than the header"),
    ],
)
def test_rows_with_fewer_cells_are_said(tmp_path, short, said):
    """Pandas adds empty cells at the end of the row, wherever one is missing."""
    lines = ["0,1.5,red", "1,2.5,blue", "1,3.5,red"]
    for row in short:
        lines[row] = lines[row].rpartition(",")[0]
    (tmp_path / "d.csv").write_text("\n".join(["label,size,colour", *lines]))
    assert said in str(read_files(tmp_path / "d.csv").notes)


@pytest.mark.parametrize("first_line", ["", "sep=,\n"])
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("2.5,red,1,7", "line {} has 4 cells, and the header 3"),
        ('2.5,"red,1', "a quotation mark in line {} has no second one"),
    ],
)
def test_lines_that_cannot_be_separated_are_named(tmp_path, first_line, line, said):
    text = f"{first_line}{HEADER}\n1.5,red,0\n{line}\n3.5,red,1\n"
    (tmp_path / "d.csv").write_text(text)
    number = text[: text.index(line)].count("\n") + 1
    with pytest.raises(ValueError, match=said.format(number)):
        read_files(tmp_path / "d.csv")

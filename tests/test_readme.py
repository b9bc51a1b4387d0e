"""The README's table of methods is the table of the code."""

from pathlib import Path

from fedapps.cli import MAIN_JOB, MAIN_METHODS
from fedapps.methods import METHODS

README = (Path(__file__).parents[1] / "README.md").read_text("utf-8")


def test_every_method_stands_in_the_readme_with_its_paper():
    for name, method in METHODS.items():
        row = next((line for line in README.splitlines() if line.startswith(f"| `{name}` |")), "")
        assert method.line in row, name
        assert method.paper in row, name
        assert (method.novel or "no") in row, name


def test_the_readme_names_no_other_methods():
    named = [line.split("`")[1] for line in README.splitlines() if line.startswith("| `")]
    assert named == list(METHODS)


def test_the_main_jobs_table_is_of_its_methods_and_rounds():
    table = README.partition("| method | training clients |")[2].partition("\n\n")[0]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]
    assert [row[0] for row in cells] == MAIN_METHODS.split(",")
    assert {row[5] for row in cells} == {str(MAIN_JOB["rounds"])}
    assert f"{MAIN_JOB['num-clients']} clients with at most two classes" in README

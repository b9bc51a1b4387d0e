"""The README's table of methods is the table of the code."""

from pathlib import Path

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

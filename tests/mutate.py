"""Mutation testing of one file: does a test notice when one of its lines is wrong?

    uv run --group mutation python tests/mutate.py clients/fedadg.py

Runs mutmut on a copy of the project with the tests that belong to the file: those that import its
module, and the one of its name. Prints the changes that no test noticed, and leaves out those
that cannot show: messages of errors, constructors' defaults (the settings decide), `strict` of
equal lengths, the device on a machine that has but one."""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import tomli_w

ROOT = Path(__file__).parents[1]
NO_MATTER = re.compile(
    r",? *\b(strict|device|dtype)=(True|False|None|[\w.]+)|, *(?=\))|\.to\(None\)|\.to\([\w.]+\)"
)
DEFAULT = re.compile(r"^[-+]\s+(\w+: [\w.| \[\]]+ = .*,|.*\*, .*: \w+ = .*)$")
MESSAGES = [r"raise \w+\(", r"""^\s*f?["'].*["']\s*[,)]?\s*$""", r"^\s*log\("]


def tests_of(source: Path) -> list[str]:
    """Test files that import the module of `source` or bear its name."""
    module = ".".join(source.with_suffix("").parts)
    package, _, name = module.rpartition(".")
    imports = re.compile(rf"(from|import) {module}\b|from {package} import .*\b{name}\b")
    found = [
        test
        for test in sorted((ROOT / "tests").rglob("test_*.py"))
        if imports.search(test.read_text("utf-8")) or test.stem == f"test_{source.stem}"
    ]
    return [str(test.relative_to(ROOT)) for test in found]


def copy_project(folder: Path) -> None:
    """Every file that git knows or does not ignore."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def mutmut(folder: Path, *arguments: str) -> str:
    """What a command of mutmut's prints in `folder`."""
    command = [sys.executable, "-m", "mutmut", *arguments]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=False)
    return done.stdout


def survivors(folder: Path) -> list[str]:
    """The changed lines of every mutant that no test noticed."""
    names = re.findall(r"(\S+): (?:survived|no tests)", mutmut(folder, "results"))
    found = []
    for name in names:
        shown = mutmut(folder, "show", name).splitlines()
        lines = [line for line in shown if re.match(r"[-+](?![-+]{2})", line)]
        plain = {NO_MATTER.sub("", line[1:]).replace(" ", "") for line in lines}
        if len(plain) > 1 and not all(DEFAULT.match(line) for line in lines):
            found.append("\n".join([name, *lines]))
    return found


def main(source: Path, tests: list[str]) -> None:
    """Mutate `source`, run `tests`, print what survived."""
    settings = {
        "source_paths": ["clients", "strategies", "partitions", "fedapps"],
        "also_copy": ["experiments", "README.md", "docs", "LICENSE"],
        "only_mutate": [str(source)],
        "do_not_mutate_patterns": MESSAGES,
        "pytest_add_cli_args": ["-p", "no:cacheprovider", "-p", "no:randomly", "-n0"],
        "pytest_add_cli_args_test_selection": tests,
    }
    with tempfile.TemporaryDirectory(prefix="mutate-") as temporary:
        folder = Path(temporary)
        copy_project(folder)
        with (folder / "pyproject.toml").open("ab") as file:
            file.write(b"\n" + tomli_w.dumps({"tool": {"mutmut": settings}}).encode())
        told = re.split(r"[\r\n]", mutmut(folder, "run", "--max-children", "1"))
        left = survivors(folder)
    counts = [line for line in told if "🎉" in line]
    print(f"{source} with {' '.join(tests)}\n{counts[-1] if counts else told[-20:]}")
    print("\n".join(left))
    print(f"{len(left)} changes that no test noticed")


if __name__ == "__main__":
    chosen = Path(sys.argv[1])
    if not (ROOT / chosen).is_file():
        sys.exit(f"no file {chosen}; name one of the project, such as clients/fedadg.py")
    main(chosen, sys.argv[2:] or tests_of(chosen))

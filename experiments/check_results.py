"""Runs the results pages' commands, cut short: ``python -m experiments.check_results [PAGE…]``.

Every indented ``fedapps`` command of docs/results runs in the order of its page, in a new folder
with a copy of the experiments: two rounds, one seed, one trial, the first two values of a grid, 20
clients where a file has 100 and 90 where it has 900. Prints a line a command, and the end of what a
failed one printed; the exit code is the number of failures. MNIST and Fashion-MNIST are looked for
in FEDAPPS_DATA_DIR; a command whose data set is missing is skipped."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "results"
VALUES = {  # of the placeholders in commands
    r"--methods METHOD": "--methods fedavg,fedtta",
    r"\bSEED\b": "0",
    r"(?<=--seeds )[N\d][,\d]*|(?<=-seed)N\b": "0",
    r"(?<=--trials )\d+": "1",
    r"\bN\b": "10",
    r"\b(ALPHA|SHARE)\b": "0.1",
    r"\bS\b": "step",
    r"\bB\b": "5",
    r"\bSPLIT\b": "partition=dirichlet partition.alpha=1",
}
SHORT = ("rounds", "evaluate-every")
CLIENTS = {100: 20, 900: 90}  # of a file, and of its short run
SET = r"(?<=[ \"])({})=[1-9]\d*"


def blocks(text: str) -> list[str]:
    """The lines of a page's indented code, those that end in a backslash joined."""
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [line.strip() for line in lines if re.match(r"    (fedapps|[A-Z]=)", line)]


def shortened(command: str) -> str:
    """A command with values for its placeholders, and little to do."""
    for placeholder, value in VALUES.items():
        command = re.sub(placeholder, value, command)
    if not re.match("fedapps (run|tune) ", command):
        return command
    # Of a grid "key=1,2,3" two values stay. Every other part is a variant in quotes; all of
    # these run.
    parts = re.split(r'(".*?")', command)
    for number in range(0, len(parts), 2):
        parts[number] = re.sub(r" ([^\s=,]+=[^\s,]+,[^\s,]+),\S+", r" \1", parts[number])
    command = "".join(parts)
    command = re.sub(SET.format("novel-rounds"), r"\1=2", command)
    for name in SHORT:
        command = re.sub(SET.format(name), r"\1=2", command)
        if f"{name}=" not in command and "--from" not in command:
            command += f" {name}=2"
    return command if "--seeds" in command else command + " --seeds 0"


def copy_experiments(folder: Path) -> None:
    """The experiments' files, their methods' rounds cut to two, 100 clients to 20, 900 to 90."""
    for file in (ROOT / "experiments").rglob("*.toml"):
        copy = folder / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        text = re.sub(SET.format("rounds|novel-rounds"), r"\1=2", file.read_text("utf-8"))
        for many, few in CLIENTS.items():
            text = re.sub(rf"(?m)^(num-clients = ){many}$", rf"\g<1>{few}", text)
        copy.write_text(text)


def outcome(code: int, printed: str) -> str:
    """``ok``, ``skipped`` and the missing data set, or ``FAILED``."""
    missing = re.search(r"dataset '([^']+)' was not found", printed)
    if code and missing:
        return f"skipped, without the data of {missing[1]}"
    return "FAILED" if code else "ok"


def run_page(page: Path) -> Iterable[tuple[str, str, str]]:
    """Each command of a page, its outcome, and the end of what it printed if it failed."""
    variables = ""
    with tempfile.TemporaryDirectory() as folder:
        copy_experiments(Path(folder))
        for number, line in enumerate(blocks(page.read_text("utf-8"))):
            command = shortened(line)
            if command.startswith("fedapps run") and "--output" not in command:
                command += f" --output command-{number}"
            # An assignment such as S=2 holds for the commands below it.
            if not command.startswith("fedapps"):
                variables += command + "\n"
                continue
            done = subprocess.run(
                ["bash", "-c", variables + command],
                cwd=folder,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                capture_output=True,
                text=True,
                check=False,
            )
            printed = done.stdout + done.stderr
            found = outcome(done.returncode, printed)
            yield command, found, printed[-500:] if found == "FAILED" else ""


def main(pages: list[Path]) -> int:
    """The number of commands that fail."""
    failures = 0
    for page in pages or sorted(PAGES.glob("*.md")):
        for command, found, error in run_page(page):
            failures += found == "FAILED"
            print(f"{page.name}: {found}: {command}\n{error}", flush=True)
    return failures


if __name__ == "__main__":
    sys.exit(main([Path(page) for page in sys.argv[1:]]))

"""A user's package: the code of docs/how-to/own-*.md, written to a folder and allowed."""

import os
import re
import sys
from contextlib import contextmanager
from pathlib import Path

from partitions import references, trust

HOW_TO = Path(__file__).parents[1] / "docs" / "how-to"
PAGE = "".join(page.read_text("utf-8") for page in sorted(HOW_TO.glob("own-*.md")))
DITTO, RINGS, SIZES = "my_lab.ditto:METHOD", "my_lab.data:rings", "my_lab.rules:BySize"
NET, INFO = "my_lab.nets:resnet10", "my_lab.data:RINGS"


@contextmanager
def written(folder):
    """Writes the page's files to `folder`, on Python's path; the process forgets them afterwards.

    A block begins with a comment that names its file."""
    for name, code in re.findall(r"```\w+\n# (\S+\.(?:py|toml))\n(.*?)```", PAGE, re.S):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(code, "utf-8")
    sys.path.append(str(folder))
    before = os.environ.get(trust.VARIABLE, "")
    trust.allow(DITTO, RINGS, SIZES, NET, INFO)
    yield folder
    os.environ[trust.VARIABLE] = before
    sys.path.remove(str(folder))
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_lab"]:
        del sys.modules[name]
    references._imported.cache_clear()

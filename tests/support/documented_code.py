"""A user's package: the code of docs/how-to/own-*.md and lora.md, in a folder and allowed."""

import os
import re
import sys
from contextlib import contextmanager
from pathlib import Path

from fedapps.common import external_code

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to"
PAGES = (*sorted(HOW_TO.glob("own-*.md")), HOW_TO / "lora.md")
PAGE = "".join(page.read_text("utf-8") for page in PAGES)
DITTO, RINGS, SIZES = "my_lab.ditto:METHOD", "my_lab.data:rings", "my_lab.rules:BySize"
NET, INFO = "my_lab.nets:resnet10", "my_lab.data:RINGS"
LORA, FEDSA = "my_lab.lora:LoRATransformer", "my_lab.lora:FEDSA"


@contextmanager
def written(folder):
    """Writes the page's files to `folder`, on Python's path; the process forgets them afterwards.

    A block begins with a comment that names its file."""
    for name, code in re.findall(r"```\w+\n# (\S+\.(?:py|toml))\n(.*?)```", PAGE, re.S):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(code, "utf-8")
    sys.path.append(str(folder))
    before = os.environ.get(external_code.VARIABLE, "")
    external_code.allow(DITTO, RINGS, SIZES, NET, INFO, LORA, FEDSA)
    yield folder
    os.environ[external_code.VARIABLE] = before
    sys.path.remove(str(folder))
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_lab"]:
        del sys.modules[name]
    external_code._imported.cache_clear()

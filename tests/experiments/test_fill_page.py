"""Tables of a page, made from run folders."""

import pytest
from run_folders import leave

from experiments.fill_page import main


def test_a_table_is_replaced_and_the_text_around_it_stays(tmp_path):
    """TENT gains 4 points on FedAvg's 50 %; a second filling changes nothing."""
    leave(tmp_path / "runs" / "iid", "fedavg", 0, [0.5])
    leave(tmp_path / "runs" / "iid", "tent", 0, [0.54])
    page = tmp_path / "page.md"
    page.write_text(
        "# Title\n\n<!-- fedapps table runs --scores gain -->\nold\n<!-- end -->\n\nα stays.\n"
        "\n<!-- fedapps table runs/iid --scores harmed --against tent -->\n<!-- end -->\n"
    )
    main(page, tmp_path)
    text = page.read_text()
    assert text.startswith("# Title\n\n") and "\n\nα stays.\n" in text and "old" not in text
    assert "`fedapps table runs --scores gain`" in text and "| tent | 4.00 |" in text
    assert "| fedavg | 100.00 | 1 |" in text
    main(page, tmp_path)
    assert page.read_text() == text
    page.write_text("<!-- fedapps table absent --scores gain -->\n<!-- end -->")
    with pytest.raises(RuntimeError, match="absent"):
        main(page, tmp_path)

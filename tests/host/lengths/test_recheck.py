"""What no key can see (a data file that a plugin reads) shows in the lengths: a few rows are measured again."""

import pytest

from tests.host.lengths.support import texts
from tests.host.lengths.test_observed import Starts, plugin


@pytest.fixture
def starts(runs, tmp_path, encoded):
    return Starts(runs, tmp_path, encoded)


@pytest.mark.parametrize("order", [("1", "20"), ("20", "1")])
def test_data_file_that_a_plugin_reads(order, starts, tmp_path):
    text = plugin("words", inside='words = (Path(__file__).parent / "prompt.txt").read_text()')
    for words in order:
        (tmp_path / "prompt.txt").write_text(words)
        lengths, encoded = starts.lengths(text, texts(50))
        assert lengths == encoded

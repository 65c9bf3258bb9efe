"""Fixtures of the tests of the length pass."""

import pytest
from swift.template import Template

from tests.host.lengths.support import FAMILY
from tests.images import BROKEN, GOOD, make


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    return {**make(folder / "good", GOOD), **make(folder / "broken", BROKEN)}


@pytest.fixture
def template(tiny):
    return tiny(FAMILY).template


@pytest.fixture
def encoded(monkeypatch):
    """The rows that templates encode, with or without pixels, in this process."""
    calls, encode = [], Template.encode

    def noted(self, row, **options):
        calls.append(row["messages"][0]["content"])
        return encode(self, row, **options)

    monkeypatch.setattr(Template, "encode", noted)
    return calls

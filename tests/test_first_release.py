"""What 0.1.0 wrote loads bit for bit in this version."""

import json

import pytest

from tests.support.first_release import HASHES, WRITERS, hashes_of, loaded

EXPECTED = json.loads(HASHES.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", WRITERS)
def test_a_folder_of_the_first_release_loads_bit_for_bit(name):
    assert hashes_of(loaded(name)) == EXPECTED[name]

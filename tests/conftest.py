import pytest

from tests.ranks import RankPool


@pytest.fixture(scope="session")
def ranks():
    """Rank processes for the whole session, see tests/ranks.py."""
    pool = RankPool()
    yield pool
    pool.close()

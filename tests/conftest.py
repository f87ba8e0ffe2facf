import pytest
import torch

SLOWEST = ("test_notebooks", "test_run_grid", "test_run_all", "test_browser", "test_record")


def pytest_collection_modifyitems(items):
    """The slowest files first: of two workers (run_tests.sh) none waits long for the other's last file."""
    items.sort(key=lambda item: [*SLOWEST, item.path.stem].index(item.path.stem))


@pytest.fixture(scope="module")
def one_thread():
    """For tiny models, which are too small to share: a second thread mostly waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)

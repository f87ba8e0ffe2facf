import pytest
import torch


@pytest.fixture(scope="module")
def one_thread():
    """For tiny models, which are too small to share: a second thread mostly waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)

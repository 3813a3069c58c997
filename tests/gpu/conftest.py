import gc

import pytest
import torch


@pytest.fixture(autouse=True)
def _leave_memory_to_others():
    """The fp64 references are large, and several test processes, and ranks that tests start, share the card."""
    yield
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()

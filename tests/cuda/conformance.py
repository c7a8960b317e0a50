"""A pytest plugin: the tests of host storages, over rows in device memory. What a test makes without a word about its device is made
on ``SHMBUF_TEST_DEVICE`` (default: cuda:0). Over the stand-in:

    LD_LIBRARY_PATH=$(python -m tests.cuda.standin) python -m pytest -p tests.cuda.conformance tests/unit/test_buffer.py

On a GPU, whose tensors are not the host's as these tests have them, batches come by way of the host (SHMBUF_CUDA_TENSORS=host);
test_on_gpu.py has the device's own.
"""

from __future__ import annotations

import os

import pytest

from shmbuf.attachment import Attachment

DEVICE = os.environ.get("SHMBUF_TEST_DEVICE", "cuda:0")

# By test, or by file: why it is not asked of a device.
FORK = "CUDA does not survive a fork; tests/cuda/test_sharing.py has what a child can do"
VIEW = "rows in device memory have no views"
LAST = "rows in device memory go with the last who has them open"
THREAD = "a sleeping thread hands the memory to those who attach"
NOT_ON_A_DEVICE = {
    "tests/unit/test_epochs.py::test_a_fork_child_begins_an_epoch_of_its_own": FORK,
    "tests/unit/test_slices.py::test_a_fork_child_draws_slices": FORK,
    "tests/unit/test_journal.py::test_the_clock_tells_when_how_much_was_stored": FORK,
    "tests/unit/test_loading.py::test_a_killed_load_leaves_what_it_had_loaded_and_stops_nobody": FORK,
    "tests/unit/test_bad_input_torch.py::test_a_tensor_without_memory_does_not_crash_the_process": FORK,
    "tests/unit/test_attach_torch.py::test_the_context_manager_closes": LAST,
    "tests/unit/test_face_ways.py::test_what_is_held_back_is_stored_by_flush_and_close": LAST,
    "tests/unit/test_face_prefetch.py::test_no_thread_is_left": THREAD,
    "tests/unit/test_handles.py::test_caller_means_no_thread_at_all": THREAD,
    "tests/unit/test_priorities.py::test_a_fork_child_sets_and_draws": FORK,
    "tests/unit/test_pins.py::test_the_rows_in_place_in_two_parts_where_the_storage_wraps": VIEW,
    "tests/unit/test_pins.py::test_it_holds_up_whoever_needs_its_slots_and_nobody_else": VIEW,
    "tests/unit/test_pins.py::test_views_outlive_pin_handle_and_buffer": VIEW,
    "tests/unit/test_pins.py::test_an_emptied_buffer_still_shows_what_was_pinned": VIEW,
}


def pytest_configure(config: pytest.Config) -> None:
    from shmbuf.cuda import driver

    os.environ["STANDIN_TENSORS"] = "1"
    if driver.by_index(0).name != "Stand-in device":
        os.environ["SHMBUF_CUDA_TENSORS"] = "host"
    Attachment.create.__func__.__kwdefaults__["device"] = DEVICE  # type: ignore[attr-defined]
    from shmbuf.storage import ShmStorage

    ShmStorage.__init__.__kwdefaults__["device"] = DEVICE  # type: ignore[index]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        where = item.nodeid.split("[")[0]
        for name, why in NOT_ON_A_DEVICE.items():
            if where == name or where.startswith(name + "::"):
                item.add_marker(pytest.mark.skip(reason=why))

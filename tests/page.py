"""The names of the page of TorchRL's `RemoteTensorDictReplayBuffer`, with what each takes there; and some more that its classes have."""

from __future__ import annotations

from collections.abc import Callable

# The page's own, with its parameters' names, kinds and defaults.
METHODS: dict[str, Callable] = {
    "add": lambda self, data: 0,
    "append_transform": lambda self, transform, *, invert=False: 0,
    "as_remote": lambda remote_config=None: 0,
    "client": lambda self: 0,
    "dump": lambda self, *args, **kwargs: 0,
    "dumps": lambda self, path: 0,
    "empty": lambda self, empty_write_count=True: 0,
    "extend": lambda self, tensordicts, *, update_priority=None: 0,
    "insert_transform": lambda self, index, transform, *, invert=False: 0,
    "load": lambda self, *args, **kwargs: 0,
    "loads": lambda self, path: 0,
    "next": lambda self: 0,
    "query": lambda self, predicate=None, *, trajectory_key=None: 0,
    "read_all_in_order": lambda self, end=None: 0,
    "register_load_hook": lambda self, hook: 0,
    "register_save_hook": lambda self, hook: 0,
    "sample": lambda self, batch_size=None, include_info=None, return_info=False: 0,
    "save": lambda self, *args, **kwargs: 0,
    "set_": lambda self, key, value: 0,
    "set_at_": lambda self, key, value, index: 0,
    "set_sampler": lambda self, sampler: 0,
    "set_storage": lambda self, storage, collate_fn=None: 0,
    "set_writer": lambda self, writer: 0,
    "shutdown": lambda self, timeout=None: 0,
    "start": lambda self: 0,
    "stats": lambda self: 0,
    "update_": lambda self, input_dict_or_td, clone=False, *, keys_to_update=None: 0,
    "write_all": lambda self, data, end=None: 0,
}
PROPERTIES = (
    "batch_size",
    "initialized",
    "is_alive",
    "sampler",
    "service_backend",
    "storage",
    "transform",
    "write_count",
    "writer",
)
# Not on the page; its classes, or their mixins, have them.
MORE: dict[str, Callable] = {
    "as_dataset": lambda self, num_batches=None: 0,  # ours
    "can_sample": lambda self, batch_size=None: 0,
    "load_state_dict": lambda self, state_dict: 0,
    "mark_update": lambda self, index: 0,
    "set_rng": lambda self, generator: 0,
    "share": lambda self, shared=True: 0,
    "state_dict": lambda self: 0,
    "submit_update_if_present": lambda self, *, index, generation, patch, version_key=None, version=None, require_newer=False: (
        0
    ),
    "synchronize": lambda self: 0,
    "update_if_present": lambda self, *, index, generation, patch, version_key=None, version=None, require_newer=False: (
        0
    ),
    "update_priority": lambda self, index, priority: 0,
    "update_tensordict_priority": lambda self, data: 0,
}
CONSTRUCTOR = {"use_ray_service": False, "service_backend": None, "service_backend_options": None}
NAMES = frozenset([*METHODS, *PROPERTIES, *MORE])

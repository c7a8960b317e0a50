"""What the constructors are told: TorchRL's keywords, checked, and what each means here."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from shmbuf.attaching import checked_sampler
from shmbuf.samplers import ConsumingSampler, RandomSampler, Sampler
from shmbuf.storage import ShmStorage


def _theirs(part: Any) -> bool:
    return type(part).__module__.split(".")[0] == "torchrl"


def made_storage(storage: Any) -> ShmStorage:
    """The storage itself, or what a function without arguments makes; None: an unnamed one of 1000 rows."""
    if storage is None:
        return ShmStorage(1000)
    made = storage() if callable(storage) and not isinstance(storage, ShmStorage) and not _theirs(storage) else storage
    if isinstance(made, ShmStorage):
        return made
    hint = ""
    if _theirs(made):
        size = getattr(made, "max_size", "max_size")
        hint = f": rows live in shared memory here, ShmStorage({size}) takes its place"
    raise TypeError(f"storage is a ShmStorage, not {type(made).__name__}{hint}")


def set_time_dim(storage: ShmStorage, dim_extend: Any) -> None:
    """Raises ValueError."""
    if dim_extend is None:
        return
    if isinstance(dim_extend, bool) or dim_extend not in (0, storage.ndim - 1):
        raise ValueError(
            f"dim_extend={dim_extend!r} with a storage of ndim={storage.ndim}: rows follow each other along dimension "
            f"{storage.ndim - 1}" + (", or 0" if storage.ndim > 1 else "")
        )
    storage._time_dim = int(dim_extend)


def made_sampler(sampler: Any, consume_after_n_samples: int | None) -> Sampler:
    """The sampler itself, or what a function without arguments makes; a consuming one if rows are to be drawn so many times."""
    made = sampler() if callable(sampler) and not _theirs(sampler) else sampler
    if made is not None:
        if _theirs(made):
            name = type(made).__name__
            raise TypeError(f"the sampler is TorchRL's {name}; samplers of these names are in shmbuf: shmbuf.{name}")
        made = checked_sampler(made)
    n = consume_after_n_samples
    if n is None:
        return made if made is not None else RandomSampler()
    if isinstance(n, bool) or not hasattr(n, "__index__"):
        raise TypeError("consume_after_n_samples must be a positive integer.")
    if int(n) < 1:
        raise ValueError("consume_after_n_samples must be a positive integer.")
    if isinstance(made, ConsumingSampler):
        if made.max_sample_count != int(n):
            raise ValueError(
                f"consume_after_n_samples={n} conflicts with the provided ConsumingSampler.max_sample_count={made.max_sample_count}."
            )
        return made
    if made is not None and type(made) is not RandomSampler:
        raise ValueError(
            "consume_after_n_samples only supports the default RandomSampler or an explicit ConsumingSampler. Prioritized, "
            "slice and without-replacement samplers are not supported."
        )
    return ConsumingSampler(int(n))


def checked_generator(generator: Any) -> torch.Generator | None:
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"the numbers of what is drawn come from a torch.Generator, not {type(generator).__name__}")
    return generator


def check_drop_last(sampler: Sampler, batch_size: int | None) -> None:
    if batch_size is None and getattr(sampler, "drop_last", False):
        raise ValueError(
            "Samplers with drop_last=True must work with a predictable batch-size. "
            "Please pass the batch-size to the ReplayBuffer constructor."
        )


def wants_ray(service_backend: str | None, use_ray_service: bool) -> bool:
    """Whether the constructor makes a Ray service. Raises ValueError."""
    if use_ray_service:
        if service_backend not in (None, "direct", "ray"):
            raise ValueError(f"use_ray_service=True conflicts with service_backend={service_backend!r}.")
        warnings.warn("use_ray_service is deprecated: service_backend='ray' is the same.", FutureWarning, stacklevel=3)
    return use_ray_service or service_backend == "ray"


def check_service(
    service_backend: str | None,
    service_backend_options: Mapping[str, Any] | None,
    transport: str,
    transport_options: Mapping[str, Any] | None,
) -> None:
    """Any process of the machine attaches directly."""
    if service_backend not in (None, "direct"):
        raise ValueError(
            f"service_backend={service_backend!r}: ReplayBuffer supports 'direct' or 'ray'. 'direct' is shared by processes here"
        )
    if transport not in ("auto", "direct"):
        raise ValueError(f"transport={transport!r}: a direct ReplayBuffer only supports transport='auto' or 'direct'.")
    if transport_options:
        raise ValueError("transport_options are only valid for a remote ReplayBuffer.")
    if service_backend_options:
        raise ValueError("service_backend_options are only valid for service_backend='ray'.")

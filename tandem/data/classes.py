"""Classes of the user's own that rows come from: named in the configuration, looked at before torch is imported."""

from typing import Any

from tandem.files import load_class


def dataset_class(reference: str) -> type[Any]:
    """Of `data.dataset`, a RowSource. Raises UserError where there is none, or it lacks a method."""
    return load_class(reference, "data.dataset", "a data set", ("__len__", "__getitem__"))


def sampler_class(reference: str) -> type[Any]:
    """Of `data.sampler.sampler`, a RowSampler. Raises UserError where there is none, or it lacks a method."""
    return load_class(reference, "data.sampler.sampler", "a sampler", ("draw", "update", "state", "load_state"))

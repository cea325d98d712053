"""HDF5 shards, importers, the sampler and the loader: from files to micro-batches, without MPI.

    description = describe(path, x=..., y=...)          # on one rank, before MPI starts; plain data, to be broadcast
    dataset = Dataset(description)                      # on every rank
    training, validation = split(len(dataset), "tail:0.2")
    loader = Loader(dataset, Sampler(training, batch, seed=0), n_micro, micro_start, micro_stop)
"""

from typing import Any

from mpitrain.data.augment import AUGMENTATIONS, augmentations
from mpitrain.data.checks import check_finite, check_labels, scan_labels, scan_targets
from mpitrain.data.found import BUILT_IN
from mpitrain.data.loader import Loader, MicroBatch
from mpitrain.data.probe import Limits, Parser, check_validation, describe
from mpitrain.data.sampler import Index, Sampler
from mpitrain.data.shards import Dataset
from mpitrain.data.split import fold_of, folds, is_file, share_of, split
from mpitrain.data.tokens import TokenWindows, token_split
from mpitrain.data.transforms import TRANSFORMS, Transform, Transforms

__all__ = ["AUGMENTATIONS", "BUILT_IN", "TRANSFORMS", "Dataset", "Index", "Limits", "Loader", "MicroBatch", "Parser", "Sampler",
           "TokenWindows", "Transform", "Transforms", "augmentations", "check_finite", "check_labels", "check_validation",
           "describe", "fold_of", "folds", "is_file", "scan_labels", "scan_targets", "share_of", "split", "token_split",
           "write_parts", "write_shards"]


def __getattr__(name: str) -> Any:
    if name in ("write_parts", "write_shards"):   # which few programs need
        from mpitrain.data import writing
        return getattr(writing, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

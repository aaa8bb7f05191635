"""Batches whose features, or whose ranks, have different sizes: brought to one size.

    user  2 bags, inverse indices 0 1 1 0        4 bags: a b b a
    item  4 bags, inverse indices 0 1 2 3   ->   4 bags: as they are

The result of a training step is the same: a bag that several samples share gets the sum of their gradients.
"""

from __future__ import annotations

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


def expand_variable_batch(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The batch with a bag for every sample. One of a single size is returned as it is, and so is one without
    inverse indices, which TorchRec refuses."""
    inverse = features.inverse_indices_or_none()
    if not features.variable_stride_per_key() or inverse is None:
        return features
    names, of_names = inverse
    weighted = features.weights_or_none() is not None
    values, weights, lengths = [], [], []
    keys = features.keys()
    for name in keys:
        bags = features[name]
        of_samples = of_names[names.index(name)].to(bags.lengths().device)
        counts = bags.lengths()[of_samples]
        starts = bags.offsets()[:-1][of_samples]
        before = torch.cumsum(counts, 0) - counts
        places = torch.repeat_interleave(starts - before, counts.long()) + torch.arange(
            int(counts.sum()), device=counts.device
        )
        lengths.append(counts)
        values.append(bags.values()[places])
        if weighted:
            weights.append(bags.weights()[places])
    return KeyedJaggedTensor(
        keys,
        torch.cat(values),
        weights=torch.cat(weights) if weighted else None,
        lengths=torch.cat(lengths),
    )


def padded(features: KeyedJaggedTensor, samples: int) -> KeyedJaggedTensor:
    """The batch with empty bags behind its own, so that it has this many samples."""
    lengths = features.lengths().view(len(features.keys()), features.stride())
    more = lengths.new_zeros(len(features.keys()), samples - features.stride())
    return KeyedJaggedTensor(
        features.keys(),
        features.values(),
        weights=features.weights_or_none(),
        lengths=torch.cat([lengths, more], 1).reshape(-1),
        stride=samples,
    )

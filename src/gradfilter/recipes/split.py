"""A data set cut into parts, alike or unlike, as federated learning and adaptation need them.

Every function gives the indices of each part, in ascending order; parts are disjoint, none is
empty, and together they cover everything. Equal labels and an equal seed give equal parts: NumPy
keeps the stream of `RandomState` fixed.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def iid(labels: Tensor, parts: int, *, seed: int) -> list[Tensor]:
    """Parts of equal size, drawn at random whatever the labels."""
    check(len(labels), parts, "pictures")
    order = np.random.RandomState(seed).permutation(len(labels))
    return [ascending(part) for part in np.array_split(order, parts)]


def shards(labels: Tensor, parts: int, *, seed: int, per_part: int = 2) -> list[Tensor]:
    """Parts of `per_part` shards each; a shard is a run of pictures sorted by label.

    So a part holds few classes (McMahan et al., "Communication-Efficient Learning of Deep Networks
    from Decentralized Data", 2017). Two parts, one to pretrain on and one to adapt to, are the
    setting of the gradient filtering paper.
    """
    if per_part < 1:
        raise ValueError(f"per_part must be 1 or more, not {per_part}")
    check(len(labels), parts * per_part, f"pictures in {per_part} shards per part")
    random = np.random.RandomState(seed)
    shuffled = random.permutation(len(labels))  # which pictures of a class meet is drawn too
    by_label = shuffled[np.argsort(labels.numpy()[shuffled], kind="stable")]
    pieces = np.array_split(by_label, parts * per_part)
    dealt = random.permutation(len(pieces)).reshape(parts, per_part)
    return [ascending(np.concatenate([pieces[i] for i in hand])) for hand in dealt]


def dirichlet(labels: Tensor, parts: int, *, seed: int, alpha: float = 0.5) -> list[Tensor]:
    """Every class is dealt to the parts in shares drawn from a Dirichlet distribution.

    Small `alpha`: a class lies mostly in one part; large: parts are alike (Hsu et al., "Measuring
    the Effects of Non-Identical Data Distribution", 2019). A part that got nothing takes a picture
    from the largest.
    """
    if not alpha > 0:
        raise ValueError(f"alpha must be above 0, not {alpha}")
    check(len(labels), parts, "pictures")
    random = np.random.RandomState(seed)
    hands: list[list[int]] = [[] for _ in range(parts)]
    for label in labels.unique().tolist():
        members = random.permutation(np.flatnonzero(labels.numpy() == label))
        ends = np.cumsum(shares(random, parts, alpha))[:-1]
        cut = np.split(members, (ends * len(members)).round().astype(int))
        for hand, piece in zip(hands, cut, strict=True):
            hand.extend(piece.tolist())
    for hand in hands:
        if not hand:
            hand.append(max(hands, key=len).pop())
    return [ascending(np.array(hand)) for hand in hands]


SPLITS = {"iid": iid, "non-iid": shards, "dirichlet": dirichlet}


def shares(random: np.random.RandomState, parts: int, alpha: float) -> np.ndarray:
    """A draw from the symmetric Dirichlet distribution, by logarithms.

    A gamma variate of a small shape underflows; gamma(a + 1) * u ** (1 / a) is one of shape a.
    """
    uniform = 1 - random.uniform(size=parts)  # above 0
    logs = np.log(random.gamma(alpha + 1, size=parts)) + np.log(uniform) / alpha
    weights = np.exp(logs - logs.max())
    return weights / weights.sum()


def check(count: int, parts: int, what: str) -> None:
    if parts < 1:
        raise ValueError("a data set has 1 part or more")
    if count < parts:
        raise ValueError(f"{count} pictures are too few: at least {parts} {what} are needed")


def ascending(indices: np.ndarray) -> Tensor:
    return torch.from_numpy(np.sort(indices)).to(torch.int64)

"""Synthetic routing of a mixture of experts, whose persistence and skew can be set.

A token's embedding has three parts: one of all tokens, one of its subject, and one of its own, which changes gradually
from one id to the next. A random router makes a hot list of the first, of the second what stays while a text stays with
its subject, and of the third what a token shares with the one before. Embeddings are so long that a layer changes the
residual little: the next layer's router, asked one layer early, then names about as many experts as published ones do.

Shape letters: V vocabulary, D model width, L layers, X experts, T tokens, K experts of a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SUBJECTS, IDS = 8, 256
"""Subjects of texts, and ids of each."""
VOCABULARY = SUBJECTS * IDS
_LENGTH = 5.0
"""Standard deviation of an embedding's numbers. What attention and an FFN add has about 0.5."""
_SENTENCE = 24
"""Tokens with ids that follow each other."""


@dataclass(frozen=True)
class Routing:
    """A random router for each layer, and the embeddings that it reads."""

    layers: int
    d_model: int
    experts: int
    taken: int
    common: float
    subject: float
    """Parts of an embedding's variance."""
    likeness: float
    """Correlation of what is a token's own with that of the id before."""

    def embedding(self) -> np.ndarray:
        """(V, D)"""
        rng, own_VD = np.random.default_rng(0), np.empty((VOCABULARY, self.d_model), np.float32)
        common_D = rng.standard_normal(self.d_model)
        subject_VD = np.repeat(rng.standard_normal((SUBJECTS, self.d_model)), IDS, 0)
        own_D = rng.standard_normal(self.d_model)
        for row_D in own_VD:
            own_D = self.likeness * own_D + np.sqrt(1 - self.likeness**2) * rng.standard_normal(self.d_model)
            row_D[:] = own_D
        own = 1 - self.common - self.subject
        x_VD = np.sqrt(self.common) * common_D + np.sqrt(self.subject) * subject_VD + np.sqrt(own) * own_VD
        return np.asarray(_LENGTH * x_VD, np.float32)

    def routers(self) -> np.ndarray:
        """(L, X, D)"""
        shape = self.layers, self.experts, self.d_model
        return np.random.default_rng(1).standard_normal(shape, np.float32) / np.float32(np.sqrt(self.d_model))

    def of(self, tokens_T: Sequence[int]) -> np.ndarray:
        """(T, L, K) the experts of a text, if no layer changed the residual."""
        x_TD, router_LXD = self.embedding()[list(tokens_T)], self.routers()
        value_TLX = np.stack([x_TD @ router_XD.T for router_XD in router_LXD], 1)
        return np.argsort(-value_TLX, axis=-1)[..., : self.taken]

    def profiled(self) -> np.ndarray:
        """(L, X) how often each expert is taken in a text of all subjects."""
        taken_TLK = self.of([token for n in range(SUBJECTS) for token in text(64, [n], 64, seed=9 + n)])
        return np.stack(
            [np.bincount(taken_TK.ravel(), minlength=self.experts) for taken_TK in taken_TLK.swapaxes(0, 1)]
        )


def text(tokens: int, subjects: Sequence[int] = (3,), each: int = 60, seed: int = 1) -> list[int]:
    """A text that goes through subjects, so many tokens each."""
    rng, found = np.random.default_rng(seed), list[int]()
    while len(found) < tokens:
        subject = subjects[len(found) // each % len(subjects)]
        length = min(_SENTENCE, each - len(found) % each)
        found += (IDS * subject + (rng.integers(IDS) + np.arange(length)) % IDS).tolist()
    return found[:tokens]


def persistence_and_hot_list(taken_TLK: np.ndarray) -> tuple[float, float]:
    """Shares of a token's experts that were the token's before, and that are among the layer's K most frequent ones."""
    same = (taken_TLK[1:, :, :, None] == taken_TLK[:-1, :, None, :]).any(-1).mean()
    most = np.mean([
        np.sort(np.bincount(taken_TK.ravel()))[::-1][: taken_TK.shape[1]].sum() / taken_TK.size
        for taken_TK in taken_TLK.swapaxes(0, 1)
    ])  # fmt: skip
    return float(same), float(most)

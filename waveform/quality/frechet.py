"""Frechet distance between two sets of vectors, each taken as a Gaussian: how far apart two sets of clips are."""

import numpy as np
from sklearn.covariance import ledoit_wolf


def frechet_distance(a: np.ndarray, b: np.ndarray) -> float:
    """|m_a - m_b|^2 + tr(C_a + C_b - 2 (C_a C_b)^(1/2)) of vectors [n, d] and [m, d] (Dowson and Landau 1982).

    Covariances are shrunk to a multiple of the identity (Ledoit and Wolf 2004), so n may be smaller than d. It is
    biased upwards, more so the fewer vectors there are: compare distances of equally many, or with that of as many
    real ones.
    """
    (covariance_a, _), (covariance_b, _) = ledoit_wolf(a), ledoit_wolf(b)
    values, vectors = np.linalg.eigh(covariance_a)
    root = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
    cross = np.linalg.eigvalsh(root @ covariance_b @ root)  # the eigenvalues of C_a C_b
    overlap = np.sqrt(np.maximum(cross, 0)).sum()
    moved = np.square(a.mean(axis=0) - b.mean(axis=0)).sum()
    return max(float(moved + np.trace(covariance_a) + np.trace(covariance_b) - 2 * overlap), 0.0)

"""Frechet distance between two sets of vectors, each taken as a Gaussian: how far apart two sets of clips are."""

import numpy as np


def frechet_distance(a: np.ndarray, b: np.ndarray) -> float:
    """|m_a - m_b|^2 + tr(C_a + C_b - 2 (C_a C_b)^(1/2)) of vectors [n, d] and [m, d] (Dowson and Landau 1982).

    Covariances are shrunk, so n may be smaller than d. It is biased upwards, more so the fewer vectors there are:
    compare distances of equally many, or with that of as many real ones.
    """
    mean_a, mean_b = a.mean(axis=0), b.mean(axis=0)
    covariance_a, covariance_b = shrunk_covariance(a), shrunk_covariance(b)
    root = _root(covariance_a)
    cross = np.linalg.eigvalsh(root @ covariance_b @ root)  # the eigenvalues of C_a C_b
    overlap = np.sqrt(np.maximum(cross, 0)).sum()
    distance = np.square(mean_a - mean_b).sum() + np.trace(covariance_a) + np.trace(covariance_b) - 2 * overlap
    return max(float(distance), 0.0)


def shrunk_covariance(vectors: np.ndarray) -> np.ndarray:
    """Covariance [d, d] of vectors [n, d], shrunk to a multiple of the identity as is best (Ledoit and Wolf 2004)."""
    num, width = vectors.shape
    centred = vectors - vectors.mean(axis=0)
    sample = centred.T @ centred / num
    target = np.trace(sample) / width * np.eye(width)
    spread = np.square(sample - target).sum()
    error = (np.square(np.square(centred).sum(axis=1)).sum() / num - np.square(sample).sum()) / num
    share = 1.0 if spread == 0 else min(max(error / spread, 0.0), 1.0)
    return share * target + (1 - share) * sample


def _root(matrix: np.ndarray) -> np.ndarray:
    """The square root of a symmetric matrix without negative eigenvalues."""
    values, vectors = np.linalg.eigh(matrix)
    return (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T

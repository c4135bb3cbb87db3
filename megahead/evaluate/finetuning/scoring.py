"""Losses of a batch, and metrics of an evaluation set."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from torch import Tensor

Floats = NDArray[np.float64]

METRICS: Mapping[str, Callable[[Floats, Floats], float]] = {
    "accuracy": lambda labels, predictions: accuracy_score(labels, predictions),
    "matthews": lambda labels, predictions: matthews_corrcoef(labels, predictions),
    "f1": lambda labels, predictions: f1_score(labels, predictions, zero_division=0.0),
    "macro_f1": lambda labels, predictions: f1_score(labels, predictions, average="macro", zero_division=0.0),
    "pearson": lambda labels, predictions: pearsonr(labels, predictions).statistic,
    "spearman": lambda labels, predictions: spearmanr(labels, predictions).statistic,
}
"""By name: functions of labels and predictions, at most 1."""


def measure(metric: str, labels: Floats, predictions: Floats) -> float:
    """A metric of an evaluation set; 0 where it is undefined, as correlations with constant predictions are."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value = float(METRICS[metric](labels, predictions))
    return 0.0 if np.isnan(value) else value


def class_loss(logits_BC: Tensor, classes_B: Tensor, *, balanced: bool) -> Tensor:
    """Mean cross-entropy of a batch; balanced: each class's sum divided by its count in the batch, so that all
    classes weigh the same however rare they are (divided by the number of classes present: same scale)."""
    losses_B = F.cross_entropy(logits_BC, classes_B, reduction="none")
    if not balanced:
        return losses_B.mean()
    counts_C = torch.bincount(classes_B, minlength=logits_BC.shape[1])
    return (losses_B / counts_C[classes_B]).sum() / (counts_C > 0).sum()


def number_loss(values_B: Tensor, labels_B: Tensor) -> Tensor:
    """Mean squared error, for regression."""
    return F.mse_loss(values_B, labels_B)

"""Scores of labelled predictions, by scikit-learn, scipy and seqeval."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from windlass.errors import ConfigError


def label_scores(task: str, predicted: Sequence[Any], truth: Sequence[Any]) -> dict[str, float | None]:
    """Every score of a task. Predictions and truth: label numbers (classify), rows of 0 and 1 (multi_label), numbers
    (regress), lists of tags (tag). None: not defined for these values, such as the correlation of a constant."""
    try:
        from scipy.stats import pearsonr, spearmanr
        from sklearn import metrics
    except ImportError:
        raise ConfigError(
            "tune.package-missing", "scores of fine-tuning need scikit-learn", hint="pip install 'windlass[tune]'"
        ) from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of undefined scores: they become None or count as 0, as said above
        if task == "regress":
            pairs = np.asarray(predicted, dtype=np.float64), np.asarray(truth, dtype=np.float64)
            error = float(np.mean((pairs[0] - pairs[1]) ** 2))
            return {"pearson": defined(pearsonr(*pairs)[0]), "spearman": defined(spearmanr(*pairs)[0]), "mse": error}
        if task == "tag":
            return span_scores(predicted, truth)
        f1 = {  # as scikit-learn by itself: labels that occur neither in truth nor in predictions do not count
            f"{average}_f1": float(metrics.f1_score(truth, predicted, average=average, zero_division=0))
            for average in ("macro", "weighted", "micro")
        }
        accuracy = float(metrics.accuracy_score(truth, predicted))
        if task == "multi_label":
            return {"accuracy": accuracy, **f1}
        return {"accuracy": accuracy, **f1, "matthews": float(metrics.matthews_corrcoef(truth, predicted))}


def span_scores(predicted: Sequence[Sequence[str]], truth: Sequence[Sequence[str]]) -> dict[str, float | None]:
    """Spans of BIO tags that are right in kind and extent."""
    from seqeval import metrics

    pair = [list(tags) for tags in truth], [list(tags) for tags in predicted]
    return {
        "span_f1": float(metrics.f1_score(*pair, zero_division=0)),
        "span_precision": float(metrics.precision_score(*pair, zero_division=0)),
        "span_recall": float(metrics.recall_score(*pair, zero_division=0)),
        "accuracy": float(metrics.accuracy_score(*pair)),
    }


def defined(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None

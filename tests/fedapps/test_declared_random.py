"""Tables and arrays of random kinds: learnt as scikit-learn's counterpart does, or refused.

A few examples run by default. FEDAPPS_EXAMPLES=200 runs as many, other ones each time."""

import itertools
import os
import string

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from own_files import rows_of, trained
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import r2_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

EXAMPLES = int(os.environ.get("FEDAPPS_EXAMPLES", "0"))
ROWS = 240
MARGIN = 0.12  # by which a short run may be worse than the counterpart
# The loss is the mean over outputs, so two of them have half the gradient of one.
RATES = {"values": 0.05, "large values": 0.05, "whole values": 0.05, "two values": 0.1}
WORDS = np.array(["lo", "mid", "hi"])
numbered = itertools.count()

# Forms of labels from classes c (n,), values v (n,) and draws; whether each must be read.
LABELS = {
    "numbers": (lambda c, v, draw: c, True),
    "from 1": (lambda c, v, draw: c + 1, True),
    "texts": (lambda c, v, draw: WORDS[c], True),
    "codes": (lambda c, v, draw: np.array(["007", "010", "100"])[c], True),
    "decimals": (lambda c, v, draw: c.astype(float), True),
    "truth values": (lambda c, v, draw: c > 0, True),
    "signs": (lambda c, v, draw: np.where(c > 0, 1, -1), True),
    "values": (lambda c, v, draw: v, True),
    "large values": (lambda c, v, draw: 1e6 * v + 3e7, True),
    "one class": (lambda c, v, draw: 0 * c, False),
    "negative": (lambda c, v, draw: c - 4, False),
    "a gap": (lambda c, v, draw: np.where(np.arange(len(c)) == 7, np.nan, c), False),
    "infinity": (lambda c, v, draw: np.where(np.arange(len(c)) == 7, np.inf, v), False),
    "numbers and texts": (
        lambda c, v, draw: np.array([0, "b", 2], dtype=object)[c].astype(str),
        True,
    ),
    "dates": (lambda c, v, draw: np.datetime64("2020-01-01") + c, None),
    "whole values": (lambda c, v, draw: (100 * v).round().astype(int), None),
    "sparse": (lambda c, v, draw: c * 10**7, None),
    "percent": (lambda c, v, draw: np.array([f"{value:.2f} %" for value in v]), False),
}
# Further forms, of arrays alone.
SHAPES = {
    "a column": (lambda c, v, draw: c[:, None], True),
    "one-hot": (lambda c, v, draw: np.eye(3, dtype=int)[c], True),
    "several": (lambda c, v, draw: np.c_[c > 0, v > 0, c == 1].astype(int), True),
    "two values": (lambda c, v, draw: np.c_[v, 3 - v], True),
    "masks": (lambda c, v, draw: np.zeros((len(c), 3, 3), int), False),
    "none": (lambda c, v, draw: np.zeros((len(c), 0)), False),
    "complex": (lambda c, v, draw: c * 1j, False),
    "whole columns": (lambda c, v, draw: np.c_[c, c + 5], False),
}
# Columns that say nothing about the labels, with what scikit-learn gets in their place.
COLUMNS = {
    "numbers": (lambda draw, n: draw.normal(size=n), True),
    "large": (lambda draw, n: 1e9 + 1e3 * draw.normal(size=n), True),
    "tiny": (lambda draw, n: 1e-9 * draw.normal(size=n), True),
    "whole": (lambda draw, n: draw.integers(0, 50, n), True),
    "truth": (lambda draw, n: draw.random(n) > 0.5, True),
    "words": (lambda draw, n: draw.choice(["ja", "nein"], n), True),
    "categories": (lambda draw, n: draw.choice(list("uvwx"), n), True),
    "codes": (lambda draw, n: draw.choice(["01067", "04109", "10115"], n), True),
    "constant": (lambda draw, n: np.full(n, 3), True),
    "numbers of rows": (lambda draw, n: np.arange(n), True),
    "names of rows": (lambda draw, n: [f"p{row}" for row in range(n)], True),
    "gaps": (lambda draw, n: np.where(draw.random(n) < 0.1, np.nan, draw.normal(size=n)), True),
    "empty": (lambda draw, n: np.full(n, np.nan), True),
    "categories with gaps": (lambda draw, n: draw.choice(np.array(["u", "v", None]), n), True),
    "infinity": (lambda draw, n: np.where(np.arange(n) == 3, np.inf, 1.5), False),
    "huge": (lambda draw, n: 1e200 * draw.normal(size=n), False),
    "thousands": (lambda draw, n: [f"{x:,}" for x in draw.integers(1000, 9999, n)], False),
    "units": (lambda draw, n: [f"{x:.1f} kg" for x in draw.normal(size=n)], False),
    "dates": (lambda draw, n: pd.Timestamp("2020-01-01") + pd.to_timedelta(range(n), "D"), False),
    "texts": (lambda draw, n: [f"note {x}" for x in draw.integers(0, 150, n)], False),
}
FORMS = {
    "csv": {},
    "semicolons": {"sep": ";"},
    "decimal commas": {"sep": ";", "decimal": ","},
    "tabs": {"sep": "\t", "encoding": "utf-16"},
    "a mark": {"encoding": "utf-8-sig"},
}


def few(count):
    """The settings of a test with `count` examples, the same ones by default."""
    return settings(
        max_examples=EXAMPLES or count,
        deadline=None,
        derandomize=not EXAMPLES,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        place = tmp_path_factory.mktemp("own")
        patch.setenv("FEDAPPS_CACHE_DIR", str(place / "cache"))
        yield place


def samples(seed):
    """Three inputs (n, 3), the class that is the largest of them, and a linear value."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(ROWS, 3))
    values = x @ [1.0, -2.0, 0.5] + 0.1 * draw.normal(size=ROWS)
    return draw, x, x.argmax(1), values


def check_run(path, x, y, must, **changes):
    """Run the file, or see it refused in a sentence. `x` and `y` are what scikit-learn gets; `must`
    says that it is read (True) or refused (False)."""
    try:
        scores, federation = trained(path, model="softmax", **changes)
    except ValueError as error:
        said = str(error)
        assert type(error) is ValueError, repr(error)
        assert must is not True, said
        assert path.name in said and "\n" not in said and len(said) < 900, said
        assert any(mark in said for mark in (";", "must", "needs", "needed", "not served")), said
        return
    assert must is not False, federation.line
    training, novel = rows_of(federation)
    task = federation.info.task
    y = np.asarray(y)
    if task == "values":
        y = y.astype(float).reshape(len(y), -1)
        counterpart = make_pipeline(StandardScaler(), Ridge()).fit(x[training], y[training])
        rows = np.concatenate(novel)
        expected = r2_score(y[rows], counterpart.predict(x[rows]))
        assert scores["novel-r2"] > expected - MARGIN, (scores, expected)
        return
    if task == "labels":
        reached = [_accuracy(x, column, training, novel) for column in y.T]
        assert scores["novel-micro-f1"] > min(reached) - 2 * MARGIN, (scores, reached)
        return
    if y.ndim == 2:
        y = y.argmax(1) if y.shape[1] > 1 else y[:, 0]
    expected = _accuracy(x, y, training, novel)
    assert scores["novel-accuracy"] > expected - MARGIN, (scores, expected)


def _accuracy(x, y, training, novel):
    """The mean accuracy over novel clients of a logistic regression on the training rows."""
    counterpart = make_pipeline(StandardScaler(), LogisticRegression())
    counterpart.fit(x[training], y[training])
    return np.mean([counterpart.score(x[rows], y[rows]) for rows in novel])


@few(12)
@given(
    seed=st.integers(0, 999),
    label=st.sampled_from(sorted(LABELS)),
    kinds=st.lists(st.sampled_from(sorted(COLUMNS)), max_size=3),
    form=st.sampled_from(sorted(FORMS)),
    missing=st.sampled_from(["mean", "mean", "refuse"]),
)
def test_tables_are_learnt_or_refused(folder, seed, label, kinds, form, missing):
    draw, x, classes, values = samples(seed)
    make, must = LABELS[label]
    y = make(classes, values, draw)
    frame = pd.DataFrame(x, columns=["height (cm)", "weight", "größe"])
    for name, kind in zip(string.ascii_uppercase, kinds, strict=False):
        make, is_read = COLUMNS[kind]
        frame[name] = make(draw, ROWS)
        has_gaps = kind in ("gaps", "empty", "categories with gaps")
        if not is_read or (has_gaps and missing == "refuse"):
            must = False
    frame.insert(int(draw.integers(len(frame.columns))), "outcome", y)
    path = folder / f"table{next(numbered)}.csv"
    frame.to_csv(path, index=False, **FORMS[form])
    changes = {"label": "outcome", "missing": missing, "rounds": 6}
    if label in RATES:
        changes["lr"] = RATES[label]
    check_run(path, x, y, must, **changes)


@few(12)
@given(
    seed=st.integers(0, 999),
    label=st.sampled_from(sorted(LABELS | SHAPES)),
    kind=st.sampled_from(["float64", "float32", "float16", "scaled", "nan", "one axis", "bool"]),
)
def test_arrays_are_learnt_or_refused(folder, seed, label, kind):
    draw, x, classes, values = samples(seed)
    make, must = (LABELS | SHAPES)[label]
    y = make(classes, values, draw)
    given_x = x
    if kind.startswith("float"):
        given_x = x.astype(kind)
    elif kind == "scaled":
        given_x = x * [1, 1e6, 1e-6] + [0, 4e6, 0]
    elif kind == "nan":
        given_x = np.where(np.arange(3) == 1, np.nan, x)
        must = False
    elif kind == "one axis":
        given_x = x[:, 0]
        must = False
    elif kind == "bool":
        given_x = x > 0
        x = given_x.astype(float)
    path = folder / f"array{next(numbered)}.npz"
    np.savez(path, x=given_x, y=y)
    changes = {"rounds": 6}
    if label in RATES:
        changes["lr"] = RATES[label]
    check_run(path, x, y, must, **changes)

"""Small files in the forms in which people have their data: labels, inputs, tables, LEAF's JSON.

Each function writes into a folder and returns the file's path."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.datasets import load_breast_cancer, load_diabetes, load_iris

ROWS = 240
DRAW = np.random.default_rng(23)
X = DRAW.normal(size=(ROWS, 5)).astype(np.float32)  # the largest of three columns is the class
CLASSES = (X[:, :3] + 0.1 * DRAW.normal(size=(ROWS, 3))).argmax(1)
VALUES = X @ np.array([1.0, -2.0, 3.0, 0.5, 2.0]) + 40
WORDS = np.array(["ash", "birch", "cedar"])
HOSPITALS = np.array(["north", "south", "west"])

# Labels in other forms, of the same classes.
LABELS: dict[str, np.ndarray] = {
    "y-one-hot": np.eye(3, dtype=np.int8)[CLASSES],
    "y-several": (X[:, :4] > 0.8).astype(np.int64),
    "y-column": CLASSES[:, None],
    "y-whole-decimals": CLASSES.astype(np.float64),
    "y-words": WORDS[CLASSES],
    "y-from-one": CLASSES + 1,
    "y-truth-values": X[:, 0] > 0,
    "y-signs": np.sign(X[:, 0]).astype(np.int64),
    "y-one-missing": np.where(np.arange(ROWS) == 9, np.nan, CLASSES),
    "y-values": VALUES,
}
# Inputs and labels in other forms.
ARRAYS: dict[str, tuple[np.ndarray, np.ndarray]] = {
    "y-masks": (DRAW.random((20, 1, 8, 8), dtype=np.float32), DRAW.integers(0, 2, (20, 8, 8))),
    "x-windows": (DRAW.normal(size=(80, 6, 20)).astype(np.float32), DRAW.integers(0, 4, 80)),
    "x-tokens": (DRAW.integers(0, 300, (80, 8)), DRAW.integers(0, 2, 80)),
    "x-bytes-nhwc": (DRAW.integers(0, 256, (40, 8, 8, 3), dtype=np.uint8), np.arange(40) % 2),
    "x-scales": (np.c_[X.astype(float), 1e5 * X[:, :1] + 3e6, 1e-6 * X[:, 1:2]], CLASSES),
    "x-few": (X[:36], CLASSES[:36]),
}


def array_file(folder: Path, name: str) -> Path:
    """The arrays of `name` as an .npz."""
    x, y = ARRAYS[name] if name in ARRAYS else (X, LABELS[name])
    path = folder / f"{name}.npz"
    np.savez(path, x=x, y=y)
    return path


def hospitals() -> pd.DataFrame:
    """Breast cancer with an identifier, a category, gaps and three hospitals."""
    draw = np.random.default_rng(7)
    frame = load_breast_cancer(as_frame=True).frame.rename(columns={"target": "diagnosis"})
    frame["diagnosis"] = np.where(frame["diagnosis"] == 1, "benign", "malignant")
    frame.insert(0, "patient_id", np.arange(len(frame)) + 84000)
    frame["hospital"] = HOSPITALS[draw.integers(0, 3, len(frame))]
    frame["smoker"] = draw.choice(["yes", "no", "unknown"], len(frame))
    frame.loc[frame.sample(frac=0.05, random_state=1).index, "mean texture"] = np.nan
    return frame


def with_unit(frame: pd.DataFrame) -> pd.DataFrame:
    """The mean area with its unit in each cell."""
    return frame.assign(**{"mean area": frame["mean area"].map("{:.1f} mm2".format)})


# name → the table and how it is written.
TABLES: dict[str, tuple[Callable[[pd.DataFrame], pd.DataFrame], dict[str, str]]] = {
    "table": (lambda frame: frame, {}),
    "table-semicolon-comma": (lambda frame: frame, {"sep": ";", "decimal": ","}),
    "table-latin1": (
        lambda frame: frame.rename(columns={"hospital": "Krankenhäuser"}),
        {"encoding": "latin-1"},
    ),
    "table-units": (with_unit, {}),
}
# name → a later hospital's table, without diagnoses.
LATER: dict[str, Callable[[pd.DataFrame], pd.DataFrame]] = {
    "later": lambda frame: frame,
    "later-other-order": lambda frame: frame[sorted(frame.columns, reverse=True)],
    "later-missing-column": lambda frame: frame.drop(columns="mean texture"),
    "later-new-category": lambda frame: frame.assign(smoker="sometimes"),
    "later-other-unit": lambda frame: frame.assign(**{"mean area": frame["mean area"] / 100}),
}


def table_file(folder: Path, name: str) -> Path:
    """A table of `TABLES` or `LATER`, of iris, or of diabetes."""
    path = folder / f"{name}.csv"
    options: dict[str, str] = {}
    if name in TABLES:
        change, options = TABLES[name]
        frame = change(hospitals())
    elif name in LATER:
        later = hospitals().drop(columns=["diagnosis", "hospital"]).sample(40, random_state=2)
        frame = LATER[name](later)
    elif name == "iris":
        frame = load_iris(as_frame=True).frame
    else:
        frame = load_diabetes(as_frame=True, scaled=False).frame
    frame.to_csv(path, index=False, **options)
    return path


def leaf_file(folder: Path) -> Path:
    """LEAF's JSON in one file: five users, texts of other lengths than LEAF's, next characters."""
    users = {}
    for number in range(5):
        text = "the quick brown fox"[: 5 + number]
        users[f"user{number}"] = {"x": [text] * 4, "y": list("abcd")}
    content = {"users": list(users), "num_samples": [4] * 5, "user_data": users}
    path = folder / "leaf.json"
    path.write_text(json.dumps(content))
    return path

"""Write the digits beside this file in MNIST's format, from scikit-learn's digits.csv.gz.

    pip download --no-deps scikit-learn && unzip -p scikit_learn-*.whl '*/digits.csv.gz' > digits.csv.gz
    python -m examples.mnist.make_data digits.csv.gz

Each of its 1,797 lines is 64 pixels (8 x 8, values 0..16) and the digit. Values are scaled to 0..255, the
digits are shuffled once with a fixed seed, and the first four fifths are for training.
"""

from __future__ import annotations

import csv
import gzip
import random
import sys
from pathlib import Path

from examples.mnist import idx

SEED = 1797
TRAINING_SHARE = 0.8
SIDE = 8  # pixels
MOST = 16  # the highest value of a pixel in the source


def main(source: Path, folder: Path) -> None:
    """Read *source* and write MNIST's four files into *folder*; the same source gives the same files."""
    with gzip.open(source, "rt") as lines:
        rows = [[round(float(value)) for value in row] for row in csv.reader(lines)]
    random.Random(SEED).shuffle(rows)
    cut = round(len(rows) * TRAINING_SHARE)
    for split, part in (("train", rows[:cut]), ("test", rows[cut:])):
        images_name, labels_name = idx.FILES[split]
        pixels = bytes(round(value * 255 / MOST) for row in part for value in row[:-1])
        labels = bytes(row[-1] for row in part)
        (folder / f"{images_name}.gz").write_bytes(idx.dump((len(part), SIDE, SIDE), pixels))
        (folder / f"{labels_name}.gz").write_bytes(idx.dump((len(part),), labels))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(__file__).resolve().parent)

"""Array types of the planning half; the dimensions of an array are in the name of its variable.

Counts and indices for NumPy are ``np.intp``, since ``repeat``, ``bincount`` and ``reduceat`` take no wider integers. It
has 32 bits in browsers (docs/planner.md). All other integers are ``np.int64``.
"""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Scalar = TypeVar("Scalar", bound=np.generic)

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def distinct(values: NDArray[Scalar], axis: int | None = None) -> NDArray[Scalar]:
    """Return the distinct values in ascending order; with an axis, the distinct slices along it.

    Without ``return_index`` ``np.unique`` imports numpy's masked arrays, which takes a tenth of the time of a small
    search.
    """
    return np.asarray(np.unique(values, axis=axis, return_index=True)[0])

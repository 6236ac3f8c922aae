"""Types of the arrays in the planning half; their dimensions are in the names of the variables.

What NumPy counts or indexes with is ``np.intp``, which has 32 bits in browsers (docs/planner.md): ``repeat``,
``bincount`` and ``reduceat`` take no wider ones. Everywhere else it is ``np.int64``.
"""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Scalar = TypeVar("Scalar", bound=np.generic)

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def distinct(values: NDArray[Scalar], axis: int | None = None) -> NDArray[Scalar]:
    """Return the values, ascending and each once; with an axis, the slices along it.

    Without an index numpy would import its masked arrays first, which takes a tenth of a small search.
    """
    return np.asarray(np.unique(values, axis=axis, return_index=True)[0])

"""Read the pickles of the Planetoid files without running anything that they name.

A pickle is a program for a stack machine, and one of its instructions calls any function by name. The Planetoid files
(written by Python 2) need about twenty instructions and six names: arrays, a sparse matrix, a dictionary of lists. A file is
scanned first, and refused if it has anything else. Then it is loaded with stand-ins for the six names, which check their
arguments, so numpy and scipy never get an unchecked state.
"""

import io
import math
import pickle
import pickletools
import re
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse

# the largest official file, ind.pubmed.allx, has 9 MB
MAX_BYTES = 256 * 2**20
# an official file makes at most 18; endlessly nested tuples would overflow the stack when they are compared
MAX_TUPLES = 100
# every error that a broken file can cause: wrong opcodes, too few entries, wrong types
BROKEN = (
    pickle.UnpicklingError, ValueError, TypeError, LookupError, AttributeError, EOFError, OverflowError, RecursionError,
)  # fmt: skip
INSTRUCTIONS = {
    "PROTO", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "SHORT_BINSTRING", "BINSTRING",
    "BINPUT", "LONG_BINPUT", "BINGET", "EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
    "APPEND", "APPENDS", "SETITEMS", "GLOBAL", "REDUCE", "NEWOBJ", "BUILD",
}  # fmt: skip


class _Array:
    """Stand-in for an array; created empty, then given its state."""

    value: np.ndarray | None = None

    def __init__(self, kind: Any, shape: Any, code: Any) -> None:
        if (kind, shape, code) != ("ndarray", (0,), "b"):
            raise ValueError("it builds an array with arguments that these files do not need")

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, content = state
        dtype, raw = _expect(dtype, _Dtype).value, _expect(content, str).encode("latin1")
        if not all(type(length) is int and length >= 0 for length in _expect(shape, tuple)) or not 1 <= len(shape) <= 2:
            raise ValueError(f"it holds an array of shape {shape!r}, but arrays must have one or two axes")
        size = _expect(dtype, np.dtype).itemsize * math.prod(shape)
        if size != len(raw):
            raise ValueError(f"it holds an array of {size} bytes with {len(raw)} bytes of content")
        array = np.frombuffer(raw, dtype).reshape(shape, order="F" if is_fortran else "C")
        self.value = array.astype(dtype.newbyteorder("="))


class _Dtype:
    """Stand-in for the type of an array's entries."""

    value: np.dtype | None = None

    def __init__(self, code: Any, align: Any, copy: Any) -> None:
        if not isinstance(code, str) or not re.fullmatch(r"[iu][1248]|f[248]", code):
            raise ValueError(f"it holds an array of type {code!r}, but arrays must be integers or floats")
        self.code = code

    def __setstate__(self, state: Any) -> None:
        order = state[1]
        if state[2:] != (None, None, None, -1, -1, 0) or order not in ("<", ">", "|"):
            raise ValueError("it holds an array of a structured type")
        self.value = np.dtype(order + self.code)


class _Matrix:
    """Stand-in for a sparse matrix."""

    value: sparse.csr_matrix | None = None

    def __setstate__(self, state: Any) -> None:
        rows, columns = _expect(state, dict)["_shape"]
        data, indices, pointers = (_array(state[name]) for name in ("data", "indices", "indptr"))
        whole = pointers.dtype.kind == "i" and indices.dtype.kind == "i" and type(rows) is int and type(columns) is int
        if not whole or pointers.shape != (rows + 1,) or indices.shape != data.shape or data.ndim != 1:
            raise ValueError("it holds a sparse matrix whose parts do not match")
        if pointers[0] != 0 or pointers[-1] != len(data) or (np.diff(pointers) < 0).any():
            raise ValueError("it holds a sparse matrix whose rows overlap")
        if len(indices) and not 0 <= indices.min() <= indices.max() < columns:
            raise ValueError(f"it holds a sparse matrix with a column outside [0, {columns - 1}]")
        self.value = sparse.csr_matrix((data, indices, pointers), shape=(rows, columns))


class _Lists(dict):
    """Stand-in for a dictionary of lists."""

    def __init__(self, factory: Any = "list") -> None:
        if factory != "list":
            raise ValueError("it makes a dictionary whose entries are not lists")
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        raise ValueError("it gives a dictionary a state")


# names that are only passed on stay strings
STAND_INS: dict[str, Any] = {
    "numpy.core.multiarray _reconstruct": _Array,
    "numpy ndarray": "ndarray",
    "numpy dtype": _Dtype,
    "scipy.sparse.csr csr_matrix": _Matrix,
    "collections defaultdict": _Lists,
    "__builtin__ list": "list",
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        return STAND_INS[f"{module_name} {global_name}"]


def read_pickle(path: Path) -> Any:
    """Return the array, sparse matrix or dictionary of lists of integers in a Planetoid file.

    Raises:
        ValueError: The file is missing, too large, truncated, or holds anything else.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    if len(content) > MAX_BYTES:
        raise ValueError(f"{path} has more than {MAX_BYTES} bytes, which no file of the Planetoid data sets has")
    try:
        _look_through(content)
        # Python 2's strings are bytes, and its names must not be translated
        found = _Unpickler(io.BytesIO(content), fix_imports=False, encoding="latin1").load()
        return _finish(found, len(content))
    except BROKEN as error:
        raise ValueError(f"{path} is not a file of the Planetoid data sets: {error}") from None


def _look_through(content: bytes) -> None:
    """Refuse a file with an instruction or a name that the Planetoid files do not need."""
    tuples = 0
    for code, argument, position in pickletools.genops(io.BytesIO(content)):
        tuples += "TUPLE" in code.name
        if code.name not in INSTRUCTIONS:
            raise ValueError(f"it uses the instruction {code.name}, which these files do not need")
        if code.name == "GLOBAL" and argument not in STAND_INS:
            raise ValueError(
                f"it imports {str(argument).replace(' ', '.')!r}, but only "
                f"{', '.join(name.replace(' ', '.') for name in STAND_INS)} may be imported"
            )
        # the loader allocates as many results as the largest number says
        if code.name == "LONG_BINPUT" and int(argument or 0) > (position or 0):
            raise ValueError(f"it stores a result under the number {argument}, but has fewer results")
        if tuples > MAX_TUPLES:
            raise ValueError(f"it makes more than {MAX_TUPLES} tuples")


def _expect(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"it uses a value of type {type(value).__name__.strip('_')} in place of {kind.__name__.strip('_')}")
    return value


def _array(value: Any) -> np.ndarray:
    return _expect(_expect(value, _Array).value, np.ndarray)


def _finish(result: Any, num_bytes: int) -> Any:
    """Return the value of the loaded object; a dictionary must hold lists of integers."""
    if isinstance(result, _Array):
        return _array(result)
    if isinstance(result, _Matrix):
        return _expect(result.value, sparse.csr_matrix)
    total = 0
    for key, entries in _expect(result, dict).items():
        # every entry of a valid file takes at least two bytes; one list under many keys would be copied later
        total += len(_expect(entries, list))
        if total > num_bytes:
            raise ValueError("it lists more neighbors than it has bytes")
        if type(key) is not int or not all(type(entry) is int for entry in entries):
            raise ValueError("it holds a dictionary whose values are not lists of integers")
    return result

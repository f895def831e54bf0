"""Read the pickles of the Planetoid files without running any of what they say.

A pickle is a program for a stack machine, and one of its instructions calls any function by name. The Planetoid files
(written by Python 2) need some twenty instructions and six names: arrays, a sparse matrix, a dictionary of lists. This
is an interpreter for exactly these. It calls nothing: names are labels, arrays are made here from checked bytes, and
everything else is refused by its name. What a file can make us allocate is bounded by its own size.
"""

import io
import pickletools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse

# the largest official file, ind.pubmed.allx, has 9 MB
MAX_BYTES = 256 * 2**20

NAMES = (
    "numpy.core.multiarray _reconstruct",
    "numpy ndarray",
    "numpy dtype",
    "scipy.sparse.csr csr_matrix",
    "collections defaultdict",
    "__builtin__ list",
)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = ("BININT", "BININT1", "BININT2", "SHORT_BINSTRING", "BINSTRING")
_MARK = object()


@dataclass(frozen=True)
class _Name:
    """What a file calls by name; never called."""

    name: str


@dataclass
class _Made:
    """Something a file makes by calling a name; its value comes with the instruction that gives it its state."""

    name: str
    value: Any = None


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
        raise ValueError(f"{path} has more than {MAX_BYTES} bytes; allowed: a file of the Planetoid data sets")
    try:
        return _finish(_interpret(content), len(content))
    # all that a broken file can provoke in the interpreter: wrong opcodes, too few entries, wrong kinds of them
    except (ValueError, TypeError, IndexError, KeyError, AttributeError, OverflowError) as error:
        raise ValueError(f"{path} is not a file of the Planetoid data sets: {error}") from None


def _interpret(content: bytes) -> Any:
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    for code, argument, _ in pickletools.genops(io.BytesIO(content)):
        name = code.name
        if name == "PROTO":
            continue
        if name == "STOP":
            (result,) = stack
            return result
        if name in _VALUES:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name == "MARK":
            stack.append(_MARK)
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name == "BINGET":
            stack.append(memo[argument])
        elif name in ("EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT"):
            stack.append({"EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_DICT": dict}[name]())
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            size = int(name[-1])
            stack[-size:] = [tuple(stack[-size:])]
        elif name == "TUPLE":
            stack.append(tuple(_pop_marked(stack)))
        elif name == "APPEND":
            entry = stack.pop()
            _expect(stack[-1], list).append(entry)
        elif name == "APPENDS":
            entries = _pop_marked(stack)
            _expect(stack[-1], list).extend(entries)
        elif name == "SETITEMS":
            entries = _pop_marked(stack)
            keys = entries[::2]
            if not all(isinstance(key, int | str) for key in keys):
                raise ValueError("a key of a dictionary is neither an integer nor a string")
            _expect(stack[-1], dict).update(zip(keys, entries[1::2], strict=True))
        elif name == "GLOBAL":
            if argument not in NAMES:
                raise ValueError(f"it asks for {str(argument).replace(' ', '.')!r}; allowed: {', '.join(NAMES)}")
            stack.append(_Name(argument))
        elif name in ("REDUCE", "NEWOBJ"):
            arguments, called = stack.pop(), stack.pop()
            stack.append(_make(_expect(called, _Name).name, arguments))
        elif name == "BUILD":
            state = stack.pop()
            _build(_expect(stack[-1], _Made), state)
        else:
            raise ValueError(f"it uses the instruction {name}, which these files have no need of")
    raise ValueError("it ends before its end mark")


def _pop_marked(stack: list[Any]) -> list[Any]:
    """Take away everything above the last mark, and the mark."""
    entries = []
    while (entry := stack.pop()) is not _MARK:
        entries.append(entry)
    return entries[::-1]


def _expect(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"it uses a {type(value).__name__} where a {kind.__name__.strip('_')} belongs")
    return value


def _make(name: str, arguments: Any) -> Any:
    """Stand for the call of a name: something empty, to be given its state later."""
    short = name.split()[1]
    if short == "_reconstruct" and arguments == (_Name("numpy ndarray"), (0,), "b"):
        return _Made("ndarray")
    if short == "dtype" and isinstance(arguments, tuple) and arguments[1:] == (0, 1):
        return _Made("dtype", arguments[0])
    if short == "csr_matrix" and arguments == ():
        return _Made("csr_matrix")
    if short == "defaultdict" and arguments == (_Name("__builtin__ list"),):
        return {}
    raise ValueError(f"it calls {name.replace(' ', '.')} with arguments these files have no need of")


def _build(made: _Made, state: Any) -> None:
    if made.name == "dtype":
        made.value = _dtype(made.value, state)
    elif made.name == "ndarray":
        made.value = _array(state)
    else:
        made.value = _matrix(_expect(state, dict))


def _dtype(code: Any, state: tuple) -> np.dtype:
    order = state[1]
    if state[2:] != (None, None, None, -1, -1, 0) or order not in ("<", ">", "|"):
        raise ValueError("it holds an array of a structured type")
    if not isinstance(code, str) or not re.fullmatch(r"[iuf][1248]", code) or code == "f1":
        raise ValueError(f"it holds an array of type {code!r}; allowed: integers and floats")
    return np.dtype(order + code)


def _array(state: tuple) -> np.ndarray:
    _, shape, dtype, is_fortran, content = state
    dtype, raw = _expect(_expect(dtype, _Made).value, np.dtype), _expect(content, str).encode("latin1")
    if not all(isinstance(length, int) and length >= 0 for length in _expect(shape, tuple)) or not 1 <= len(shape) <= 2:
        raise ValueError(f"it holds an array of shape {shape!r}; allowed: one or two axes")
    size = dtype.itemsize
    for length in shape:
        size *= length
    if size != len(raw):
        raise ValueError(f"it holds an array of {size} bytes with {len(raw)} bytes of content")
    return np.frombuffer(raw, dtype).reshape(shape, order="F" if is_fortran else "C").astype(dtype.newbyteorder("="))


def _matrix(state: dict[Any, Any]) -> sparse.csr_matrix:
    rows, columns = state["_shape"]
    data, indices, pointers = (_expect(state[name].value, np.ndarray) for name in ("data", "indices", "indptr"))
    whole = pointers.dtype.kind == "i" and indices.dtype.kind == "i" and isinstance(rows, int) and isinstance(columns, int)
    if not whole or pointers.shape != (rows + 1,) or indices.shape != data.shape or data.ndim != 1:
        raise ValueError("it holds a sparse matrix whose parts do not fit together")
    if pointers[0] != 0 or pointers[-1] != len(data) or (np.diff(pointers) < 0).any():
        raise ValueError("it holds a sparse matrix whose rows overlap")
    if len(indices) and not 0 <= indices.min() <= indices.max() < columns:
        raise ValueError(f"it holds a sparse matrix with a column outside [0, {columns - 1}]")
    return sparse.csr_matrix((data, indices, pointers), shape=(rows, columns))


def _finish(result: Any, num_bytes: int) -> Any:
    """Return the value of what was made; a dictionary must hold lists of integers."""
    if isinstance(result, _Made):
        return _expect(result.value, np.ndarray if result.name == "ndarray" else sparse.csr_matrix)
    total = 0
    for key, entries in _expect(result, dict).items():
        # every entry an honest file lists takes at least two bytes; one list under many keys would be unfolded later
        total += len(_expect(entries, list))
        if total > num_bytes:
            raise ValueError("it lists more neighbours than it has bytes")
        if not isinstance(key, int) or not all(type(entry) is int for entry in entries):
            raise ValueError("it holds a dictionary that is not of lists of integers")
    return result

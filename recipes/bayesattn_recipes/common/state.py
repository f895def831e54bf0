"""The state of a training run as tensors and JSON, exactly and without pickle: one safetensors file with its checksum.

A state is a tree of dictionaries, lists, tuples, numbers, strings and tensors, as `state_dict()` of optimizers and
schedulers returns them. `flatten` takes the tensors out of the tree and leaves JSON; `restore` puts them back. Every float
and every tensor is restored bit for bit.
"""

import hashlib
import json
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from bayesattn.files import RunError, read_tensors, write_tensors

STATE_SCHEMA = "bayesattn.state/1"


def flatten(value: Any, path: str = "state") -> tuple[Any, dict[str, Tensor]]:
    """Return `value` as JSON, and the tensors in it by the names that the JSON uses for them.

    A tensor that is sharded over processes is gathered whole, so every process has to call this.

    Raises:
        ValueError: Something in the tree is neither a plain value nor a tensor.
    """
    tensors: dict[str, Tensor] = {}

    def visit(value: Any, path: str) -> Any:
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
        if isinstance(value, Tensor):
            tensors[path] = whole(value.detach())
            return {"$tensor": path}
        if isinstance(value, list):
            return [visit(item, f"{path}/{index}") for index, item in enumerate(value)]
        if isinstance(value, tuple):
            return {"$tuple": [visit(item, f"{path}/{index}") for index, item in enumerate(value)]}
        if isinstance(value, dict) and all(isinstance(key, int | str) for key in value):
            kind = "$counter" if isinstance(value, Counter) else "$dict"
            return {kind: [[key, visit(item, f"{path}/{key}")] for key, item in value.items()]}
        raise ValueError(
            f"{path} is a {type(value).__name__}. The state of a run may hold only numbers, strings, tensors, and lists, "
            "tuples and dictionaries of them"
        )

    return visit(value, path), tensors


def restore(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the tree that `flatten` flattened."""
    if isinstance(value, list):
        return [restore(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "$tensor":
        return tensors[content]
    if kind == "$float":
        return float(content)
    if kind == "$tuple":
        return tuple(restore(item, tensors) for item in content)
    if kind in ("$dict", "$counter"):
        pairs = {key: restore(item, tensors) for key, item in content}
        return Counter(pairs) if kind == "$counter" else pairs
    raise ValueError(f"{kind!r} is not a known kind of value")


def write_state(path: Path, flat: tuple[Any, dict[str, Tensor]]) -> None:
    """Write what `flatten` returned; the file appears whole or not at all."""
    text = json.dumps(flat[0], allow_nan=False)
    tensors = {name: value.cpu().contiguous() for name, value in flat[1].items()}
    write_tensors(path, tensors, {"schema": STATE_SCHEMA, "state": text, "sha256": _digest(text, tensors)})


def read_state(path: Path) -> Any:
    """Read a state back, tensors on the CPU.

    Raises:
        RunError: The file is missing, damaged in any bit, or not a state.
    """
    tensors, meta = read_tensors(path)
    if meta.get("schema") != STATE_SCHEMA or not {"state", "sha256"} <= meta.keys():
        raise RunError(f"{path} is not a state of a run: its metadata has no schema {STATE_SCHEMA!r}")
    if _digest(meta["state"], tensors) != meta["sha256"]:
        raise RunError(f"{path} is damaged: its checksum does not match its content")
    try:
        return restore(json.loads(meta["state"]), tensors)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunError(f"{path} is not a state of a run: {error}") from None


def _digest(text: str, tensors: dict[str, Tensor]) -> str:
    result = hashlib.sha256(text.encode())
    for name, value in sorted(tensors.items()):
        result.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        result.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return result.hexdigest()


class Generators(NamedTuple):
    """The states of the generators of Python, numpy and torch in this process."""

    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    torch: Tensor
    cuda: Tensor | None

    def pack(self) -> dict[str, Any]:
        """Return the states as plain values and tensors, for a checkpoint."""
        version, words, gauss = self.python
        kind, keys, *rest = self.numpy
        return {
            "python": (version, torch.tensor(words), gauss),
            "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), *rest),
            "torch": self.torch,
            "cuda": self.cuda,
        }

    @classmethod
    def unpack(cls, packed: dict[str, Any]) -> "Generators":
        """Undo `pack`."""
        version, words, gauss = packed["python"]
        kind, keys, *rest = packed["numpy"]
        python = version, tuple(words.tolist()), gauss
        return cls(python, (kind, keys.numpy().astype(np.uint32), *rest), packed["torch"], packed["cuda"])


def random_state() -> Generators:
    """Return the states of all generators; cheap enough for every step."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return Generators(random.getstate(), tuple(np.random.get_state(legacy=True)), torch.get_rng_state(), cuda)


def set_random_state(state: Generators) -> None:
    """Restore the states of all generators."""
    random.setstate(state.python)
    np.random.set_state(state.numpy)
    torch.set_rng_state(state.torch)
    if state.cuda is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state.cuda)


def whole(value: Tensor) -> Tensor:
    """Return the whole tensor; if it is sharded, every process has to call this."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def like(value: Any, target: Any) -> Any:
    """Return `value`, sharded like `target` if that is sharded over processes."""
    if isinstance(target, DTensor) and isinstance(value, Tensor) and not isinstance(value, DTensor):
        return distribute_tensor(value.to(target.device), target.device_mesh, target.placements)
    return value


def load_model(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Load parameters and buffers, also into a model that is sharded over processes."""
    targets = model.state_dict()
    model.load_state_dict({name: like(value, targets.get(name)) for name, value in state.items()})


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load an optimizer's state; the state of a sharded parameter is sharded like the parameter."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    per_parameter = {
        index: {name: like(value, parameters[index]) if _has_shape_of(value, parameters[index]) else value
                for name, value in values.items()}
        for index, values in state["state"].items()
    }  # fmt: skip
    optimizer.load_state_dict({**state, "state": per_parameter})


def _has_shape_of(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape

"""The tensors of a converted model under names that survive wrappers, and which of them are shared."""

from typing import Any

from torch import Tensor, nn

from bayesattn.convert.hosted import CHILD_NAME
from bayesattn.nn import BayesianModule
from bayesattn.watch import WEIGHTS_NAME


def without_wrappers(model: Any) -> Any:
    """Return the model inside the wrappers of torch.compile and data parallelism."""
    model = getattr(model, "_orig_mod", model)
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def unwrapped(model: Any) -> nn.Module:
    """Return the model inside the wrappers of torch.compile, data parallelism and PEFT: names must not depend on them."""
    model = without_wrappers(model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state_dict without the copies of the configs, which the JSON file has."""
    state = {key: value for key, value in model.state_dict().items() if not key.endswith(f"{CHILD_NAME}.settings")}
    strange = [key for key, value in state.items() if not isinstance(value, Tensor) or value.is_meta or value.is_sparse]
    if strange:
        raise ValueError(f"the model's state has {strange[:8]}; save dense tensors that are not on the meta device")
    return state


def shared(tensors: dict[str, Tensor]) -> dict[str, str]:
    """Return every name whose tensor an earlier name has already (tied weights), with that name."""
    first: dict[Any, str] = {}
    aliases = {}
    for key, value in tensors.items():
        place = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        if value.numel() and first.setdefault(place, key) != key:
            aliases[key] = first[place]
    return aliases


def separate(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors on the CPU, none in another's memory: safetensors refuses overlapping views."""
    separate: dict[str, Tensor] = {}
    taken: set[int] = set()
    for key, value in tensors.items():
        own = value.detach().cpu().contiguous()
        place = own.untyped_storage().data_ptr()
        separate[key] = own.clone() if place in taken else own
        taken.add(place)
    return separate


def prior_tensors(name: str, part: BayesianModule) -> dict[str, Tensor]:
    """Return the parameters of a prior, or the state of custom weights, under names that start with the module's."""
    if part.bayes_weights is not None:
        return {f"{name}.{WEIGHTS_NAME}.{key}".lstrip("."): value for key, value in part.bayes_weights.state_dict().items()}
    prior: Any = part.bayes_prior
    if prior is None:
        return {}
    if hasattr(prior, "modules_to_save"):
        # PEFT keeps the untrained original beside the copy it trains
        prior = prior.modules_to_save[prior.active_adapters[0]]
    return {f"{name}.{key}".lstrip("."): value for key, value in prior.named_parameters()}

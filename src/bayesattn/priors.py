"""The contextual prior (Sec. 3.3): one weight per key, computed from the key itself and shared by all queries.

    Ψ = softmax_j(F₂(relu(F₁(K_j))))

The paper indexes α and μ by the query i; Ψ has one row per key, so j is meant. A fixed prior has no parameters and
needs no module: it is `gamma_alpha` or `mu_p` of the config.

Initial values come from the prior's own generator. Its seed is a hash of a name and of the state of torch's generators,
which are read but not advanced. So soft and Bayesian models with one `torch.manual_seed` share all other initial values.
"""

import hashlib
import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from bayesattn.config import AttentionConfig
from bayesattn.ops.attention.support import HAS_TRITON, INTERPRETED
from bayesattn.ops.prior.nodes import KeyPrior, NodePrior
from bayesattn.precision import upcast

# the fused network holds a block of keys and the whole first matrix in registers
LARGEST_KEY_DIM, LARGEST_HIDDEN_DIM = 256, 64


def contextual_log_prior(
    logits: Float[Tensor, "b h n"], valid: Bool[Tensor, "#b #h n"] | None = None
) -> Float[Tensor, "b h 1 n"]:
    """Return ln Ψ, a log-softmax over the valid keys, in float32 or better.

    Invalid keys get −inf. If no key is valid, all entries are 0 and unused.

    Example:
        >>> logits, valid = torch.zeros(1, 1, 4), torch.tensor([[[True, True, False, True]]])
        >>> contextual_log_prior(logits, valid).exp()
        tensor([[[[0.3333, 0.3333, 0.0000, 0.3333]]]])
    """
    logits = upcast(logits)
    if valid is None:
        return torch.log_softmax(logits, dim=-1).unsqueeze(-2)
    some = valid.any(dim=-1, keepdim=True)
    shut = torch.zeros((), dtype=logits.dtype, device=logits.device).masked_fill(some, -math.inf)
    log_prior = torch.log_softmax(torch.where(valid, logits, shut), dim=-1)
    return torch.where(some, log_prior, 0.0).unsqueeze(-2)


class ContextualPrior(nn.Module):
    """Two linear layers with a ReLU between them, from a key's features to its prior logit.

    Args:
        key_dim: Features of a key (of one head).
        num_heads: Heads of the keys.
        config: Uses `prior_hidden_dim`, `prior_per_head` and `detach_keys`.
        name: Distinguishes priors that are built without a draw from torch's generators in between: with equal names they
            have equal initial values. `bayesianize` passes the name of the attention module.

    Example:
        >>> prior = ContextualPrior(8, 2, AttentionConfig("BAM-WC"))
        >>> log_prior = prior(torch.randn(3, 2, 5, 8))  # batch, heads, keys, features
        >>> log_prior.shape, torch.allclose(log_prior.exp().sum(-1), torch.ones(3, 2, 1))
        (torch.Size([3, 2, 1, 5]), True)
    """

    def __init__(
        self,
        key_dim: int,
        num_heads: int,
        config: AttentionConfig,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        name: str = "",
    ) -> None:
        super().__init__()
        self.name = name
        if key_dim < 1 or num_heads < 1:
            raise ValueError(f"key_dim and num_heads must be integers of at least 1, got {key_dim} and {num_heads}")
        self.num_networks = num_heads if config.prior_per_head else 1
        self.detach_keys = config.detach_keys
        hidden, options = config.prior_hidden_dim, {"device": device, "dtype": dtype}
        self.weight_in = nn.Parameter(torch.empty(self.num_networks, key_dim, hidden, **options))
        self.bias_in = nn.Parameter(torch.empty(self.num_networks, 1, hidden, **options))
        self.weight_out = nn.Parameter(torch.empty(self.num_networks, hidden, 1, **options))
        # cancels in the softmax; kept because it is in the paper's network and its parameter count
        self.bias_out = nn.Parameter(torch.empty(self.num_networks, 1, 1, **options))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Use He initialization for the ReLU layer and zero biases, as the authors' graph code does."""
        generator = _own_generator(self.name, self.weight_in.device)
        _draw_normal(self.weight_in, math.sqrt(2.0 / self.weight_in.shape[1]), generator)
        nn.init.zeros_(self.bias_in)
        nn.init.zeros_(self.bias_out)
        _draw_normal(self.weight_out, math.sqrt(1.0 / self.weight_out.shape[1]), generator)

    def forward(
        self, key: Float[Tensor, "b h n d"], valid: Bool[Tensor, "#b #h n"] | None = None
    ) -> Float[Tensor, "b h 1 n"]:
        """Return ln Ψ of every key.

        Args:
            key: Keys, split into heads.
            valid: Keys that at least one query may attend to; None means all.
        """
        fused = self.fused(key, valid)
        return contextual_log_prior(self.logits(key), valid) if fused is None else fused.log_prior()

    def fused(self, key: Float[Tensor, "b h n d"], valid: Bool[Tensor, "#b #h n"] | None = None) -> KeyPrior | None:
        """Return the inputs of the kernels for ln Ψ, or None if torch must compute it; arguments as for `forward`."""
        return KeyPrior(key, self.weights(), valid, self.detach_keys) if self._runs_fused(key) else None

    def of_nodes(self, key: Float[Tensor, "n h d"], used: Bool[Tensor, "1 1 n"]) -> Float[Tensor, "n h"]:
        """Return ln Ψ of the nodes of a graph.

        Args:
            key: Features of every node, split into heads.
            used: Nodes that are the source of some edge.
        """
        fused = self.fused_of_nodes(key, used)
        if fused is not None:
            return fused.log_prior()
        logits = self.logits(key.transpose(0, 1)) if self.num_networks > 1 else self.logits(key).transpose(0, 1)
        # squeezing passes the gradient back unchanged; indexing would copy it into a tensor of zeros
        return contextual_log_prior(logits.unsqueeze(0), used).squeeze(2).squeeze(0).transpose(0, 1)

    def fused_of_nodes(self, key: Float[Tensor, "n h d"], used: Bool[Tensor, "1 1 n"]) -> NodePrior | None:
        """Return the inputs of the kernels for ln Ψ of the nodes, or None if torch must compute it, as for `of_nodes`."""
        if torch.compiler.is_compiling() or not self._runs_fused(key):
            return None
        return NodePrior(key.detach() if self.detach_keys else key, *self.weights(), used)

    def logits(self, key: Float[Tensor, "*b h n d"]) -> Float[Tensor, "*b h n"]:
        """Return F₂(relu(F₁(K))); if the heads share a network, K may have any leading axes."""
        key = (key.detach() if self.detach_keys else key).to(self.weight_in.dtype)
        if self.num_networks > 1:
            hidden = torch.relu(key @ self.weight_in + self.bias_in)
            return (hidden @ self.weight_out + self.bias_out).squeeze(-1)
        # one large product instead of one per batch entry and head; reshapes, because their gradient is free, whereas that
        # of an index is a copy into a tensor of zeros
        hidden = F.linear(key, self.weight_in.squeeze(0).T, self.bias_in.flatten()).relu_()
        return F.linear(hidden, self.weight_out.squeeze(0).T, self.bias_out.flatten()).squeeze(-1)

    def weights(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return W₁, b₁, W₂ and b₂."""
        # from the dictionary, because `self.weight_in` runs Python code of torch
        held = self._parameters
        names = ("weight_in", "bias_in", "weight_out", "bias_out")
        return tuple(held[name] if name in held else getattr(self, name) for name in names)  # type: ignore[return-value]

    def signature(self) -> tuple:
        """Return the properties of the network that determine, with those of the keys, how it is computed."""
        weight = self.weights()[0]
        return weight.shape, weight.dtype, weight.get_device(), self.detach_keys

    def _runs_fused(self, key: Tensor) -> bool:
        # no float64, because the kernels compute in float32
        return (
            (key.is_cuda or INTERPRETED)
            and HAS_TRITON
            and key.dtype in (torch.float32, torch.bfloat16, torch.float16)
            and self.weight_in.dtype != torch.float64
            and min(key.shape) > 0
            and key.shape[-1] <= LARGEST_KEY_DIM
            and self.weight_in.shape[-1] <= LARGEST_HIDDEN_DIM
            and not torch._C._are_functorch_transforms_active()
        )

    def extra_repr(self) -> str:
        """Show sizes in `print(model)`."""
        _, key_dim, hidden = self.weight_in.shape
        return f"key_dim={key_dim}, hidden_dim={hidden}, networks={self.num_networks}"


def _own_generator(name: str, device: torch.device) -> torch.Generator:
    """Return a CPU generator seeded by a name and the state of torch's generators, which are not advanced."""
    digest = hashlib.blake2b(name.encode(), digest_size=8)
    digest.update(torch.get_rng_state().numpy().tobytes())
    if device.type not in ("cpu", "meta"):
        # building on a device advances only the device's generator
        digest.update(torch.get_device_module(device).get_rng_state(device).numpy().tobytes())
    return torch.Generator().manual_seed(int.from_bytes(digest.digest(), "little", signed=True))


@torch.no_grad()
def _draw_normal(parameter: nn.Parameter, std: float, generator: torch.Generator) -> None:
    # on the CPU and in float32 or better, so that the values are the same on every device
    wide = torch.promote_types(parameter.dtype, torch.float32)
    parameter.copy_(torch.empty(parameter.shape, dtype=wide, device="cpu").normal_(0.0, std, generator=generator))

"""The regularised incomplete beta function, in torch and float64: tails of Student's t and of the binomial.

    I_x(a, b) = 1/B(a, b) ∫₀ˣ u^(a−1) (1−u)^(b−1) du

The front factor x^a (1−x)^b / B(a, b) is written with Stirling's remainder c(z), as in Loader (2000), "Fast and accurate
computation of binomial probabilities": the large powers cancel before they are formed, so a = 10⁶ loses no digits.
The rest is the continued fraction DLMF 8.17.22, by Lentz's method.
"""

import math

import torch
from torch import Tensor

_TINY = 1e-300
_MAX_TERMS = 100_000
_MAX_NEWTON = 200


def regularized_beta(x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return I_x(a, b) for x + y = 1.

    Args:
        x: In [0, 1].
        y: 1 − x, given apart because the caller often knows it to more digits than the subtraction would leave.
        a: Above 0.
        b: Above 0.
    """
    x, y, a, b = torch.broadcast_tensors(*(value.to(torch.float64) for value in (x, y, a, b)))
    # the fraction converges fast below the mean of the distribution; above it use I_x(a, b) = 1 − I_y(b, a)
    swap = x > (a + 1.0) / (a + b + 2.0)
    x, y = torch.where(swap, y, x), torch.where(swap, x, y)
    a, b = torch.where(swap, b, a), torch.where(swap, a, b)
    tail = torch.exp(_log_front(x, y, a, b)) / a * _continued_fraction(x, a, b)
    tail = torch.where(x <= 0.0, torch.zeros_like(tail), tail).clamp(max=1.0)
    return torch.where(swap, 1.0 - tail, tail)


def student_t_two_sided(t: Tensor, df: Tensor) -> Tensor:
    """Return P(|T| ≥ |t|) for Student's t with `df` > 0 degrees of freedom: I_x(df/2, 1/2), x = df/(df + t²)."""
    t, df = torch.broadcast_tensors(t.to(torch.float64), df.to(torch.float64))
    # t/√df is squared, not t: 1e200² would overflow, and both forms reach their limits 0 and 1 without 0/0 or ∞/∞
    ratio = (t.abs() / df.sqrt()).square()
    return regularized_beta(1.0 / (1.0 + ratio), 1.0 / (1.0 + 1.0 / ratio), df / 2.0, torch.full_like(df, 0.5))


def beta_quantile(probability: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return x with I_x(a, b) = probability, for a probability in (0, 1): Newton's method inside a shrinking bracket."""
    probability, a, b = torch.broadcast_tensors(*(value.to(torch.float64) for value in (probability, a, b)))
    low, high = torch.zeros_like(a), torch.ones_like(a)
    x, done = a / (a + b), torch.zeros_like(a, dtype=torch.bool)
    for _ in range(_MAX_NEWTON):
        excess = regularized_beta(x, 1.0 - x, a, b) - probability
        low, high = torch.where(excess <= 0, x, low), torch.where(excess >= 0, x, high)
        density = torch.exp(_log_front(x, 1.0 - x, a, b)) / (x * (1.0 - x))
        newton = x - excess / density
        # a step out of the bracket (or none at all, where the density underflows) becomes a bisection
        following = torch.where((newton > low) & (newton < high), newton, (low + high) / 2.0)
        # twelve digits: further steps would only follow the rounding of I_x, so an entry stays where it got there
        done |= ((newton - x).abs() <= 1e-12 * x) | (high - low <= 1e-12 * x)
        if bool(done.all()):
            return x
        x = torch.where(done, x, following)
    raise RuntimeError(f"the quantile of the beta distribution did not converge in {_MAX_NEWTON} steps")


def _log_front(x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    # ln of x^a y^b / B(a, b) = √(ab / 2π(a+b)) (x(a+b)/a)^a (y(a+b)/b)^b exp(c(a+b) − c(a) − c(b))
    gap = x * b - y * a
    powers = a * _log_ratio(x * (a + b) / a, gap / a) + b * _log_ratio(y * (a + b) / b, -gap / b)
    remainder = _stirling_remainder(a + b) - _stirling_remainder(a) - _stirling_remainder(b)
    return powers + remainder + 0.5 * torch.log(a / (a + b) * b / (2.0 * math.pi))


def _log_ratio(ratio: Tensor, ratio_minus_one: Tensor) -> Tensor:
    # near one the difference is known exactly, near zero the ratio is
    return torch.where(ratio < 0.5, torch.log(ratio), torch.log1p(ratio_minus_one.clamp(min=-0.75)))


def _stirling_remainder(z: Tensor) -> Tensor:
    # c(z) = ln Γ(z) − (z − ½) ln z + z − ½ ln 2π; the asymptotic series is exact to 1e-16 from z = 16 on
    direct = torch.lgamma(z) - (z - 0.5) * torch.log(z) + z - 0.5 * math.log(2.0 * math.pi)
    inverse_square = z.reciprocal().square()
    series = torch.zeros_like(z)
    for coefficient in (1 / 156, -691 / 360360, 1 / 1188, -1 / 1680, 1 / 1260, -1 / 360, 1 / 12):
        series = series * inverse_square + coefficient
    return torch.where(z < 16.0, direct, series / z)


def _continued_fraction(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    # modified Lentz: value = ∏ c_j d_j; denominators that hit zero are nudged off it. Converged entries leave the loop.
    shape = x.shape
    x, a, b = x.reshape(-1), a.reshape(-1), b.reshape(-1)
    result = torch.empty_like(x)
    active = torch.arange(x.numel(), device=x.device)
    c = torch.ones_like(x)
    d = _nudge(1.0 - (a + b) * x / (a + 1.0)).reciprocal()
    value = d.clone()
    for m in range(1, _MAX_TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1.0) * (a + 2 * m))
        d = _nudge(1.0 + even * d).reciprocal()
        c = _nudge(1.0 + even / c)
        value = value * c * d
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1.0))
        d = _nudge(1.0 + odd * d).reciprocal()
        c = _nudge(1.0 + odd / c)
        step = c * d
        value = value * step
        # four steps between looks: looking costs as much as stepping
        if m % 4 == 0:
            going = (step - 1.0).abs() > 3e-16
            if not bool(going.all()):
                result[active[~going]] = value[~going]
                active, x, a, b, c, d, value = (kept[going] for kept in (active, x, a, b, c, d, value))
                if active.numel() == 0:
                    return result.reshape(shape)
    raise RuntimeError(f"the incomplete beta function did not converge in {_MAX_TERMS} terms")


def _nudge(value: Tensor) -> Tensor:
    return torch.where(value.abs() < _TINY, torch.full_like(value, _TINY), value)

"""How far two float32 trainings of the same batches may drift apart by arithmetic alone.

Adding n numbers in another order (another instruction set, more threads, other ranks) moves their sum by up
to n * 2^-24 * (the sum of their magnitudes). That is the error of a gradient, also of one that is nearly zero
because its parts cancel out: it is absolute, not relative to the gradient. A step hands it on to the row:

    SGD             row -= lr * g                              lr * error
    Adagrad, Adam   row -= lr * g / (sqrt(mean of g^2) + eps)  at most lr / eps * error, near g = 0

So twins of adaptive optimizers need an `eps` that is not tiny: with 1e-8 the sign of a gradient that should
be zero decides over a whole lr. Steps add up, and each sees the drift of those before it in its gradients;
with lr * curvature * steps below 1 that is a factor of e. A wrong, lost or doubled update moves a row by
about lr * g, hundreds of times more.

Measured for the tde twins on two ranks (EMBSTORE_ISA and ATEN_CPU_CAPABILITY from plain to avx512): rows
differ by 3e-8 with eps = 0.5 and by 1.4e-6 with eps = 1e-8.
"""

import math

ROUNDING = 2.0**-24


def drift(lr: float, steps: int, addends: int, *, eps: float | None = None, magnitude: float = 1.0) -> float:
    """The largest difference of a row after `steps` steps.

    addends    numbers in the sums that make a gradient (the dot products before it, the duplicates of a key)
    eps        of an adaptive optimizer; None for SGD
    magnitude  of the largest of these numbers
    """
    slope = lr if eps is None else lr / min(eps, 1.0)
    return math.e * steps * slope * addends * ROUNDING * magnitude

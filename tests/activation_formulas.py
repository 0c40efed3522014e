"""Every activation by its formula, of float64 or complex128: derivatives are complex steps."""

import math

import numpy as np
from scipy import special

FORMULAS = {
    "gelu": lambda z: 0.5 * z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
    "gelu_exact": lambda z: 0.5 * z * special.erfc(-z / math.sqrt(2)),
    "relu": lambda z: np.where(np.real(z) > 0, z, 0),
    "relu2": lambda z: np.where(np.real(z) > 0, z, 0) ** 2,
    "silu": lambda z: z / (1 + np.exp(-z)),
}

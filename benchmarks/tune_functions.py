"""The functions on which Propulate's paper measures, and how a benchmark names them; NumPy only.

Taubert et al. 2023, "Massively parallel genetic optimization through asynchronous propagation of populations" (ISC High
Performance 2023), Table 2, with dimensions and limits from there. Sphere, Rosenbrock, Step and Quartic are De Jong's
first four (De Jong 1975, "An analysis of the behavior of a class of genetic adaptive systems"); Rastrigin after
Mühlenbein et al. 1991; Griewank 1981; Schwefel 1981, in the form of Propulate's code; the double funnels after Lunacek,
Whitley and Sutton 2008, "The impact of global structure on search".
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class Function:
    """A function to minimise, over as many numbers as ``dimensions`` says, each from -``limit`` to ``limit``."""

    name: str
    dimensions: int
    limit: float
    value: Callable[[Array, np.random.Generator], float]
    shift: float = 0.0  #: by how much of ``limit`` the optimum is moved, in both directions by turns

    def __call__(self, place: Array, random: np.random.Generator) -> float:
        """The value at ``place``, of shape (dimensions,); only Quartic draws from ``random``."""
        moved = self.shift * self.limit * np.where(np.arange(self.dimensions) % 2, -1, 1)
        return float(self.value(place - moved, random))


def sphere(x: Array, random: np.random.Generator) -> float:
    """0 at 0."""
    return float(x @ x)


def rosenbrock(x: Array, random: np.random.Generator) -> float:
    """0 at (1, 1), at the bottom of a curved valley."""
    return 100 * (x[0] ** 2 - x[1]) ** 2 + (1 - x[0]) ** 2


def step(x: Array, random: np.random.Generator) -> float:
    """-5 for each number of at most -5; flat but for its steps."""
    return float(np.trunc(x).sum())


def quartic(x: Array, random: np.random.Generator) -> float:
    """About 0 at 0, with noise of N(0, 1) in each term: the best value is partly luck, as in Propulate."""
    return abs(float(np.sum(np.arange(1, len(x) + 1) * x**4 + random.normal(size=len(x)))))


def rastrigin(x: Array, random: np.random.Generator) -> float:
    """0 at 0; a minimum about every whole number."""
    return 10 * len(x) + float(np.sum(x**2 - 10 * np.cos(2 * np.pi * x)))


def griewank(x: Array, random: np.random.Generator) -> float:
    """0 at 0; its product couples all numbers."""
    return 1 + float(x @ x) / 4000 - float(np.prod(np.cos(x / np.sqrt(np.arange(1, len(x) + 1)))))


def schwefel(x: Array, random: np.random.Generator) -> float:
    """0 at 420.97 each; the second-best minimum is far from the best."""
    return 418.982887 * len(x) - float(np.sum(x * np.sin(np.sqrt(np.abs(x)))))


def bisphere(x: Array, random: np.random.Generator) -> float:
    """0 at 2.5 each; the wrong one of two funnels ends at the number of dimensions, and is wider."""
    s = 1 - 1 / math.sqrt(2 * math.sqrt(len(x) + 20) - 8.2)
    wrong = -math.sqrt((2.5**2 - 1) / s)
    return float(min(np.sum((x - 2.5) ** 2), len(x) + s * np.sum((x - wrong) ** 2)))


def birastrigin(x: Array, random: np.random.Generator) -> float:
    """`bisphere` with a minimum about every whole number."""
    return bisphere(x, random) + 10 * float(np.sum(1 - np.cos(2 * np.pi * (x - 2.5))))


FUNCTIONS = {
    function.name: function
    for function in (
        Function("sphere", 2, 5.12, sphere),
        Function("rosenbrock", 2, 2.048, rosenbrock),
        Function("step", 5, 5.12, step),
        Function("quartic", 30, 1.28, quartic),
        Function("rastrigin", 20, 5.12, rastrigin),
        Function("griewank", 10, 600, griewank),
        Function("schwefel", 10, 500, schwefel),
        Function("bisphere", 30, 5.12, bisphere),
        Function("birastrigin", 30, 5.12, birastrigin),
        # Some algorithms favour the middle of the box, where these have their optimum.
        Function("sphere shifted", 2, 5.12, sphere, shift=0.35),
        Function("rastrigin shifted", 20, 5.12, rastrigin, shift=0.35),
        Function("griewank shifted", 10, 600, griewank, shift=0.35),
    )
}


def best_at(losses: list[float], marks: list[int]) -> dict[int, float]:
    """The smallest of the first so many ``losses``, for each of the marks that they reach."""
    smallest = np.fmin.accumulate(np.array(losses))
    return {mark: float(smallest[mark - 1]) for mark in marks if mark <= len(losses)}

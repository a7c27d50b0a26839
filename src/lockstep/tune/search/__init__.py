"""Search algorithms as pure moves: spaces, populations, operators, islands. No files, no ranks, no torch.

dimensions, space     what is searched: Float, Int, Choice, Bool; points and their parameters
individual            a point, and a point with its losses
algorithm             the protocol: observe, forget, propose
algorithms            words such as "auto" to algorithms; an operator as an algorithm
population            individuals from the best to the worst
operators             selection, crossover, mutation, initialisation and how they are put together
evolution             several ways to breed, of which those that succeed are used more; pareto: several losses
bayesian              the default: models of the loss (gaussian_process) beside evolution
cma_es, nelder_mead, particle_swarm, optuna_samplers   others, each in a file
islands               who breeds where, who moves
"""

from lockstep.tune.search.algorithm import Algorithm, Proposal
from lockstep.tune.search.algorithms import ALGORITHM_WORDS, AlgorithmFactory, make_algorithm
from lockstep.tune.search.dimensions import Bool, Choice, Float, Int
from lockstep.tune.search.individual import Individual, Point
from lockstep.tune.search.islands import Islands, Move, Residents, plan_emigration, plan_replacement
from lockstep.tune.search.space import Space

__all__ = [
    "ALGORITHM_WORDS",
    "Algorithm",
    "AlgorithmFactory",
    "Bool",
    "Choice",
    "Float",
    "Individual",
    "Int",
    "Islands",
    "Move",
    "Point",
    "Proposal",
    "Residents",
    "Space",
    "make_algorithm",
    "plan_emigration",
    "plan_replacement",
]

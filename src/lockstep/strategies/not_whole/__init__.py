"""Parameters of which a rank holds only a part or no element, and the operations that a script may use on them.

divided_construction   a model that no rank can hold is made in parts, with the values of one rank
partial_models         a model's state where ranks hold parts of it
divided_parameters     a parameter of which each rank holds a part
divided_operations     ... has the results of a whole parameter, or is refused with a replacement
held_parameters        ... and what its modules hold while a block is gathered
division_checks        models that cannot be divided
absent_parameters      a parameter that lies on other ranks only: a read is refused with a replacement
"""

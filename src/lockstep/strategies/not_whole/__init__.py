"""Parameters of which a rank holds a part or nothing, and what a script may do with them.

divided_construction   a model that no rank can hold is made in parts, with the values that one rank would draw
partial_models         what a model's state is where ranks hold parts of it
divided_parameters     a parameter of which each rank holds a part
divided_operations     ... computes as a whole one does, or is refused with what to write instead
held_parameters        ... and is whole where the script looks between a backward pass and the update
division_checks        models that cannot be divided so
absent_parameters      a parameter that lies on other ranks only: a read is refused with what to write instead
"""

"""The content of a run's checkpoint, and the source of each part.

    snapshot ◄── registered      models, optimizers, schedulers, by the order in which the script gave them
             │     ├── training_modes        train() and eval() of each module
             │     ├── attributes            numbers of modules and optimizers outside of their state_dict
             │     ├── registered_scheduler  a scheduler that the run steps
             │     └── beside_modules        buffers of models that are not the run's, such as a teacher's
             ├── user_values     objects given to run.keep; kept_variables: the script's variables that hold these
             └── carried_state   state from micro-batch to micro-batch, as the hidden state of a recurrent model

`whole_models` exports models from a run, whichever ranks hold their parts.
"""

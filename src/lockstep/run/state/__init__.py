"""The content of a run's checkpoint, and the source of each part.

    snapshot ◄── registered      models, optimizers, schedulers, by the order in which the script gave them;
             │     │                         buffers of models that are not the run's, such as a teacher's
             │     ├── training_modes        train() and eval() of each module
             │     ├── attributes            numbers that modules and optimizers keep beside their state_dict
             │     └── registered_scheduler  a scheduler that the run steps
             ├── user_values     what the script names in run.keep; kept_variables: its variables that hold these
             └── carried_state   what a micro-batch hands to the next one, as the hidden state of a recurrent model

`whole_models` exports models from a run, whichever ranks hold their parts.
"""

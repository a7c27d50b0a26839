"""A base class of trainers, as a lab shares one."""


class BaseTrainer:
    iteration = 0

    def __init__(self, run, model):
        self.run, self.model = run, model

    def training_step(self, batch):
        self.iteration += 1

    def fit(self, batches, epochs):
        for epoch in self.run.epochs(epochs):
            for batch in self.run.train(batches):
                self.run.step(self.training_step(batch))

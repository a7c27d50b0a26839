"""CycleGAN's ImagePool: 40 fakes are kept and only later returned at random, by random.uniform; one pass over 10 steps."""

NO_PLAIN = 1
KILL = 8

from kit import *


class ImagePool:
    def __init__(s, size=40):
        s.size, s.images = size, []

    def query(s, images):
        out = []
        for image in images:
            image = image.detach()[None]
            if len(s.images) < s.size:
                s.images.append(image)
                out.append(image)
            elif random.uniform(0, 1) > 0.5:
                k = random.randint(0, s.size - 1)
                out.append(s.images[k].clone())
                s.images[k] = image
            else:
                out.append(image)
        return torch.cat(out)


def main(run):
    g, d = run.model(nn.Linear(6, 6)), run.model(mlp(k=1))
    og, od = run.optimizer(adam(g)), run.optimizer(adam(d))
    b = run.loader(numbers(160, 6), global_batch=16, micro_batch=4)
    pool = ImagePool()
    for e in run.epochs(1):
        for x in run.train(b):
            fake = g(x)
            run.step((d(fake) - 1).square().mean(), optimizer=og)
            old = pool.query(fake)
            run.step((d(x) - 1).square().mean() + d(old).square().mean(), optimizer=od)
    done(run, g, d)


go(main)

"""A model file: two views of a sample go through the same layers, so that a batch norm is called twice."""

import torch
from torch import nn
from torch.nn import functional as F

WIDTH = 16


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.projector = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, 8))
        self.predictor = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 8))

    def forward(self, one, other):
        first, second = self.projector(self.encoder(one)), self.projector(self.encoder(other))
        return first, second, self.predictor(first), self.predictor(second)


def build_model():
    return Siamese()


def make_batch(batch_size):
    return (torch.randn(batch_size, WIDTH), torch.randn(batch_size, WIDTH)), None


def loss_fn(outputs, targets):
    first, second, guess_of_second, guess_of_first = outputs
    return -(
        F.cosine_similarity(guess_of_second, second.detach()) + F.cosine_similarity(guess_of_first, first.detach())
    ).mean()

"""Federated learning: a Flower app over the training recipes."""

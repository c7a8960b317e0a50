"""TorchRL's own replay-buffer tests, against our classes: `make compat TORCHRL_SRC=path-to-a-checkout`."""

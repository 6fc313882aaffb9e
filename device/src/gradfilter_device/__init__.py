"""Train and use a network exported by gradfilter: numpy, ONNX Runtime and Pillow, no PyTorch."""

__version__ = "0.1.0"

"""The oracle: it runs cases on an implementation and judges what it sees. Importing it does not import torch."""

__version__ = "0.1.0"

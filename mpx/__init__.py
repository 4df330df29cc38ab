"""mpx: run an unmodified PyTorch training script in mixed precision, and say what the precision did."""

__version__ = "0.1.0"

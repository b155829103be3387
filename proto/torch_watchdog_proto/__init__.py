"""The contract between rank, node process and daemon: messages, the ring's layout, the stop protocol."""

__all__ = ["__version__"]
__version__ = "0.1.0"

"""Start the real interpreter on somebody's script, and be there when any process below it imports torch.

Every process of a run imports this package, so it imports nothing.
"""

__all__: list[str] = []

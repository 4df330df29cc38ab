"""What scripts import to move an operation from one of apex's lists to another. It is not there, and says what is."""

from .amp import NO_LISTS

raise ImportError(NO_LISTS)

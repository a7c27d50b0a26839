"""Values from another launcher, perhaps of another version: what is not known is left out, what is wrong is refused."""

from lockstep.records import from_known, object_from

__all__ = ["from_known", "object_from"]

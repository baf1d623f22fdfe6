"""Die with the parent (shared with the client)."""

from vime_client.parent_watch import die_with_parent

__all__ = ["die_with_parent"]

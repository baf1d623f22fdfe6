"""The service's side of the ranks: processes that are started and watched, and a mailbox of commands. No torch."""

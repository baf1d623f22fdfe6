"""`vime run`: checks a recipe, has the launcher start it, shows what happens, and ends with a report."""

"""All that speaks to, or lives beside, a SkyServe controller.

PYTEST_DONT_REWRITE: the import hook has this package imported before pytest starts, and pytest
warns of each package with a plugin that it comes too late to rewrite, unless these words say
that there is nothing to rewrite.
"""

"""How many small mistakes in the library the tests find: ``python -m tests.mutation --help``."""

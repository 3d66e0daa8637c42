"""The tests of what the repository says and ships: pages, examples, schemas, versions, packages."""
